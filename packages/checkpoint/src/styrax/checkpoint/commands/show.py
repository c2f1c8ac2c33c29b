"""`styrax checkpoint show`: the items and leaves of one checkpoint, from its manifest alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from styrax.checkpoint.commands.folder import find_checkpoint, find_folder
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.manifest import Item, Manifest, read_manifest

HELP = "show the items, leaves, shapes and dtypes of one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run, or the folder of its checkpoints")
    parser.add_argument("step", metavar="STEP", type=int, nargs="?", help="default: the newest")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    checkpoint = find_checkpoint(find_folder(args.directory), args.step)
    manifest = read_manifest(checkpoint)
    if args.json:
        print(json.dumps(_record(checkpoint, manifest)))
        return 0
    print(f"step {manifest.step}, {manifest.created}, {sized(manifest.nbytes)} in {len(manifest.files)} files")
    print("written by " + ", ".join(f"{name} {version}" for name, version in manifest.writer["versions"].items()))
    for name, item in manifest.items.items():
        if item.kind == "json":
            print(f"{name}: JSON, {sized(manifest.files[str(item.file)].size)}")
            continue
        print(f"{name}: {len(item.leaves)} {'leaf' if len(item.leaves) == 1 else 'leaves'}, {sized(item.nbytes)}")
        width = max((len(leaf.path) for leaf in item.leaves), default=0)
        for leaf in item.leaves:
            what = leaf.dtype + (f"{list(leaf.shape)}" if leaf.kind != "python" else f" {leaf.value}")
            print(f"  {leaf.path:<{width}}  {what}" + (f"  key of {leaf.impl}" if leaf.kind == "key" else ""))
    return 0


def _record(checkpoint: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "created": manifest.created,
        "bytes": manifest.nbytes,
        "writer": manifest.writer,
        "items": {name: _item(checkpoint, item) for name, item in manifest.items.items()},
        "files": {name: {"bytes": f.size, "crc32": f"{f.crc32:08x}"} for name, f in manifest.files.items()},
    }


def _item(checkpoint: Path, item: Item) -> dict[str, Any]:
    if item.kind == "json":
        try:
            return {"kind": "json", "value": json.loads((checkpoint / str(item.file)).read_bytes())}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{item.file}: cannot be read ({error})") from error
    leaves = [
        {"path": leaf.path, "kind": leaf.kind, "shape": list(leaf.shape), "dtype": leaf.dtype, "impl": leaf.impl}
        for leaf in item.leaves
    ]
    return {"kind": "tree", "bytes": item.nbytes, "leaves": leaves}
