"""`styrax optim show`: what an optimizer does to each parameter of a model."""

from __future__ import annotations

import argparse
import json

from styrax.optim.commands.select import add_arguments as add_choice
from styrax.optim.commands.select import chosen

HELP = "show role, group, learning rate multiplier, decay and bytes of each parameter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_choice(parser)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    found = chosen(args)
    table = found.recipe.describe(found.params)
    if args.json:
        print(json.dumps([row._asdict() for row in table]))
        return 0
    print(f"{found.recipe.kind}, peak learning rate {found.recipe.learning_rate:g}, {found.steps:,} steps\n")
    print(table)
    return 0
