"""Folders that appear whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from styrax.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: leftovers are told from living builds by age alone
    fcntl = None

LOCK = "lock"
YOUNG_SECONDS = 60.0
OLD_SECONDS = 86400.0


@contextlib.contextmanager
def new_folder(out: Path, *, overwrite: bool = False, keep_existing: bool = False) -> Iterator[Path]:
    """Write a folder beside `out`, and give it that name when the block ends well.

    The folder is written under a temporary sibling name, flushed to disk, then renamed. A block that raises
    leaves nothing; a process that is killed leaves a temporary folder which the next call removes.

    Args:
        out: The name to give.
        overwrite: Replace what is at `out`, in one step where the system can exchange two names.
        keep_existing: If another process put something at `out` meanwhile, let that stand.

    Yields:
        The temporary folder.

    Raises:
        UserError: `out` exists, or the disk is full, or the place cannot be written.
    """
    if not overwrite and not keep_existing and os.path.lexists(out):
        raise UserError(_exists(out))
    with scratch_folder(out) as folder:
        yield folder
        (folder / LOCK).unlink(missing_ok=True)
        sync_folder(folder)
        _publish(folder, out, overwrite=overwrite, keep_existing=keep_existing)
        sync_folder(out.parent)


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Make a temporary folder beside `out`, and remove it in the end.

    Args:
        out: What the folder is for; what killed processes left for it is removed.

    Yields:
        The folder.

    Raises:
        UserError: The disk is full, or the place cannot be written.
    """
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out)
        folder = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
        folder.mkdir()
    lock = None
    try:
        with explained(out):
            lock = _lock(folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """Open the folder beside `out` where one build at a time keeps what it has done.

    The folder outlives a build that is killed or fails, if it holds anything by then, so that the next one
    can go on from there. It is removed when the block ends well.

    Args:
        out: What is built.

    Yields:
        The folder, `.NAME.parts`.

    Raises:
        UserError: Another process is building `out`, or the place cannot be written.
    """
    folder = out.with_name(f".{out.name}.parts")
    with explained(out):
        lock = _hold(folder / LOCK, out)
    try:
        yield folder
        remove_folder(folder, out)
    except BaseException:
        with contextlib.suppress(OSError):
            if all(entry.name.startswith(".") or entry.name == LOCK for entry in folder.iterdir()):
                remove_folder(folder, out)
        raise
    finally:
        os.close(lock)


def remove_folder(folder: Path, out: Path | None = None) -> None:
    """Remove a folder so that nobody who is killed meanwhile leaves half of it under its name.

    Args:
        folder: The folder.
        out: What it was for; `sweep(out)` removes what a kill leaves.
    """
    aside = folder.with_name(f".{(out or folder).name}.{secrets.token_hex(8)}.gone")
    with contextlib.suppress(OSError):
        folder = folder.rename(aside)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(out: Path) -> None:
    """Remove what killed builds of `out` left beside it, and finish an exchange that was cut off."""
    for folder in out.parent.glob(f".{glob_escape(out.name)}.*.tmp"):
        if _dead(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in out.parent.glob(f".{glob_escape(out.name)}.*.gone"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in sorted(out.parent.glob(f".{glob_escape(out.name)}.*.old")):
        with contextlib.suppress(OSError):
            if os.path.lexists(out):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rename(out)


def glob_escape(name: str) -> str:
    """Quote a file name for use in a glob."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def sync_file(file: Path) -> None:
    """Flush a written file to disk."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hold(file: Path, out: Path) -> int:
    """Hold a lock file, made with its folder, for as long as this process lives or until it is closed."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the build before just removed its folder
            continue
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 100).decode(errors="replace") or "another process"
            os.close(handle)
            raise UserError(f"{out} is being built by {owner}; wait for it to end, or build another store") from None
        except OSError:
            pass  # a file system without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), file.stat()):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """Hold a lock file in the folder; it gets its name only once it is held, so a free one means death."""
    if fcntl is None:
        return None
    handle = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(OSError):  # a file system without locks: leftovers go by age
        fcntl.flock(handle, fcntl.LOCK_EX)
        (folder / f"{LOCK}.new").rename(folder / LOCK)
    return handle


def _dead(folder: Path) -> bool:
    """Tell whether the process that wrote a temporary folder is gone."""
    try:
        age = time.time() - folder.stat().st_mtime
    except OSError:
        return False
    if fcntl is None:
        return age > OLD_SECONDS
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return age > YOUNG_SECONDS if not (folder / f"{LOCK}.new").exists() else age > OLD_SECONDS
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _publish(folder: Path, out: Path, *, overwrite: bool, keep_existing: bool) -> None:
    if overwrite and out.is_dir() and not out.is_symlink():
        if not _exchange(folder, out):
            aside = out.with_name(f".{out.name}.{secrets.token_hex(8)}.old")
            out.rename(aside)
            folder.rename(out)
            shutil.rmtree(aside, ignore_errors=True)
        return
    try:
        folder.rename(out)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EACCES}:
            raise
        if not os.path.lexists(out):
            raise
        if not keep_existing:
            raise UserError(_exists(out)) from None


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one.absolute()), here, os.fsencode(other.absolute()), swap) == 0


def _exists(out: Path) -> str:
    return f"{out} already exists; choose another name, or overwrite it (--overwrite, overwrite=True)"


@contextlib.contextmanager
def explained(out: Path) -> Iterator[None]:
    """Turn the disk's refusals while `out` is written into words.

    Raises:
        UserError: The disk is full, or the place cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            with contextlib.suppress(OSError):
                reason += f" ({shutil.disk_usage(out.parent).free / 1e6:.1f} MB free)"
            cure = "free some space or build elsewhere; no half-made store was left behind"
        elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}:
            cure = "choose a folder that you can write"
        else:
            raise
        raise UserError(f"cannot write {out}: {reason}; {cure}") from error
