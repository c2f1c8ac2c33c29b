"""`styrax checkpoint gc`: delete or put back what writers and exports left that were killed."""

from __future__ import annotations

import argparse
from pathlib import Path

from styrax.checkpoint.commands.arguments import add_json, print_json
from styrax.checkpoint.errors import sized
from styrax.checkpoint.leftovers import leftovers, sweep
from styrax.checkpoint.locate import find

HELP = "delete or put back what writers and exports left that were killed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="a run, or the folder of its checkpoints or exports")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Put the folder in order."""
    directory = find(args.directory).directory
    folders = dict.fromkeys([directory, Path(args.directory)] if Path(args.directory).is_dir() else [directory])
    found = [leftover for folder in folders for leftover in leftovers(folder)]
    if not args.dry_run:
        found = sweep(directory, found)
    freed = sum(leftover.bytes for leftover in found if leftover.fate == "delete")
    if args.json:
        print_json({"directory": directory, "found": found, "bytes": freed, "dry_run": args.dry_run})
        return 0
    would = "would " if args.dry_run else ""
    words = {"delete": f"{would}delete" + "d" * (not would), "put back": f"{would}put back", "keep": "kept"}
    for leftover in found:
        why = ", it changed within the hour: an export may be going on" if leftover.fate == "keep" else ""
        print(f"{words[leftover.fate]} {leftover.path}, {sized(leftover.bytes)}{why}")
    if not found:
        print(f"nothing was left behind in {directory}")
    elif freed:
        print(f"{sized(freed)} {'would be ' if would else ''}freed")
    return 0
