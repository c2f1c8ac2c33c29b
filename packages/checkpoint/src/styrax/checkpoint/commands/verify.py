"""`styrax checkpoint verify`: every file against its size and digest."""

from __future__ import annotations

import argparse
from pathlib import Path

from styrax.checkpoint.commands.arguments import add_json, add_place, print_json, stay_off_devices
from styrax.checkpoint.commands.selection import Progress
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.locate import find, find_several
from styrax.checkpoint.manifest import read_manifest
from styrax.checkpoint.verify import verify

HELP = "compare every file with its size and digest; exit code 1 if one is damaged, or none is there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_place(parser, steps="*", default="all steps")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verify them."""
    stay_off_devices()
    checkpoints = find_several(args.directory, args.steps)
    found = verify_all(checkpoints, "verify")
    if args.json:
        print_json([{"step": _step(path), "problems": problems} for path, problems in found.items()])
    else:
        for path, problems in found.items():
            print(f"{_step(path):>10}  {'ok' if not problems else 'damaged'}")
            for problem in problems:
                print(f"{'':>12}{problem}")
        if not found:
            print(f"no checkpoints in {find(args.directory).directory}")
    return 1 if any(found.values()) or not found else 0


def verify_all(checkpoints: tuple[Path, ...], what: str) -> dict[Path, list[str]]:
    """Verify checkpoints, with a line on stderr that says how far it is.

    Args:
        checkpoints: Their folders.
        what: What is being done, as the beginning of that line.

    Returns:
        Folder -> what is wrong.
    """
    count = nbytes = 0
    for path in checkpoints:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        count, nbytes = count + len(manifest.files), nbytes + manifest.nbytes
    progress = Progress(count, nbytes, what, "files")
    try:
        return {path: verify(path, progress=progress) for path in checkpoints}
    finally:
        progress.close()


def _step(path: Path) -> int | str:
    return int(path.name) if path.name.isdecimal() else path.name
