"""`styrax checkpoint export`: arrays of a checkpoint as safetensors or `.npz`, one in memory at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from styrax.checkpoint.commands import selection
from styrax.checkpoint.commands.folder import find_checkpoint, find_folder
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.manifest import FILE

if TYPE_CHECKING:
    from styrax.checkpoint.formats.base import Source

HELP = "write arrays of a checkpoint as safetensors or .npz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        metavar="RUN_OR_DIR[@STEP]",
        help="a run, the folder of its checkpoints or of one; default: newest step",
    )
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="a file .safetensors or .npz, or a folder of safetensors"
    )
    parser.add_argument("--to", required=True, choices=("safetensors", "npz"), help="the format")
    parser.add_argument(
        "--items", metavar="NAMES", default="params", help="items, with commas between; default: params"
    )
    parser.add_argument(
        "--max-shard", metavar="BYTES", type=float, default=5e9, help="largest file of a folder; default: 5e9"
    )
    selection.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Export them."""
    from styrax.checkpoint import formats

    if args.to == "npz" and args.path.suffix != ".npz":
        raise CheckpointError(f"{args.path}: the name of a .npz file ends in .npz")
    if not 1 <= args.max_shard < 2**62:
        raise CheckpointError(f"--max-shard: expected a number of bytes, 1 or more, got {args.max_shard:g}")
    source = _source(args.source, [name.strip() for name in args.items.split(",") if name.strip()])
    arrays = selection.select(source, source.skipped, args, source.path)
    nbytes = sum(array.nbytes for array in arrays.values())
    progress = selection.Progress(len(arrays), nbytes, "export")
    try:
        formats.write(
            args.path,
            arrays,
            format=args.to,
            separator=args.separator,
            max_shard=int(args.max_shard),
            overwrite=args.overwrite,
            progress=progress,
        )
    finally:
        progress.close()
    if args.json:
        record = {"source": str(source.path), "path": str(args.path), "arrays": len(arrays), "bytes": nbytes}
        print(json.dumps(record))
    else:
        print(f"{args.path}: {len(arrays)} array{'s' * (len(arrays) != 1)}, {sized(nbytes)}, of {source.path}")
    return 0


def _source(given: str, items: list[str]) -> Source:
    from styrax.checkpoint import formats

    path, at, step = given.rpartition("@")
    if not at or not step.isdecimal() or Path(given).exists():
        path, step = given, ""
    folder = Path(path)
    if not step and (folder / FILE).is_file():
        return formats.read(folder, items=items)
    return formats.read(find_checkpoint(find_folder(folder), int(step) if step else None), items=items)
