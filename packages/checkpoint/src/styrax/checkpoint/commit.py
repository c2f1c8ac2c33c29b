"""The moment when a folder becomes a checkpoint, and when it stops being one.

Everything is written and synced under another name, the manifest last; one rename makes it a checkpoint. A
checkpoint that goes is renamed first and deleted after. So whatever instant the process, or the machine,
stops at, a folder with a step's name is whole. The names begin with a dot:

    .staging-STEP-ID    being written
    .replaced-STEP-ID   the old one while a new one of the same step takes its place
    .trash-STEP-ID      being deleted
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import zlib
from collections.abc import Iterable
from pathlib import Path

from styrax.checkpoint.manifest import FILE, File, Manifest, encode, step_name

_OURS = re.compile(r"\.(staging|replaced|trash)-(\d{8,})-[0-9a-f]+")
_CHUNK = 2**20


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
    """Write a file whose folder may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def seal(folder: Path) -> dict[str, File]:
    """Bring every file of a folder to the disk, with its folders, and take its checksum.

    Args:
        folder: With everything in it but the manifest.

    Returns:
        Path relative to `folder` -> size and checksum.
    """
    files, folders = {}, [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.append(path)
        else:
            files[path.relative_to(folder).as_posix()] = checksum(path, sync=True)
    for path in reversed(folders):
        sync(path)
    return files


def checksum(path: Path, *, sync: bool = False) -> File:
    """Measure a file: its size and the CRC-32 of its bytes.

    Args:
        path: The file.
        sync: Also bring it to the disk.
    """
    size = crc = 0
    with path.open("rb", buffering=0) as handle:
        while chunk := handle.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        if sync:
            os.fsync(handle.fileno())
    return File(size=size, crc32=crc)


def publish(folder: Path, manifest: Manifest) -> None:
    """Make a sealed folder the checkpoint of its step, in place of one that is there.

    Args:
        folder: From `staging`, sealed.
        manifest: Of all its files.
    """
    directory, final = folder.parent, folder.parent / step_name(manifest.step)
    kill_point("before_manifest")
    with (folder / FILE).open("wb") as handle:
        handle.write(encode(manifest))
        handle.flush()
        os.fsync(handle.fileno())
    sync(folder)
    kill_point("after_manifest")
    kill_point("before_rename")
    replaced = None
    if final.exists():
        # `sweep` renames it back if this process ends before the new one has the name.
        replaced = final.with_name(f".replaced-{final.name}-{secrets.token_hex(8)}")
        final.rename(replaced)
        kill_point("mid_replace")
    try:
        folder.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    sync(directory)
    kill_point("after_rename")
    if replaced is not None:
        discard([replaced])


def retire(directory: Path, steps: Iterable[int]) -> None:
    """Delete checkpoints, so that none is ever seen in part."""
    doomed = []
    for step in steps:
        name = step_name(step)
        doomed.append(directory / f".trash-{name}-{secrets.token_hex(8)}")
        (directory / name).rename(doomed[-1])
    if doomed:
        sync(directory)
        discard(doomed)


def discard(folders: Iterable[Path]) -> None:
    """Delete folders that are no checkpoints; what cannot be deleted stays for the next sweep."""
    for folder in folders:
        if os.environ.get("STYRAX_CHECKPOINT_KILL") == "mid_trash":
            next(path for path in sorted(folder.rglob("*.json")) if path.is_file()).unlink()
            kill_point("mid_trash")
        shutil.rmtree(folder, ignore_errors=True)


def expired(
    steps: Iterable[int], *, keep_last: int, keep_every: int | None, newest: int, damaged: Iterable[int] = ()
) -> list[int]:
    """Choose what to delete.

    Args:
        steps: All complete checkpoints.
        keep_last: How many of the highest steps to keep.
        keep_every: Also keep the steps that this divides.
        newest: What was saved just now, kept even where later steps of a run that was rewound are there.
        damaged: Steps that are not counted and not deleted.

    Example:
        >>> expired([2, 4, 6, 8, 10], keep_last=2, keep_every=4, newest=10)
        [2, 6]
        >>> expired([2, 4, 6, 8, 10], keep_last=2, keep_every=None, newest=4, damaged=[10])
        [2]
    """
    good = sorted(set(steps) - set(damaged))
    return [s for s in good[:-keep_last] if s != newest and (keep_every is None or s % keep_every)]


def sweep(directory: Path) -> list[str]:
    """Put a folder in order that dead writers left; only for the holder of the lock.

    Returns:
        The names of what was deleted or put back.
    """
    found = {path: match for path in directory.iterdir() if (match := _OURS.fullmatch(path.name))}
    doomed = []
    for path, match in sorted(found.items()):
        final = directory / match[2]
        if match[1] == "replaced" and not final.exists() and (path / FILE).is_file():
            path.rename(final)
            sync(directory)
        else:
            doomed.append(path)
    discard(doomed)
    return sorted(path.name for path in found)


def sync(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(handle)
