"""The moment when a folder becomes a checkpoint, and when it stops being one.

Everything is written and synced under another name, the manifest last; one rename makes it a checkpoint. A
checkpoint that goes is renamed first and deleted after. So whatever instant the process, or the machine,
stops at, a folder with a step's name is whole. The names begin with a dot:

    .staging-STEP-ID    being written
    .replaced-STEP-ID   the old one while a new one of the same step takes its place
    .trash-STEP-ID      being deleted
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import secrets
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from styrax.checkpoint import storage
from styrax.checkpoint.manifest import FILE, File, Manifest, encode, step_name
from styrax.checkpoint.pending import THREADS_OUTLIVE_MAIN

_OURS = re.compile(r"\.(staging|replaced|trash|meeting)-(?:(\d{8,})-)?[0-9a-f]+")
_SEALERS = 4


def kill_point(name: str) -> None:
    """Kill this process, as a test, where `STYRAX_CHECKPOINT_KILL` names this point."""
    if os.environ.get("STYRAX_CHECKPOINT_KILL") == name:
        os.kill(os.getpid(), signal.SIGKILL)


def staging(directory: Path, step: int, token: str | None = None) -> Path:
    """Name a folder to write a step in.

    Args:
        directory: Of the checkpoints.
        step: The step.
        token: Makes the name unique; random by default.
    """
    return directory / f".staging-{step_name(step)}-{token or secrets.token_hex(8)}"


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file whose folder may not exist yet, in a folder that does."""
    if not path.parent.is_dir():
        storage.make_folder(path.parent)
    storage.make_file(path, data)


def contents(folder: Path) -> list[str]:
    """List the files below a folder, by path relative to it, in order."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def seal(
    folder: Path, names: Iterable[str] | None = None, *, known: Mapping[str, File] | None = None
) -> dict[str, File]:
    """Bring files of a folder to the disk, and take the size and digest of each.

    Args:
        folder: With everything in it but the manifest.
        names: Relative to `folder`; all by default.
        known: Files whose size and digest are known; they are not read.
    """
    known = known or {}

    def one(name: str) -> File:
        path = folder / name
        storage.sync_file(path)
        if name in known:
            return known[name]
        size, text = storage.measure(path)
        return File(size=size, digest=text)

    chosen = contents(folder) if names is None else list(names)
    if len(chosen) < 2 or not THREADS_OUTLIVE_MAIN:
        return {name: one(name) for name in chosen}
    with concurrent.futures.ThreadPoolExecutor(_SEALERS) as pool:
        return dict(zip(chosen, pool.map(one, chosen)))


def sync_folders(folder: Path) -> None:
    """Bring the entries of a folder, and of all folders in it, to the disk."""
    folders = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    for path in reversed(folders):
        storage.sync_folder(path)


def make_folders(folder: Path) -> None:
    """Make a folder with those above it that are not there, and bring their entries to the disk."""
    new = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(new):
        storage.sync_folder(path.parent)


def publish(folder: Path, manifest: Manifest) -> None:
    """Make a sealed folder the checkpoint of its step, in place of one that is there.

    Args:
        folder: From `staging`, its files sealed.
        manifest: Of all its files.
    """
    directory, final = folder.parent, folder.parent / step_name(manifest.step)
    kill_point("before_manifest")
    storage.make_file(folder / FILE, encode(manifest), sync=True)
    sync_folders(folder)
    kill_point("after_manifest")
    kill_point("before_rename")
    replaced = None
    if final.exists():
        # `sweep` renames it back if this process ends before the new one has the name.
        replaced = final.with_name(f".replaced-{final.name}-{secrets.token_hex(8)}")
        storage.rename(final, replaced)
        kill_point("mid_replace")
    try:
        storage.rename(folder, final)
    except OSError:
        if replaced is not None:
            storage.rename(replaced, final)
        raise
    storage.sync_folder(directory)
    kill_point("after_rename")
    if replaced is not None:
        discard([replaced])


def retire(directory: Path, steps: Iterable[int]) -> None:
    """Delete checkpoints, so that none is ever seen in part."""
    doomed = []
    for step in steps:
        name = step_name(step)
        doomed.append(directory / f".trash-{name}-{secrets.token_hex(8)}")
        storage.rename(directory / name, doomed[-1])
        kill_point("mid_retention")
    if doomed:
        storage.sync_folder(directory)
        discard(doomed)


def discard(folders: Iterable[Path]) -> None:
    """Delete folders that are no checkpoints; what cannot be deleted stays for the next sweep."""
    for folder in folders:
        if os.environ.get("STYRAX_CHECKPOINT_KILL") == "mid_trash":
            next(path for path in sorted(folder.rglob("*.json")) if path.is_file()).unlink()
            kill_point("mid_trash")
        storage.remove_tree(folder)


def leftovers(directory: Path) -> dict[Path, bool]:
    """Find what dead writers left in a folder, in order.

    Returns:
        Path -> whether it is a whole checkpoint that has to get its name back.
    """
    found = {}
    for path in sorted(directory.iterdir()):
        match = _OURS.fullmatch(path.name)
        if match is not None:
            whole = match[1] == "replaced" and (path / FILE).is_file() and not (directory / match[2]).exists()
            found[path] = whole
    return found


def sweep(directory: Path) -> list[str]:
    """Put a folder in order that dead writers left; only for the holder of the lock.

    Returns:
        The names of what was deleted or put back.
    """
    found = leftovers(directory)
    doomed = []
    for path, whole in found.items():
        final = directory / path.name.split("-")[1]
        if whole and not final.exists():
            storage.rename(path, final)
            kill_point("mid_sweep")
        else:
            doomed.append(path)
    if found:
        # The dead writer may not have come to it: without its new name a folder would be deleted as a checkpoint.
        storage.sync_folder(directory)
    discard(doomed)
    return [path.name for path in found]
