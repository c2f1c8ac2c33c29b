"""``styrax plan``: what a run needs, on devices that need not be here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from styrax.core import UsageError
from styrax.core.config import find_schema, read_config

HELP = "say what a run needs of devices that need not be here: memory, time, cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", metavar="NAME|FILE.toml", help="a recipe or a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides; values are TOML")
    parser.add_argument(
        "--on", metavar="TOPOLOGY", help="v5p:8x8x8, v6e:16x16, tpu7x:4x4x4, cpu:8, ... (default: the CPUs here)"
    )
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="so many of them (default: 1)")
    parser.add_argument("--no-compile", action="store_true", help="predict only; needs no compiler for the devices")
    parser.add_argument("--search", action="store_true", help="try meshes, recomputation and batches, and rank them")
    parser.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary, if the data cannot tell it yet")
    parser.add_argument("--tokens", type=float, metavar="N", help="of the whole run, such as 15e12, for days and cost")
    parser.add_argument("--price", type=float, metavar="P", help="of one chip for an hour, for the cost")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Plan; returns 0 if the run fits or that is not known, 1 if it does not."""
    from styrax.train.plan.topology import of_here, parse, prepare

    _check(args)
    resolved = read_config(find_schema("train"), args.config, args.overrides).check()
    topology = parse(args.on, slices=args.slices) if args.on else None
    if topology is not None:
        prepare(topology)
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        topology = of_here(args.slices)

    def progress(text: str) -> None:
        print(f"{text} ...", file=sys.stderr, flush=True)

    options = {"topology": topology, "vocab_size": args.vocab, "progress": progress}
    options |= {"tokens": args.tokens, "price": args.price}
    if args.search:
        from styrax.train.plan.search import search
        from styrax.train.plan.show import show_search

        found = search(resolved, **options, compile=not args.no_compile)
        if args.json:
            print(json.dumps(found.to_dict(), allow_nan=False))
        else:
            show_search(found, name=args.config)
        return 0 if found.best is not None else 1

    from styrax.train.plan.make import plan
    from styrax.train.plan.show import show

    made = plan(resolved, **options, compile=not args.no_compile)
    if args.json:
        print(json.dumps({"config": args.config, **made.to_dict()}, allow_nan=False))
    else:
        show(made, name=args.config)
    return 1 if made.fits is False else 0


def _check(args: argparse.Namespace) -> None:
    if "=" in args.config and not Path(args.config).exists():
        raise UsageError("say what to plan: a recipe such as llama3-8b, or a FILE.toml; overrides come after it")
    wrong = [
        f"--{name}: expected more than 0, got {value:g}"
        for name, value in (("vocab", args.vocab), ("tokens", args.tokens), ("price", args.price))
        if value is not None and not 0 < value < float("inf")
    ]
    if args.slices < 1:
        wrong.append(f"--slices: expected 1 or more, got {args.slices}")
    if args.price is not None and args.tokens is None:
        wrong.append("--price: needs --tokens, of the whole run")
    if wrong:
        raise UsageError("\n".join(wrong))
