"""`styrax data`: build token stores, look into them, check them; a file in `commands` for each subcommand."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

HELP = "build, inspect, measure, compare and verify token stores"

SUBCOMMANDS = ("build", "chat", "inspect", "stats", "provenance", "verify", "merge", "diff")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    for name in SUBCOMMANDS:
        module = _load(name)
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    return _load(args.data_command).run(args)


def _load(name: str) -> Any:
    return importlib.import_module(f"styrax.data.commands.{name}")
