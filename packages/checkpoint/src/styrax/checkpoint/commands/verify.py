"""`styrax checkpoint verify`: every file against its size and checksum."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from styrax.checkpoint.commands.folder import all_steps, find_checkpoint, find_folder
from styrax.checkpoint.manifest import step_name
from styrax.checkpoint.verify import verify

HELP = "compare every file with its size and checksum; exit code 1 if one is damaged, or none is there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run, or the folder of its checkpoints")
    parser.add_argument("step", metavar="STEP", type=int, nargs="?", help="default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Verify them."""
    directory = find_folder(args.directory)
    steps = all_steps(directory)
    if args.step is not None:
        find_checkpoint(directory, args.step)
        steps = [args.step]
    found = {step: verify(directory / step_name(step)) for step in steps}
    if args.json:
        print(json.dumps([{"step": step, "problems": problems} for step, problems in found.items()]))
    else:
        for step, problems in found.items():
            print(f"{step:>10}  {'ok' if not problems else 'damaged'}")
            for problem in problems:
                print(f"{'':>12}{problem}")
        if not found:
            print(f"no checkpoints in {directory}")
    return 1 if any(found.values()) or not found else 0
