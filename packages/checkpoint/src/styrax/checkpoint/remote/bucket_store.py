"""A store whose only lasting place is a bucket."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from styrax.checkpoint import processes
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.remote.config import Mirror
from styrax.checkpoint.remote.tickets import BucketTicket
from styrax.checkpoint.remote.tiers import TieredStore


class BucketStore(TieredStore):
    """Checkpoints at a URL alone, with the methods of `Store`.

    Each is written to a folder for temporary files and uploaded from there; one is saved while one is uploaded. A
    checkpoint is listed, and a save over, when it is whole in the bucket. Where this machine has a disk that lasts,
    `TieredStore` is the better choice.

    Args:
        url: Such as `s3://bucket/runs/a/checkpoints`.
        config: What to keep and how to verify; the defaults if not given.
        storage_options: See `Bucket`.
        read_only: Only restore.
        scratch: A folder with room for two checkpoints, of this store alone; with several processes they must share
            it. One for temporary files by default.

    Raises:
        CheckpointError: The URL is none, the bucket cannot be listed, or the folder cannot be used.

    Example:
        >>> import numpy as np
        >>> with BucketStore("memory://runs/a") as store:
        ...     store.save(10, {"params": {"w": np.ones(3)}}).committed()
        ...     store.steps(), store.restore(10, {"params": None})
        ([10], {'params': {'w': array([1., 1., 1.])}})
    """

    def __init__(
        self,
        url: str,
        config: CheckpointConfig | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
        scratch: str | Path | None = None,
    ) -> None:
        config = config or CheckpointConfig()
        if scratch is None and not read_only and processes.several():
            raise CheckpointError(f"{url}: several processes need a folder that they share; give it as scratch")
        mirror = Mirror(
            url=url,
            temporary=True,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            verify="readback" if config.verify == "readback" else "size",
        )
        self._own = tempfile.TemporaryDirectory(prefix="styrax-checkpoint-") if scratch is None else None
        local = dataclasses.replace(config, keep_last=1, keep_every=None, keep_best=None)
        folder = scratch if self._own is None else Path(self._own.name) / "checkpoints"
        super().__init__(str(folder), mirror, local, storage_options=storage_options, read_only=read_only)

    def save(self, step: int, items: Mapping[str, Any], **options: Any) -> BucketTicket:
        """Save named items; see `Store.save`. Waits for the upload of the step before."""
        if self.uploads is not None:
            self.uploads.wait()
        ticket = super().save(step, items, **options)
        if not self._config.async_save:
            self.wait()
        return BucketTicket(ticket.saved, self.uploads)

    def steps(self) -> list[int]:
        """List the complete checkpoints of the bucket, in order."""
        return self._in_bucket()

    def restore(self, step: int, like: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Restore items of a step; see `Store.restore`."""
        self.wait()
        return super().restore(step, like, **options)

    def latest(self, *, verified: bool = True) -> int | None:
        """Give the newest step that can be resumed from; see `Store.latest`."""
        self.wait()
        return super().latest(verified=verified)

    def wait(self) -> None:
        """Return when nothing is being written or uploaded; raise what went wrong behind."""
        if self.local is not None:
            self.local.wait()
        if self.uploads is not None:
            self.uploads.wait()
        super().wait()

    def close(self, timeout: float | None = None) -> None:
        """Wait, and refuse further saves; see `TieredStore.close`."""
        super().close(timeout)
        if self._own is not None:  # after an error it stays until the program ends
            self._own.cleanup()

    def _tell(self, step: int, why: list[str]) -> None:
        self.fetched[step] = why  # no fallback: this is where they are
