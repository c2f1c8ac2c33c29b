"""`styrax optim list`: the recipes that are installed."""

from __future__ import annotations

import argparse
import inspect
import json

from styrax.core import registry

HELP = "list the optimizers, with what each keeps for every number of a weight matrix"

SIDE = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    import jax

    from styrax.optim.columns import columns
    from styrax.optim.memory import memory_table

    params = {"kernel": jax.ShapeDtypeStruct((SIDE, SIDE), "float32")}
    found = {}
    for kind in registry.names("styrax.optim"):
        recipe = registry.resolve("styrax.optim", kind)
        state = memory_table(recipe().build(params, steps=1), params).bytes
        summary = inspect.cleandoc(recipe.__doc__ or "").partition("\n")[0]
        found[kind] = {"summary": summary, "state_bytes_per_number": round(state / SIDE**2, 2)}
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    rows = [(kind, f"{each['state_bytes_per_number']:.2f}", each["summary"]) for kind, each in found.items()]
    print(columns(("kind", "bytes", "what it is"), rows, right=("bytes",)))
    print(f"bytes: of state for each number of a [{SIDE}, {SIDE}] matrix in float32 (4 bytes); counted, not estimated")
    return 0
