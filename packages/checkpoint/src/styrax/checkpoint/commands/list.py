"""`styrax checkpoint list`: the checkpoints in a folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from styrax.checkpoint.commands.folder import all_steps, find_folder
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.manifest import read_manifest, step_name

HELP = "list the checkpoints in a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run, or the folder of its checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List them."""
    directory = find_folder(args.directory)
    rows: list[dict[str, Any]] = []
    for step in all_steps(directory):
        try:
            manifest = read_manifest(directory / step_name(step))
        except CheckpointError as error:
            rows.append({"step": step, "problem": str(error)})
            continue
        rows.append(
            {"step": step, "created": manifest.created, "bytes": manifest.nbytes, "items": list(manifest.items)}
        )
    if args.json:
        print(json.dumps(rows))
        return 0
    if not rows:
        print(f"no checkpoints in {directory}")
    for row in rows:
        if "problem" in row:
            print(f"{row['step']:>10}  {row['problem']}")
        else:
            print(f"{row['step']:>10}  {row['created']}  {sized(row['bytes']):>9}  {', '.join(row['items'])}")
    return 0
