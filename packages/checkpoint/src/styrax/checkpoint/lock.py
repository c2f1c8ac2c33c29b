"""One writer per folder: a lock that the kernel frees when its owner ends, however it ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import IO, Any

from styrax.checkpoint import identity
from styrax.checkpoint.errors import CheckpointError

FILE = "LOCK"


class Lock:
    """An exclusive lock on a folder, held until `release` or the end of the process, even by `kill -9`.

    Who holds it stands in the file, for the message to whoever comes second. A child of `fork` does not hold
    it on: it closes its copy.

    Args:
        directory: The folder; must exist.

    Raises:
        CheckpointError: Another process, or another store of this one, holds it.
    """

    def __init__(self, directory: Path) -> None:
        import fcntl

        # Never truncated while opening: the text is the other owner's until the lock is ours.
        handle = os.fdopen(os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = handle.read()
            handle.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"{directory} is being written by {_describe(owner)}; two writers would destroy each "
                    "other's checkpoints. Stop that one, or choose another folder"
                ) from None
            raise CheckpointError(
                f"{directory}: the file system offers no locks ({error.strerror}), so a second writer could "
                "not be kept out; choose a directory on a local disk, NFS 4 or another POSIX file system"
            ) from error
        self._handle: IO[str] | None = handle
        handle.truncate(0)
        handle.write(json.dumps(_me()))
        handle.flush()
        _held.add(self)

    def release(self) -> None:
        """Free the lock; a second call does nothing."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


# Only read in a forked child, which must not keep its parent's locks alive.
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)


def _me() -> dict[str, Any]:
    return {
        **identity.me(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "program": Path(sys.argv[0]).name if sys.argv else "",
    }


def _describe(text: str) -> str:
    try:
        owner = json.loads(text)
        place = f"process {owner['pid']} on host {owner['host']}"
        if owner["pid"] == os.getpid() and owner["host"] == socket.gethostname():
            return f"{place}, this very process (close the other store first)"
        return f"{place} ({owner['program']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
