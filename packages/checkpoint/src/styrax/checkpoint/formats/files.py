"""Files and folders that appear whole or not at all: written under another name, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.storage import sync_folder


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for writing that gets its name when the block ends well, and is gone otherwise.

    Args:
        path: Its name; folders above it are made.
        overwrite: Take the place of a file that is there.

    Raises:
        CheckpointError: There is one and `overwrite` is false, or no space is left.
    """
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}-{secrets.token_hex(8)}")
    try:
        with _explained(path), temporary.open("xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        refuse_existing(path, overwrite)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Make a folder that gets its name when the block ends well, and is gone otherwise.

    Args:
        path: Its name; an empty folder may be there.
        overwrite: Take the place of a folder that is not empty.

    Yields:
        Where to write its files, each synced by the writer.
    """
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    temporary, old = path.with_name(f".{path.name[:200]}-{token}"), path.with_name(f".{path.name[:200]}-{token}-old")
    try:
        with _explained(path):
            temporary.mkdir()
            yield temporary
        sync_folder(temporary)
        refuse_existing(path, overwrite)
        if path.is_dir():
            path.rename(old)
        elif path.exists():
            path.unlink()
        temporary.rename(path)
        sync_folder(path.parent)
    finally:
        if old.exists() and not path.exists():  # stopped between the two, by an error or by Ctrl-C
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise if something would be lost: a file, or a folder that is not empty."""
    there = path.is_symlink() or (any(path.iterdir()) if path.is_dir() else path.exists())
    if there and not overwrite:
        raise CheckpointError(
            f"{path} is there already; choose another name, or say that it may be replaced (overwrite)"
        )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f", {sized(shutil.disk_usage(path.parent).free)} free"
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}{free}); nothing of it is left, and what was there "
            "is untouched"
        ) from error
