"""`styrax checkpoint export`: arrays of a checkpoint as safetensors or `.npz`, one in memory at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from styrax.checkpoint.commands import selection
from styrax.checkpoint.commands.arguments import PLACE, stay_off_devices
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.locate import find_one

HELP = "write arrays of a checkpoint as safetensors or .npz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        metavar="DIR[@STEP]",
        help=f"{PLACE}; default: the newest step",
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

    stay_off_devices()
    if args.to == "npz" and args.path.suffix != ".npz":
        raise CheckpointError(f"{args.path}: the name of a .npz file ends in .npz")
    if not 1 <= args.max_shard < 2**62:
        raise CheckpointError(f"--max-shard: expected a number of bytes, 1 or more, got {args.max_shard:g}")
    items = [name.strip() for name in args.items.split(",") if name.strip()]
    source = formats.read(find_one(args.source), items=items)
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
