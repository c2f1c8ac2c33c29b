"""`styrax data diff`: what two stores have in common, and what not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "show how two stores differ; exit code 1 if they do"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("one", type=Path, metavar="A", help="a token store")
    parser.add_argument("other", type=Path, metavar="B", help="another")
    parser.add_argument("--list", type=int, default=20, metavar="N", help="name at most N documents (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compare; 0 if both hold the same."""
    from styrax.data.store import TokenStore
    from styrax.data.store.diff import diff_stores

    report = diff_stores(TokenStore(args.one), TokenStore(args.other), listed=args.list)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _show(report)
    return 0 if report["same"] else 1


def _show(report: dict) -> None:
    from rich.console import Console
    from rich.pretty import Pretty

    Console().print(Pretty(report, expand_all=True))
