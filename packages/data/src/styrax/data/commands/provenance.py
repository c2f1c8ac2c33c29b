"""`styrax data provenance`: which stretches of which documents a row of a step was made of."""

from __future__ import annotations

import argparse
import dataclasses
import json

from styrax.data.commands.select import add_arguments as add_data
from styrax.data.commands.select import chosen

HELP = "say which documents a row of a step was made of"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_data(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step")
    parser.add_argument("--row", type=int, required=True, metavar="R", help="the row")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    spans = [dataclasses.asdict(span) for span in chosen(args).provenance(args.step, args.row)]
    if args.json:
        print(json.dumps(spans, ensure_ascii=False))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("column", "length", "source", "document", "index", "from target", box=None)
    for span in spans:
        names = ("column", "length", "source", "document", "index", "start")
        table.add_row(*(str(span[name]) for name in names))
    Console().print(table)
    return 0
