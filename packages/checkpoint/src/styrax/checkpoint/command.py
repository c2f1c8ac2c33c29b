"""`styrax checkpoint`: look into checkpoints and carry arrays in and out; a file in `commands` for each subcommand."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

HELP = "list, show and verify checkpoints, export and import arrays"

#: Subcommand -> its module; `import` is no name that Python could import.
SUBCOMMANDS = {"list": "list", "show": "show", "verify": "verify", "export": "export", "import": "import_"}
_ALIASES = {"list": ["ls"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name in SUBCOMMANDS:
        module = _load(name)
        sub = commands.add_parser(name, aliases=_ALIASES.get(name, []), help=module.HELP, description=module.HELP)
        module.add_arguments(sub)
        sub.set_defaults(action=name)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand.

    Returns:
        The exit code: 1 if `verify` found damage, or nothing to verify.

    Raises:
        CheckpointError: What was named is not there, is damaged, or cannot be done.
    """
    return _load(args.action).run(args)


def _load(name: str) -> Any:
    return importlib.import_module(f"styrax.checkpoint.commands.{SUBCOMMANDS[name]}")
