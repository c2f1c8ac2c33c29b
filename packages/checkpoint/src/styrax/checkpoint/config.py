"""The configuration of a run's checkpoints."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from styrax.checkpoint.remote.config import Mirror
from styrax.checkpoint.retention import Best
from styrax.core.config import NonNegative, Positive, check

if TYPE_CHECKING:
    from styrax.checkpoint.remote.tiers import TieredStore
    from styrax.checkpoint.store import Store

# Arrays of fewer bytes go into one file of our own: the dearer it is to open a file, the more of them.
_PACK_BELOW = {"local": 2**20, "shared": 2**22, "object": 2**23}


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, what to keep, and how far to trust what is read.

    Attributes:
        kind: Name of this kind of checkpoint.
        every: Steps between two saves.
        minutes: Also save when so many have gone since the last one; such a checkpoint is temporary, it goes
            when the next one is saved. Not by default.
        keep_last: How many of the newest checkpoints to keep, temporary ones not counted.
        keep_every: Also keep, for ever, those of steps that this divides; none by default.
        keep_best: Also keep those with the best values of a metric; none by default.
        verify: Before anything is restored, compare each file with the manifest: its size, or its size and
            digest. `readback` also reads every array back from a new checkpoint before it is listed.
        on_corrupt: When the newest checkpoint does not verify, resume from the next older one, with a
            warning, or raise an error.
        on_busy: When a save is asked for while one is being written: wait for it, raise an error, or skip the
            new one, with a warning and a ticket that says so.
        async_save: Write in the background; if false, `save` returns when the checkpoint is on disk.
        profile: Where the checkpoints lie, which sets what is best there: a `local` disk, a file system that
            several hosts share (`shared`), or one that is slow to open a file (`object`).
        pack_below: Arrays of fewer bytes, wholly on this host, go into one file of our own, many times faster
            than an entry each in Orbax. By the profile if not given.
        compress: Items whose large arrays are compressed (Zstandard): smaller by little for random numbers, at
            two to four times the processor time.
        timeout: Seconds that each part of writing one checkpoint may take.
        mirror: Where checkpoints are uploaded to, and come back from when the folder's are damaged or gone (needs
            `styrax-checkpoint[remote]`); nowhere by default.
    """

    kind: Literal["orbax"] = "orbax"
    every: Positive = 1000
    minutes: Positive | None = None
    keep_last: Positive = 3
    keep_every: Positive | None = None
    keep_best: Best | None = None
    verify: Literal["size", "checksum", "readback"] = "checksum"
    on_corrupt: Literal["older", "error"] = "older"
    on_busy: Literal["wait", "error", "skip"] = "wait"
    async_save: bool = True
    profile: Literal["local", "shared", "object"] = "local"
    pack_below: NonNegative | None = None
    compress: tuple[str, ...] = ()
    timeout: Positive = 1800
    mirror: Mirror | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def smallest(self) -> int:
        """Bytes from which an array goes to Orbax."""
        return _PACK_BELOW[self.profile] if self.pack_below is None else self.pack_below

    @property
    def raw(self) -> bool:
        """Whether every array gets files of its own, see `styrax.checkpoint.raw`; names differ by case there."""
        return self.profile == "local" and sys.platform == "linux"

    def should_save(self, step: int) -> bool:
        """Tell whether a lasting checkpoint is due when `step` steps are done.

        Example:
            >>> [step for step in range(9) if CheckpointConfig(every=4).should_save(step)]
            [4, 8]
        """
        return step > 0 and step % self.every == 0

    def build(self, directory: str | Path, read_only: bool = False) -> Store | TieredStore:
        """Open a folder, or a URL, for saving and restoring.

        Args:
            directory: A folder, made if missing unless `read_only`; or a URL such as `s3://bucket/run`.
            read_only: Only restore: take no lock and change nothing; may be done while another process saves.

        Returns:
            A `Store`, with `mirror` a `TieredStore`, of a URL a `BucketStore`.

        Raises:
            CheckpointError: The folder cannot be used, or another process saves there.
        """
        if "://" in str(directory):
            from styrax.checkpoint.remote.bucket_store import BucketStore

            return BucketStore(str(directory), self, read_only=read_only)
        if self.mirror is not None:
            from styrax.checkpoint.remote.tiers import TieredStore

            return TieredStore(directory, self.mirror, self, read_only=read_only)
        from styrax.checkpoint.store import Store

        return Store(directory, self, read_only=read_only)
