"""Every change that a commit makes to a file system, one plain function for each operation.

Nothing else here touches the disk behind a commit's back, so that a test can fail the n-th operation, or write
all of them down and work out what a power cut would have left.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from styrax.checkpoint import digest


def make_folder(path: Path) -> None:
    """Make a folder that is not there; its parent must be."""
    path.mkdir()


def make_file(path: Path, data: bytes | memoryview, *, sync: bool = False) -> None:
    """Write a file that is not there.

    Args:
        path: The file; its folder must exist.
        data: All of its bytes.
        sync: Also bring them to the disk.
    """
    with path.open("xb", buffering=0) as handle:
        view = memoryview(data).cast("B")
        while view:
            view = view[handle.write(view) :]
    if sync:
        sync_file(path)


def sync_file(path: Path) -> None:
    """Bring a file's bytes to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name in the same file system, at once."""
    source.rename(target)


def remove_file(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it; what cannot be removed stays, without an error."""
    try:
        entries = list(path.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            with contextlib.suppress(OSError):
                remove_file(entry)
    with contextlib.suppress(OSError):
        remove_folder(path)


def measure(path: Path) -> tuple[int, str]:
    """Read a file.

    Returns:
        Its size and the digest of its bytes.
    """
    return digest.of_file(path)
