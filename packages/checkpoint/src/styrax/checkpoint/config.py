"""The configuration of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from styrax.core.config import NonNegative, Positive, check

if TYPE_CHECKING:
    from styrax.checkpoint.store import Store


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, what to keep, and how far to trust what is read.

    Attributes:
        kind: Name of this kind of checkpoint.
        every: Steps between two saves.
        keep_last: How many of the newest checkpoints to keep.
        keep_every: Also keep, for ever, those of steps that this divides; none by default.
        verify: Before anything is restored, compare each file with the manifest: its size, or its size and
            checksum (which reads it once more).
        on_corrupt: When the newest checkpoint does not verify, resume from the next older one, with a
            warning, or raise an error.
        async_save: Write in the background; if false, `save` returns when the checkpoint is on disk.
        pack_below: Arrays of fewer bytes, wholly on this host, go into one file of our own, many times faster
            than an entry each in Orbax.
        timeout: Seconds that Orbax may take to write one checkpoint.
    """

    kind: Literal["orbax"] = "orbax"
    every: Positive = 1000
    keep_last: Positive = 3
    keep_every: Positive | None = None
    verify: Literal["size", "checksum"] = "checksum"
    on_corrupt: Literal["older", "error"] = "older"
    async_save: bool = True
    pack_below: NonNegative = 2**20
    timeout: Positive = 1800

    def __post_init__(self) -> None:
        check(self)

    def should_save(self, step: int) -> bool:
        """Tell whether a checkpoint is due when `step` steps are done.

        Example:
            >>> [step for step in range(9) if CheckpointConfig(every=4).should_save(step)]
            [4, 8]
        """
        return step > 0 and step % self.every == 0

    def build(self, directory: str | Path, read_only: bool = False) -> Store:
        """Open a folder for saving and restoring.

        Args:
            directory: Made if missing, unless `read_only`.
            read_only: Only restore: take no lock and change nothing; may be done while another process saves.

        Raises:
            CheckpointError: The folder cannot be used, or another process saves there.
        """
        from styrax.checkpoint.store import Store

        return Store(directory, self, read_only=read_only)
