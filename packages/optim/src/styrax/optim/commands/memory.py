"""`styrax optim memory`: what the optimizer's state weighs for a model, and what another one's would."""

from __future__ import annotations

import argparse
import json

from styrax.core import registry
from styrax.optim.commands.select import add_arguments as add_choice
from styrax.optim.commands.select import chosen

HELP = "count the bytes of the optimizer's state for a model, by slot and by device, without allocating"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_choice(parser)
    parser.add_argument("--compare", action="store_true", help="every optimizer with its defaults, a line each")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    from styrax.optim.columns import columns
    from styrax.optim.memory import memory_table

    found = chosen(args)
    recipes = {found.recipe.kind: found.recipe}
    if args.compare:
        kinds = registry.names("styrax.optim")
        recipes = {kind: recipes.get(kind) or registry.resolve("styrax.optim", kind)() for kind in kinds}
    tables = {
        kind: memory_table(recipe.build(found.params, steps=found.steps), found.params)
        for kind, recipe in recipes.items()
    }
    if args.json:
        print(json.dumps({kind: _report(table) for kind, table in tables.items()}))
    elif not args.compare:
        (table,) = tables.values()
        print(table)
    else:
        rows = [
            (
                kind,
                f"{t.bytes:,}",
                f"{t.bytes / t.parameters:.2f}" if t.parameters else "n/a",
                "n/a" if t.device_bytes is None else f"{t.device_bytes:,}",
            )
            for kind, t in sorted(tables.items(), key=lambda item: item[1].bytes)
        ]
        head = ("kind", "bytes of state", "of the parameters'", "bytes a device")
        print(columns(head, rows, right=head[1:]))
    return 0


def _report(table: object) -> dict[str, object]:
    from styrax.optim.memory import MemoryTable

    assert isinstance(table, MemoryTable)
    return {
        "parameters": table.parameters,
        "bytes": table.bytes,
        "device_bytes": table.device_bytes,
        "slots": [slot._asdict() for slot in table],
    }
