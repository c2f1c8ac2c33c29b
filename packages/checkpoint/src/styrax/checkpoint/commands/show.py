"""`styrax checkpoint show`: what one checkpoint holds, from its manifest alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from styrax.checkpoint import leaves
from styrax.checkpoint.commands.arguments import add_json, add_only, add_place, choose, print_json
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.locate import find_one
from styrax.checkpoint.manifest import Item, Leaf, Manifest, leaf_name, read_manifest
from styrax.checkpoint.schema import describe, fingerprint, value_of
from styrax.core import UsageError

HELP = "show the items, leaves, shapes, dtypes and digests of one"

_SHORT = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_place(parser, steps="?", default="the newest step")
    parser.add_argument(
        "--depth", metavar="N", type=int, help="sum up what lies more than N keys below its item; 0: items only"
    )
    add_only(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show it."""
    if args.depth is not None and args.depth < 0:
        raise UsageError(f"--depth: expected a number of keys, 0 or more, got {args.depth}")
    checkpoint = find_one(args.directory, args.step)
    manifest = read_manifest(checkpoint)
    items = _chosen(manifest, args.only, checkpoint)
    if args.json:
        print_json(_record(checkpoint, manifest, items))
        return 0
    print(f"step {manifest.step}, {manifest.created}, {sized(manifest.nbytes)} in {len(manifest.files)} files")
    print("written by " + ", ".join(f"{name} {version}" for name, version in manifest.writer["versions"].items()))
    print(f"schema {fingerprint(manifest)}")
    if manifest.metrics:
        print("metrics: " + ", ".join(f"{name} {value:.6g}" for name, value in manifest.metrics.items()))
    if manifest.temporary:
        print("temporary: it goes when the next one is saved")
    for name, found in items.items():
        item = manifest.items[name]
        if item.kind != "tree":
            kind = "JSON" if item.kind == "json" else "state of an iterator"
            print(f"{name}: {kind}, {sized(manifest.files[str(item.file)].size)}")
            continue
        print(f"{name}: {_total(found)}")
        rows = list(_rows(found, args.depth))
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        form = f"  {{:<{widths[0]}}}  {{:<{widths[1]}}}  {{:>{widths[2]}}}  {{}}".format
        print("".join([form(*row).rstrip() + "\n" for row in rows]), end="")
    return 0


def _chosen(manifest: Manifest, only: list[str], checkpoint: Path) -> dict[str, list[Leaf]]:
    """Give the items of which something fits, each with those leaves."""
    paths = {leaf_name(name, leaf.path) for name, item in manifest.items.items() for leaf in item.leaves}
    paths.update(name for name, item in manifest.items.items() if item.kind != "tree")
    fit = set(choose(only, sorted(paths), checkpoint))
    found = {
        name: [leaf for leaf in item.leaves if leaf_name(name, leaf.path) in fit]
        for name, item in manifest.items.items()
    }
    return {name: some for name, some in found.items() if some or name in fit or not only}


def _rows(found: list[Leaf], depth: int | None) -> Iterator[tuple[str, str, str, str]]:
    """Give path, description, size and digest of each line: a leaf, or the sum of those below a key."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in found:
        groups.setdefault(_above(leaf.path, 1 if depth is None else depth), []).append(leaf)
    if depth == 0:
        return
    for above, group in groups.items():
        summed = len(group) > 1
        if summed and (depth is not None or len(groups) > 1):
            yield f"{above}/**", f"{len(group)} leaves", sized(_bytes(group)), ""
        if not summed or depth is None:
            for leaf in group:
                size = "" if leaf.where == "inline" else sized(leaf.nbytes)
                yield leaf.path, describe(leaf), size, _mark(leaf)


def _above(path: str, depth: int) -> str:
    return path.partition("/")[0] if depth == 1 else "/".join(path.split("/")[:depth])


def _mark(leaf: Leaf) -> str:
    if leaf.digest is not None:
        return leaf.digest[:_SHORT]
    return f"{len(leaf.shards)} shards" if leaf.shards else ""


@dataclass(frozen=True, kw_only=True)
class _Sum:
    leaves: int
    numbers: int
    bytes: int


def _sum(found: list[Leaf]) -> _Sum:
    numbers = sum(math.prod(leaf.shape) for leaf in found if leaf.kind in ("array", "scalar"))
    return _Sum(leaves=len(found), numbers=numbers, bytes=_bytes(found))


def _bytes(found: Iterable[Leaf]) -> int:
    return sum(leaf.nbytes for leaf in found)


def _total(found: list[Leaf]) -> str:
    total = _sum(found)
    count = f"{total.leaves} {'leaf' if total.leaves == 1 else 'leaves'}"
    return f"{count}, {total.numbers:,} numbers, {sized(total.bytes)}"


def _record(checkpoint: Path, manifest: Manifest, items: dict[str, list[Leaf]]) -> dict[str, Any]:
    return {
        "path": checkpoint,
        "step": manifest.step,
        "created": manifest.created,
        "bytes": manifest.nbytes,
        "writer": manifest.writer,
        "schema": fingerprint(manifest),
        "metrics": manifest.metrics,
        "temporary": manifest.temporary,
        "items": {name: _item(checkpoint, manifest, name, manifest.items[name], some) for name, some in items.items()},
        "files": {name: {"bytes": file.size, "digest": file.digest} for name, file in manifest.files.items()},
    }


def _item(checkpoint: Path, manifest: Manifest, name: str, item: Item, found: list[Leaf]) -> dict[str, Any]:
    if item.kind != "tree":
        # A small file beside the manifest; that it is damaged is no reason to show nothing.
        try:
            return {"kind": item.kind, "value": leaves.document(checkpoint, manifest, name)}
        except CheckpointError as error:
            return {"kind": item.kind, "value": None, "problem": str(error)}
    groups: dict[str, list[Leaf]] = {}
    for leaf in found:
        groups.setdefault(_above(leaf.path, 1), []).append(leaf)
    return {
        "kind": "tree",
        "numbers": _sum(found).numbers,
        "bytes": _bytes(found),
        "leaves": [_leaf(leaf) for leaf in found],
        "schema": fingerprint(manifest, items=[name]),
        "totals": {above: vars(_sum(group)) for above, group in groups.items()},
    }


def _leaf(leaf: Leaf) -> dict[str, Any]:
    record = {
        "path": leaf.path,
        "kind": leaf.kind,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "impl": leaf.impl,
        "bytes": leaf.nbytes,
        "where": leaf.where,
        "digest": leaf.digest,
    }
    if leaf.shards:
        record["shards"] = leaf.shards
    if leaf.where == "inline":
        value = value_of(leaf)
        record["value"] = value if isinstance(value, (bool, int, float, str)) else repr(value)
    return record
