"""``styrax launch``: several processes of one command on this machine, or a file that starts them on a cluster."""

from __future__ import annotations

import argparse
import sys

from styrax.core import UsageError

HELP = "start several processes of a command on this machine, or print a template for a cluster"

TEMPLATES = ("slurm", "jobset", "skypilot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-n", "--processes", type=int, default=1, metavar="N", help="how many processes (default: 1)")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D", help="devices of each: CPU devices, or accelerators in order"
    )
    parser.add_argument(
        "--template", choices=TEMPLATES, help="print a file for a scheduler, with the command in it, and start nothing"
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a command of styrax by its name, or any program"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if all processes did, else the status of the one that failed first."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    for name, value in (("-n", args.processes), ("--devices-per-process", args.devices_per_process)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: expected 1 or more")

    from styrax.train.launch import launch, meaning, template

    if args.template:
        print(template(args.template, words, args.processes), end="")
        return 0
    ended = launch(words, args.processes, devices=args.devices_per_process)
    if ended.first is not None and ended.code != 130:
        print(
            f"error: process {ended.first} of {args.processes} {meaning(ended.code)}, and the others were ended",
            *(["its last lines:", *(f"  {line}" for line in ended.lines)] if ended.lines else []),
            sep="\n", file=sys.stderr,
        )  # fmt: skip
    return ended.code
