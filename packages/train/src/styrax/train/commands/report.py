"""``styrax report``: the numbers of a run, and its report made anew."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from styrax.core.config import find_schema, read_config
from styrax.train.rundir import RunDir

HELP = "write a run's report and print its numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Works on a run that is finished, interrupted or still going."""
    folder = RunDir(args.run_dir)
    folder.require()

    from styrax.train.report import rows, write_report

    resolved = read_config(find_schema("train"), str(folder.config), [])
    with folder.writing():
        summary = write_report(folder, changed=resolved.to_toml(all=False))
    if args.json:
        print(json.dumps(summary))
    else:
        for label, value in rows(summary):
            print(f"{label:<50}{value}")
        print(f"{'report':<50}{folder.report}")
    return 0
