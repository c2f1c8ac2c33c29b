"""`styrax models show`: sizes and cost of a model, from config.json and the headers of its files alone."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from styrax.core import DEFAULT_RULES, Policy, UsageError, UserError, tree
from styrax.core.config.convert import changed
from styrax.models.commands.sizes import counted, print_json, sized

HELP = "show the architecture, parameters, memory and arithmetic of a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="with config.json; the weights are not needed")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens per document (default: 2048)")
    parser.add_argument("--dtype", default="bf16", help="of parameters and cache (default: bf16)")
    parser.add_argument(
        "--mesh", default="", metavar="AXIS=N,...", help="also what each device holds, as in fsdp=8,tensor=4"
    )
    parser.add_argument("--tree", action="store_true", help="list every parameter")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    from styrax.models.cost import abstract, cost_of
    from styrax.models.hf.load import read_json
    from styrax.models.registry import family_of, read_table

    if args.length < 1:
        raise UsageError(f"--length: expected 1 or more, got {args.length}")
    table = read_json(Path(args.folder) / "config.json")
    family, inner = family_of(table)
    config, policy = read_table(table), Policy(param=args.dtype, compute=args.dtype)
    cost = cost_of(config, vocab_size=inner["vocab_size"], policy=policy)
    empty = abstract(config, vocab_size=inner["vocab_size"], policy=policy)
    leaves, axes = tree.flatten(empty), config.logical_axes()
    shares = _shares(empty, axes, args.mesh) if args.mesh else {}
    record: dict[str, Any] = {
        "model_type": family.model_type,
        "config": changed(config),
        "vocab_size": inner["vocab_size"],
        **dataclasses.asdict(cost),
        "forward_flops_per_token": cost.forward_flops(args.length),
        "train_flops_per_token": cost.train_flops(args.length),
        "length": args.length,
    }
    if args.mesh:
        record["bytes_per_device"] = sum(shares.values())
    if args.tree:
        record["tree"] = {path: _leaf(leaf, axes[path], shares.get(path)) for path, leaf in leaves.items()}
    if args.json:
        print_json(record)
        return 0
    _print(record, config, cost, args)
    return 0


def _print(record: dict[str, Any], config: Any, cost: Any, args: argparse.Namespace) -> None:
    kinds = [kind.mixer + (" + experts" if kind.sparse else "") for kind in config.kinds]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    rows = [
        ("family", record["model_type"]),
        ("layers", f"{config.num_layers} ({counts})"),
        ("width", f"{config.embed_dim}, MLP {config.mlp_width}, {config.num_heads} heads"),
        ("vocabulary", f"{record['vocab_size']:,} tokens{', head tied' if config.tied else ''}"),
        ("context", f"{config.max_len:,} tokens"),
        ("parameters", f"{cost.parameters:,}, {sized(cost.bytes)} in {args.dtype}"),
        ("of these, per token", f"{cost.active:,} in products"),
        ("forward", f"{counted(record['forward_flops_per_token'])}FLOP per token at {args.length:,} tokens"),
        ("training", f"{counted(record['train_flops_per_token'])}FLOP per token"),
        ("cache", f"{sized(cost.cache_bytes(1, args.length))} for one row of {args.length:,} tokens"),
    ]
    if args.mesh:
        rows.append(("per device", f"{sized(record['bytes_per_device'])} of parameters with {args.mesh}"))
    for name, text in rows:
        print(f"{name:<20} {text}")
    for path, leaf in record.get("tree", {}).items():
        print(f"  {path:<36} {leaf['dtype']}{leaf['shape']}  {sized(leaf['bytes'])}  {leaf['axes']}")


def _leaf(leaf: Any, axes: Any, share: int | None) -> dict[str, Any]:
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
    found = {"shape": list(leaf.shape), "dtype": leaf.dtype.name, "bytes": nbytes, "axes": list(axes)}
    return found if share is None else {**found, "bytes_per_device": share}


def _shares(empty: Any, axes: Any, text: str) -> dict[str, int]:
    from styrax.core.mesh import MeshConfig, shardings

    try:
        sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
        mesh = MeshConfig(axes=sizes).abstract(math.prod(sizes.values()))
    except (ValueError, UserError) as error:
        raise UsageError(f"--mesh: expected AXIS=N,..., such as fsdp=8,tensor=4, got {text!r} ({error})") from error
    placed, leaves = tree.flatten(shardings(empty, axes, DEFAULT_RULES, mesh)), tree.flatten(empty)
    return {
        path: math.prod(placed[path].shard_shape(leaf.shape)) * leaf.dtype.itemsize for path, leaf in leaves.items()
    }
