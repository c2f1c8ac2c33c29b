"""``styrax report``: the numbers of runs, and a page that shows them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from styrax.core import UserError
from styrax.core.config import find_schema, read_config
from styrax.train.interrupts import Interrupts
from styrax.train.resume import flat
from styrax.train.rundir import RunDir

HELP = "write a run's report, or compare several runs, and print their numbers"

TOGETHER = Path("comparison.html")
"""Where several runs are compared, unless it is said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"page to write (default: report.html of the run, or {TOGETHER})"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON: an object, or a list of them")


def run(args: argparse.Namespace) -> int:
    """Works on runs that are finished, interrupted or still going; the numbers need no place to write."""
    with Interrupts(command=True) as interrupts, interrupts.stopping("before the report was written"):
        return _report([RunDir(path) for path in args.run_dirs], args.out, args.json)


def _report(runs: list[RunDir], out: Path | None, as_json: bool) -> int:
    for folder in runs:
        folder.require()

    from styrax.train.report import every_label, labels, rows, summarise, write_comparison, write_report

    resolved = [read_config(find_schema("train"), str(folder.config), []) for folder in runs]
    summaries = [summarise(folder) for folder in runs]
    if as_json:
        print(json.dumps(summaries if len(runs) > 1 else summaries[0], allow_nan=False))
    else:
        _print(labels(runs) if len(runs) > 1 else [], every_label(summaries), [dict(rows(each)) for each in summaries])
    target = out or (TOGETHER if len(runs) > 1 else runs[0].report)
    try:
        if len(runs) > 1:
            configs = [flat(each.to_dict()) for each in resolved]
            write_comparison(runs, target, configs=configs, summaries=summaries)
        else:
            write_report(runs[0], changed=resolved[0].to_toml(all=False), summary=summaries[0], out=out)
    except OSError as error:
        raise UserError(
            f"the numbers are complete, but the report cannot be written: {error.strerror or error} "
            f"({error.filename or target}). Make the folder writable, or name a file elsewhere with --out"
        ) from error
    if not as_json:
        print(f"{'report':<50}{target}")
    return 0


def _print(names: list[str], every: list[str], tables: list[dict[str, str]]) -> None:
    """Print a column for each run."""
    lines: list[list[Any]] = [["", *names]] if names else []
    lines += [[label, *(table.get(label, "n/a") for table in tables)] for label in every]
    widths = [max(len(line[i]) for line in lines) + 2 for i in range(1, len(tables) + 1)]
    for line in lines:
        print(f"{line[0]:<50}" + "".join(f"{cell:<{width}}" for cell, width in zip(line[1:], widths)).rstrip())
