"""``styrax report``: the numbers of a run, and its report made anew."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from styrax.core import UserError
from styrax.core.config import find_schema, read_config
from styrax.train.interrupts import Interrupts
from styrax.train.rundir import RunDir

HELP = "write a run's report and print its numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Works on a run that is finished, interrupted or still going; the numbers need no place to write."""
    with Interrupts(command=True) as interrupts, interrupts.stopping("before the report was written"):
        return _report(args)


def _report(args: argparse.Namespace) -> int:
    folder = RunDir(args.run_dir)
    folder.require()

    from styrax.train.report import rows, summarise, write_report

    resolved = read_config(find_schema("train"), str(folder.config), [])
    summary = summarise(folder)
    if args.json:
        print(json.dumps(summary, allow_nan=False))
    else:
        for label, value in rows(summary):
            print(f"{label:<50}{value}")
    try:
        write_report(folder, changed=resolved.to_toml(all=False), summary=summary)
    except OSError as error:
        raise UserError(
            f"the numbers are complete, but the report cannot be written: {error.strerror or error} "
            f"({error.filename or folder.path}). Make the run's folder writable, or report on a copy of it"
        ) from error
    if not args.json:
        print(f"{'report':<50}{folder.report}")
    return 0
