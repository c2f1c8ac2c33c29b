"""`styrax optim`: what optimizers there are, what they do to a model and weigh; a file in `commands` for each."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

HELP = "list the optimizers, show what one does to each parameter, what its state weighs, and check a transfer"

SUBCOMMANDS = ("list", "show", "memory", "coordcheck")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="optim_command", required=True, metavar="COMMAND")
    for name in SUBCOMMANDS:
        module = _load(name)
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    return _load(args.optim_command).run(args)


def _load(name: str) -> Any:
    return importlib.import_module(f"styrax.optim.commands.{name}")
