"""What writers and exports that were killed left under temporary names, and putting a folder in order."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from styrax.checkpoint import commit, storage
from styrax.checkpoint.errors import CheckpointError, explain
from styrax.checkpoint.lock import Lock

# As `formats.files` names them.
_EXPORT = re.compile(r"\.(?P<name>.+)-[0-9a-f]{16}(?P<old>-old)?")
_SUFFIXES = (".safetensors", ".npz", ".safetensors.index.json")
_IDLE = 3600.0  # seconds without a change after which nobody writes an export any more


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that stands under a temporary name.

    Attributes:
        path: Where.
        bytes: Its size.
        fate: Whether it is deleted, put back because it is whole and nothing else has its name, or kept because
            it changed within the hour: an export may be going on.
        export: Whether an export left it, and no writer of checkpoints.
    """

    path: Path
    bytes: int
    fate: Literal["delete", "put back", "keep"]
    export: bool


def leftovers(directory: Path) -> list[Leftover]:
    """Find what stands under a temporary name in a folder, in order."""
    found = [
        Leftover(path=path, bytes=size_of(path), fate="put back" if whole else "delete", export=False)
        for path, whole in commit.leftovers(directory).items()
    ]
    known = {leftover.path for leftover in found}
    for path in sorted(directory.iterdir()):
        match = _EXPORT.fullmatch(path.name)
        if path in known or match is None or not _is_export(path, match["name"]):
            continue
        fate = "delete"
        if time.time() - _changed(path) < _IDLE:
            fate = "keep"
        elif match["old"] and not path.with_name(match["name"]).exists():
            fate = "put back"
        found.append(Leftover(path=path, bytes=size_of(path), fate=fate, export=True))
    return found


def sweep(directory: Path, found: Iterable[Leftover]) -> list[Leftover]:
    """Delete or put back what was found in a folder.

    Args:
        directory: Of checkpoints; locked meanwhile if writers left something, so that none that lives loses anything.
        found: From `leftovers`, of this and of other folders.

    Returns:
        What was found, of writers looked for again under the lock.

    Raises:
        CheckpointError: Another process writes there, or something cannot be deleted.
    """
    found = list(found)
    try:
        return [*_sweep(directory, found), *_sweep_exports(found)]
    except OSError as error:
        raise explain(error, directory, "the folder cannot be put in order") from error


def size_of(path: Path) -> int:
    """Give the bytes of a file, or of all files below a folder; what is gone meanwhile has none."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(size_of(entry) for entry in path.iterdir())
        return path.lstat().st_size
    except OSError:
        return 0


def _is_export(path: Path, name: str) -> bool:
    """Tell whether there is nothing but what an export writes."""
    if path.is_symlink():
        return False
    if not path.is_dir():
        return name.endswith(_SUFFIXES)
    names = [(match["name"] if (match := _EXPORT.fullmatch(entry.name)) else entry.name) for entry in path.iterdir()]
    return all(name.endswith(_SUFFIXES) for name in names)


def _changed(path: Path) -> float:
    """Give the time of the last change to a file, or to a folder and what is in it."""
    entries = [path, *(path.iterdir() if path.is_dir() else ())]
    return max((entry.lstat().st_mtime for entry in entries), default=0.0)


def _sweep(directory: Path, found: list[Leftover]) -> list[Leftover]:
    if all(leftover.export for leftover in found):
        return []
    lock = Lock(directory)  # not to take from a writer that lives what it is writing
    try:
        found = [leftover for leftover in leftovers(directory) if not leftover.export]
        commit.sweep(directory)
    finally:
        lock.release()
    return _gone(found)


def _sweep_exports(found: list[Leftover]) -> list[Leftover]:
    for leftover in (leftover for leftover in found if leftover.export):
        match = _EXPORT.fullmatch(leftover.path.name)
        if leftover.fate == "put back" and match is not None:
            storage.rename(leftover.path, leftover.path.with_name(match["name"]))
            storage.sync_folder(leftover.path.parent)
        elif leftover.fate == "delete" and leftover.path.is_dir():
            storage.remove_tree(leftover.path)
        elif leftover.fate == "delete":
            storage.remove_file(leftover.path)
    return _gone([leftover for leftover in found if leftover.export])


def _gone(found: list[Leftover]) -> list[Leftover]:
    still = [str(leftover.path) for leftover in found if leftover.fate != "keep" and leftover.path.exists()]
    if still:
        raise CheckpointError("\n  ".join(["these could not be deleted; check who owns them:", *still]))
    return found
