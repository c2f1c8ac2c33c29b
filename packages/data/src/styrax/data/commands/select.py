"""Which data a subcommand looks at: one store with options, or the data section of a configuration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from styrax.core.errors import UsageError

if TYPE_CHECKING:
    from styrax.data.dataset import LMData

DEFAULTS = {"seq_len": 256, "batch_size": 8, "pack": "concat", "seed": 0, "held_out": 0.01}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the store, its options, and `--config`."""
    parser.add_argument("store", nargs="?", metavar="DIR", help="a token store: a folder or a URL")
    parser.add_argument(
        "--config",
        metavar="NAME|FILE",
        help="instead of DIR: the data of a recipe, a TOML file, or a run's config.toml",
    )
    parser.add_argument("--seq-len", type=int, help=f"tokens per row ({DEFAULTS['seq_len']})")
    parser.add_argument("--batch-size", type=int, help=f"rows per step ({DEFAULTS['batch_size']})")
    parser.add_argument(
        "--pack", choices=("concat", "best_fit", "none"), help=f"how rows are filled ({DEFAULTS['pack']})"
    )
    parser.add_argument("--seed", type=int, help=f"decides the order ({DEFAULTS['seed']})")
    parser.add_argument("--held-out", type=float, help=f"share of documents held out ({DEFAULTS['held_out']})")
    parser.add_argument("--json", action="store_true", help="print JSON")


def chosen(args: argparse.Namespace) -> LMData:
    """Open what the arguments name.

    Raises:
        UsageError: Neither or both of DIR and `--config`, or options beside `--config`.
    """
    given = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
    if (args.store is None) == (args.config is None):
        raise UsageError("name a token store (DIR) or a configuration (--config NAME|FILE), one of them")
    if args.config is None:
        from styrax.data.dataset import LMData
        from styrax.data.store.remote import open_store

        store = open_store(args.store)
        options: dict[str, Any] = {**DEFAULTS, **given}
        return LMData(store, **{**options, "held_out": options["held_out"] if len(store) > 1 else 0.0})
    if given:
        words = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{words}: the configuration says that already; leave it out, or name a store instead")
    from styrax.core.config import Choice, Schema
    from styrax.core.config.schema import read

    tree = read(args.config)
    section = Schema(sections={"data": Choice("styrax.data", "tokens")}).resolve({"data": tree.get("data", {})})["data"]
    seed = tree.get("train", {}).get("seed", 0)
    data = section.build(seed=seed if isinstance(seed, int) else 0)
    if not hasattr(data, "provenance"):
        raise UsageError(f"the data of kind {section.kind!r} cannot be looked into by this command")
    return data
