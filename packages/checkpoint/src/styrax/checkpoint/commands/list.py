"""`styrax checkpoint list`: the checkpoints in a folder, from their manifests alone."""

from __future__ import annotations

import argparse
from typing import Any

from styrax.checkpoint.commands.arguments import add_json, add_place, print_json
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.locate import find, find_several
from styrax.checkpoint.manifest import read_manifest

HELP = "list the checkpoints in a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_place(parser, steps="*", default="all steps")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them."""
    rows: list[dict[str, Any]] = []
    for path in find_several(args.directory, args.steps):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            rows.append({"step": int(path.name) if path.name.isdecimal() else path.name, "problem": str(error)})
            continue
        rows.append(
            {
                "step": manifest.step,
                "created": manifest.created,
                "bytes": manifest.nbytes,
                "items": list(manifest.items),
                "metrics": dict(manifest.metrics),
                "temporary": manifest.temporary,
            }
        )
    if args.json:
        print_json(rows)
        return 0
    if not rows:
        print(f"no checkpoints in {find(args.directory).directory}")
    width = max((len(", ".join(row["items"])) for row in rows if "items" in row), default=0)
    for row in rows:
        if "problem" in row:
            print(f"{row['step']:>10}  {row['problem']}")
            continue
        metrics = "  ".join(f"{name} {value:.6g}" for name, value in row["metrics"].items())
        texts = [f"{row['created']}  {sized(row['bytes']):>9}", f"{', '.join(row['items']):<{width}}", metrics]
        texts.append("temporary" if row["temporary"] else "")
        print("  ".join([f"{row['step']:>10}", *filter(None, texts)]).rstrip())
    return 0
