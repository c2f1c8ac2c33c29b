"""`styrax checkpoint import`: arrays of another format as a checkpoint, one in memory at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from styrax.checkpoint.commands import selection
from styrax.checkpoint.commands.arguments import stay_off_devices
from styrax.checkpoint.errors import CheckpointError, sized

HELP = "make a checkpoint of safetensors, .npz, an Orbax or a torch Distributed Checkpoint folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", metavar="PATH", type=Path, help="the file or folder to read; its format is found out")
    parser.add_argument("--to", required=True, metavar="DIR", type=Path, help="the folder of checkpoints to put it in")
    parser.add_argument("--step", type=int, default=0, help="the step to give it; default: 0")
    parser.add_argument(
        "--item", metavar="NAME", default="params", help="the item to make of a source that has none; default: params"
    )
    selection.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Import them."""
    from styrax.checkpoint import formats

    stay_off_devices()
    if args.step < 0:
        raise CheckpointError(f"--step: expected 0 or more, got {args.step}")
    source = formats.read(args.path, separator=args.separator)
    arrays = selection.select(source, source.skipped, args, source.path)
    items: dict[str, dict[str, Any]] = {}
    for path, array in arrays.items():
        name, _, rest = path.partition("/") if source.named_items else (args.item, "", path)
        items.setdefault(name, {})[rest] = array
    nbytes = sum(array.nbytes for array in arrays.values())
    progress = selection.Progress(len(arrays), nbytes, "import")
    try:
        formats.import_arrays(items, args.to, args.step, overwrite=args.overwrite, progress=progress)
    finally:
        progress.close()
    if args.json:
        record = {"path": str(source.path), "format": source.format, "to": str(args.to), "step": args.step}
        print(json.dumps(record | {"items": {name: len(flat) for name, flat in items.items()}, "bytes": nbytes}))
    else:
        count = f"{len(arrays)} array{'s' * (len(arrays) != 1)}"
        print(f"{args.to}: step {args.step}, {', '.join(items)}: {count}, {sized(nbytes)}, of {source.path}")
    return 0
