"""`styrax checkpoint`: list, show and verify checkpoints, from their manifests alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.manifest import Item, Manifest, list_incomplete, list_steps, read_manifest, step_name
from styrax.checkpoint.verify import verify

HELP = "list, show and verify checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in {
        "list": "list the checkpoints in a folder",
        "show": "show the items, leaves, shapes and dtypes of one",
        "verify": "compare every file with its size and checksum; exit code 1 if one is damaged, or none is there",
    }.items():
        action = actions.add_parser(name, aliases=["ls"] if name == "list" else [], help=text, description=text)
        action.add_argument("directory", metavar="DIR", type=Path, help="a run, or the folder of its checkpoints")
        if name != "list":
            default = "the newest" if name == "show" else "all"
            action.add_argument("step", metavar="STEP", type=int, nargs="?", help=f"default: {default}")
        action.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for.

    Returns:
        The exit code: 1 if `verify` found damage, or nothing to verify.

    Raises:
        CheckpointError: The folder or the step is not there, or its manifest is damaged (`show`).
    """
    directory = _folder(args.directory)
    steps = list_steps(directory)
    everything = sorted([*steps, *list_incomplete(directory)])
    if args.action in ("list", "ls"):
        return _list(directory, everything, args.json)
    if args.step is not None and args.step not in everything:
        there = f"there are {', '.join(map(str, everything))}" if everything else "there are none"
        raise CheckpointError(f"no checkpoint of step {args.step} in {directory}: {there}")
    if args.action == "verify":
        return _verify(directory, everything if args.step is None else [args.step], args.json)
    if args.step is None and not steps:
        incomplete = f" that is complete; incomplete: {', '.join(map(str, everything))}" if everything else ""
        raise CheckpointError(f"no checkpoint in {directory}{incomplete}")
    return _show(directory / step_name(steps[-1] if args.step is None else args.step), args.json)


def _folder(given: Path) -> Path:
    """The folder of the checkpoints, where that of their run was given."""
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give that of a run, or the one that holds the checkpoints")
    inside = given / "checkpoints"
    return inside if inside.is_dir() and not list_steps(given) and not list_incomplete(given) else given


def _list(directory: Path, steps: list[int], as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for step in steps:
        try:
            manifest = read_manifest(directory / step_name(step))
        except CheckpointError as error:
            rows.append({"step": step, "problem": str(error)})
            continue
        rows.append(
            {"step": step, "created": manifest.created, "bytes": manifest.nbytes, "items": list(manifest.items)}
        )
    if as_json:
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


def _show(checkpoint: Path, as_json: bool) -> int:
    manifest = read_manifest(checkpoint)
    if as_json:
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


def _verify(directory: Path, steps: list[int], as_json: bool) -> int:
    found = {step: verify(directory / step_name(step)) for step in steps}
    if as_json:
        print(json.dumps([{"step": step, "problems": problems} for step, problems in found.items()]))
    else:
        for step, problems in found.items():
            print(f"{step:>10}  {'ok' if not problems else 'damaged'}")
            for problem in problems:
                print(f"{'':>12}{problem}")
        if not found:
            print(f"no checkpoints in {directory}")
    return 1 if any(found.values()) or not found else 0
