"""The command-line arguments by which every command takes a configuration."""

import argparse
from pathlib import Path

from styrax.core.config.schema import Resolved, find_schema, read_config


def add_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add `NAME|FILE` (as `args.config`) and `a.b=value ...` (as `args.overrides`) to a command.

    Args:
        parser: The command's parser.
        optional: Whether the name may be left out, which gives `None`.
    """
    parser.add_argument(
        "config",
        metavar="NAME|FILE",
        nargs="?" if optional else None,
        help="a recipe's name, or a file that ends in .toml",
    )
    parser.add_argument("--schema", default="train", help="which kind of run it is for (default: train)")
    parser.add_argument(
        "overrides",
        metavar="a.b=value",
        nargs="*",
        default=[],
        help="set a key over the file; the value is TOML, a word needs no quotes",
    )


def from_arguments(args: argparse.Namespace) -> Resolved:
    """Resolve what `add_arguments` added.

    Raises:
        UsageError: Every mistake in the file and the overrides.
    """
    source, overrides = args.config, list(args.overrides)
    if source is not None and "=" in source and not Path(source).exists():
        source, overrides = None, [source, *overrides]
    return read_config(find_schema(args.schema), source, overrides)
