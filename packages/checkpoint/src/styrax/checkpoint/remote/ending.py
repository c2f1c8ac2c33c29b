"""What becomes of uploads when the program ends without `close`: they are waited for, and a lost one is loud.

As for saves (see `styrax.checkpoint.pending`), whose end comes first: a save that is committed while the program
ends is uploaded too.
"""

from __future__ import annotations

import os
from typing import Protocol

from styrax.checkpoint import pending


class Uploads(Protocol):
    """What is waited for."""

    def finish(self) -> None:
        """Wait for all of them."""
        ...

    def lost(self) -> list[str]:
        """Say what is not uploaded."""
        ...


# The interpreter ends once for all stores, so this is the process's and not a store's.
_open: set[Uploads] = set()
_watching: list[int] = []


def watch(uploads: Uploads) -> None:
    """Wait for these when the program ends, until they are forgotten."""
    if pending.at_exit(_watching, _drain, _report):
        _open.clear()  # after a fork these are the parent's
    _open.add(uploads)


def forget(uploads: Uploads) -> None:
    """Somebody else has waited for them and told what is lost."""
    _open.discard(uploads)


def _drain() -> None:
    if os.getpid() in _watching:
        for uploads in list(_open):
            uploads.finish()


def _report() -> None:
    if os.getpid() not in _watching:
        return
    code = 1
    try:
        _drain()
    except KeyboardInterrupt:
        code = 130
    lost = [text for uploads in _open for text in uploads.lost()]
    if lost:
        pending.end(code, [f"a checkpoint is not uploaded: {text}" for text in lost])
