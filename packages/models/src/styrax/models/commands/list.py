"""`styrax models list`: the families that can be read and written."""

from __future__ import annotations

import argparse

from styrax.models.commands.sizes import print_json

HELP = "list the families that can be read and written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List them."""
    from styrax.models.registry import ALIASES, FAMILIES

    if args.json:
        print_json({name: family.architecture for name, family in sorted(FAMILIES.items())} | {"aliases": ALIASES})
        return 0
    width = max(map(len, FAMILIES))
    for name, family in sorted(FAMILIES.items()):
        also = [alias for alias, of in ALIASES.items() if of == name]
        print(f"{name:<{width}}  {family.architecture}{'  also ' + ', '.join(also) if also else ''}")
    return 0
