"""Checkpoints in two places: a folder on this machine, where they are saved, and a bucket, where they are kept."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from styrax.checkpoint import processes
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError, Damaged
from styrax.checkpoint.manifest import Manifest, list_incomplete
from styrax.checkpoint.pending import Ticket
from styrax.checkpoint.reading import Resumed
from styrax.checkpoint.remote.bucket import Bucket
from styrax.checkpoint.remote.config import Mirror
from styrax.checkpoint.remote.tickets import MirrorTicket
from styrax.checkpoint.remote.upload import Uploader
from styrax.checkpoint.store import Store


class TieredStore:
    """A `Store` whose checkpoints are uploaded in the background, and come back from there when need be.

    A save is as fast as to the folder alone. Each new checkpoint is then uploaded, one at a time, the newest first;
    the folder keeps it at least as long. `latest`, `restore` and `resume` look at both places: a checkpoint that is
    damaged or missing in the folder is downloaded, and verified on its way. A machine that has never seen the run
    goes on from the bucket. Every fallback is a warning and stands in `fetched` or `skipped`.

    Use it in a `with` block, or call `close`, which waits for the uploads. With several processes, all of them make
    the same calls in the same order; process 0 uploads and downloads.

    Args:
        directory: The folder; made if missing, unless `read_only`.
        mirror: The bucket, or only its URL.
        config: What to keep in the folder and how to verify; the defaults if not given.
        storage_options: What fsspec's file system takes for the URL: an endpoint, keys, ... By default they come from
            the environment and from fsspec's own configuration.
        read_only: Only restore: take no lock, and change neither place. What is needed of the bucket is downloaded to
            a folder for temporary files.

    Attributes:
        directory: The folder.
        bucket: The bucket.
        local: The store of the folder alone.
        fetched: Steps that came from the bucket, and why.

    Raises:
        CheckpointError: The folder cannot be used, another process saves there, or the URL is none.

    Example:
        >>> import tempfile, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> with TieredStore(f"{folder}/fast", f"file://{folder}/safe") as store:
        ...     ticket = store.save(10, {"params": {"w": np.ones(3)}})
        ...     ticket.uploaded()
        True
        >>> elsewhere = TieredStore(f"{folder}/other-machine", f"file://{folder}/safe", read_only=True)
        >>> elsewhere.latest(), elsewhere.restore(10, {"params": None})
        (10, {'params': {'w': array([1., 1., 1.])}})
    """

    def __init__(
        self,
        directory: str | Path,
        mirror: Mirror | str,
        config: CheckpointConfig | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        mirror = Mirror(url=mirror) if isinstance(mirror, str) else mirror
        self.directory = Path(directory).expanduser().absolute()
        self.bucket = Bucket(
            mirror.url, storage_options=storage_options, workers=mirror.workers, attempts=mirror.attempts
        )
        self.fetched: dict[int, list[str]] = {}
        self._skipped: dict[int, list[str]] = {}
        self._mirror, self._config, self._read_only = mirror, config or CheckpointConfig(), read_only
        self._ticket: Ticket | None = None
        self._newest: int | None = None
        self._uploads: Uploader | None = None
        # Whether to go to an older step is decided here, when the bucket has been asked.
        local = dataclasses.replace(self._config, on_corrupt="older")
        self.local: Store | None = None
        if read_only:
            self.local = Store(self.directory, local, read_only=True) if self.directory.is_dir() else None
            return
        self.local = Store(self.directory, local, on_committed=self._committed, protected=self._protected)
        if processes.first():
            self._uploads = Uploader(self.bucket, self.directory, mirror, saving=self._saving)
        try:
            self._shared(self._catch_up)
        except CheckpointError:
            self.local.close()
            raise

    @property
    def skipped(self) -> dict[int, list[str]]:
        """Steps that `latest` or `resume` passed over because they are good in neither place, and why."""
        return {**(self.local.skipped if self.local is not None else {}), **self._skipped}

    @property
    def uploads(self) -> Uploader | None:
        """What is uploaded, waiting or given up; `None` on processes that do not upload."""
        return self._uploads

    def save(self, step: int, items: Mapping[str, Any], **options: Any) -> MirrorTicket:
        """Save named items to the folder, and upload them when they are there; see `Store.save`.

        Raises:
            CheckpointError: As of `Store.save`; or an upload before this one failed, and then the save that was asked
                for goes on all the same.
        """
        if self.local is None or self._read_only:
            raise CheckpointError(f"{self.directory} was opened with read_only=True; open it without to save")
        earlier = None
        try:  # before, for what goes wrong with the upload of this very step is for its ticket to say
            self._shared(self._check)
        except CheckpointError as error:
            earlier = error
        try:
            ticket = self.local.save(step, items, **options)
        except Exception as error:
            if earlier is not None:
                error.add_note(str(earlier))
            raise
        self._ticket = ticket
        self._skipped.pop(step, None)
        if earlier is not None:
            raise earlier
        return MirrorTicket(ticket, self._uploads)

    def due(self, step: int) -> Any:
        """Tell whether a checkpoint is due; see `Store.due`."""
        return None if self.local is None else self.local.due(step)

    def restore(self, step: int, like: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Restore items of a step from the folder, or from the bucket where it is damaged or missing there.

        Args:
            step: Which checkpoint.
            like: See `Store.restore`.
            options: See `Store.restore`.

        Raises:
            CheckpointError: There is no such checkpoint in either place, it is damaged in both, or it differs from
                what is asked for.
        """
        why = f"it is not in {self.directory}"
        if self.local is not None:
            self.local.wait()
            if self._shared(lambda: step in self._in_folder()):
                try:
                    return self.local.restore(step, like, **options)
                except Damaged as error:
                    if not self._shared(lambda: step in self.bucket.steps()):
                        raise
                    why = str(error)
        if self._read_only or self.local is None:
            return self._restore_by_itself(step, like, why, options)
        self._shared(lambda: self._fetch(step, [why]))
        return self.local.restore(step, like, **options)

    def resume(self, items: Mapping[str, Any] | None = None, /, **options: Any) -> Resumed | None:
        """Go on from the newest checkpoint that verifies, in either place; see `Store.resume`."""
        found, step = self._latest(verified=True)
        if self.local is not None and (step == found or not self._read_only):
            return self.local.resume(items, **options)
        if step is None:
            return None
        with tempfile.TemporaryDirectory(prefix="styrax-checkpoint-") as folder:
            self.bucket.fetch(step, Path(folder))
            return Store(folder, self._config, read_only=True).resume(items, **options)

    def steps(self) -> list[int]:
        """List the complete checkpoints of both places, in order."""
        return sorted({*(self.local.steps() if self.local is not None else ()), *self._in_bucket()})

    def latest(self, *, verified: bool = True) -> int | None:
        """Give the newest step that can be resumed from, in either place.

        One that is good in the bucket only is downloaded into the folder, unless `read_only`.

        Args:
            verified: See `Store.latest`; if false, nothing is read or downloaded.

        Raises:
            CheckpointError: A checkpoint is damaged in both places, with `on_corrupt="error"`; there are only such;
                or the bucket cannot be read, so that it is not known whether it has a newer one.
        """
        return self._latest(verified=verified)[1]

    def verify(self, step: int) -> list[str]:
        """Compare every file of a step with its manifest: in the folder, or in the bucket where it is not there."""
        if self.local is not None and step in self._in_folder():
            return self.local.verify(step)
        return self.bucket.verify(step)

    def manifest(self, step: int) -> Manifest:
        """Read what a step holds."""
        if self.local is not None and step in self.local.steps():
            return self.local.manifest(step)
        return self.bucket.manifest(step)

    def wait(self) -> None:
        """Return when nothing is being written to the folder; raise what went wrong behind, uploads included."""
        if self.local is not None:
            self.local.wait()
        self._shared(self._check)

    def uploaded(self, timeout: float | None = None) -> bool:
        """Wait for the folder, then for the uploads.

        Args:
            timeout: Seconds to wait for uploads; without end by default.

        Returns:
            Whether they have ended in time, well or not.

        Raises:
            CheckpointError: A save or an upload failed.
        """
        if self.local is not None:
            self.local.wait()
        ended = self._uploads is None or self._uploads.wait(timeout=timeout)
        self.wait()
        return ended

    def close(self, timeout: float | None = None) -> None:
        """Wait for the folder and for the uploads, and refuse further saves; may be called again.

        Args:
            timeout: Seconds to wait for uploads; that of the mirror by default.

        Raises:
            CheckpointError: A save failed, or not everything is uploaded. What is not is in the folder; it is
                uploaded when the store is opened there again.
        """
        errors = []
        # The uploads come before the lock is given up: nobody else may delete what is being read.
        for end in (self._end_saves, lambda: self._end_uploads(timeout), self._end_local):
            try:
                end()
            except CheckpointError as error:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and then: {other}")
            raise errors[0]

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as raised:
            if error is None:
                raise
            error.add_note(f"while this was raised, a save or an upload failed too: {raised}")

    def _latest(self, *, verified: bool) -> tuple[int | None, int | None]:
        """Give the newest good step of the folder, and that of both places."""
        found, damaged = None, None
        if self.local is not None:
            try:
                found = self.local.latest(verified=verified)
            except CheckpointError as error:
                damaged = error
        newest = self._shared(lambda: self._newer(-1 if found is None else found, verified))
        if newest < 0 and damaged is not None:
            raise damaged
        return found, None if newest < 0 else newest

    def _end_saves(self) -> None:
        if self.local is not None:
            self.local.wait()

    def _end_uploads(self, timeout: float | None) -> None:
        if self._uploads is not None:
            self._uploads.close(self._mirror.close_timeout if timeout is None else timeout)

    def _end_local(self) -> None:
        if self.local is not None:
            self.local.close()

    def _check(self) -> int:
        if self._uploads is not None:
            self._uploads.check()
        return 0

    def _committed(self, step: int, folder: Path) -> None:
        self._newest = step
        if self._uploads is not None:
            self._uploads.offer(step)

    def _protected(self) -> set[int]:
        # The one that was committed just now stays anyway, and is to count as one of those that the folder keeps.
        return set() if self._uploads is None else self._uploads.waiting() - {self._newest}

    def _saving(self) -> bool:
        return self._ticket is not None and not self._ticket.done

    def _catch_up(self) -> int:
        """Upload what an earlier process saved and did not get to upload."""
        there = self._in_bucket()
        if self.local is not None and self._uploads is not None:
            self._uploads.catch_up(self.local.steps(), there)
        return 0

    def _in_folder(self) -> list[int]:
        # One without its manifest counts: it is damaged, and not to be passed over in silence.
        return [*(self.local.steps() if self.local is not None else ()), *list_incomplete(self.directory)]

    def _in_bucket(self) -> list[int]:
        try:
            return self.bucket.steps()
        except CheckpointError as error:
            if self._mirror.on_error == "raise":
                raise
            warnings.warn(f"{error}; only {self.directory} is looked at", stacklevel=4)
            return []

    def _newer(self, found: int, verified: bool) -> int:
        """Give the newest good step of the bucket that is newer than what was found, or that."""
        there = set(self._in_bucket())
        damaged = self.local.skipped if self.local is not None and verified else {}
        for step in sorted({*there, *damaged} - set(range(found + 1)), reverse=True):
            if not verified:
                return step
            reasons = list(damaged.get(step, ()))
            if step in there:
                try:
                    self._fetch(step, reasons or [f"it is not in {self.directory}"])
                    return step
                except Damaged as error:
                    reasons.append(str(error))
            if self._config.on_corrupt == "error":
                raise Damaged("\n  ".join([f"the checkpoint of step {step} is damaged:", *reasons]))
            if self._skipped.get(step) != reasons:
                self._skipped[step] = reasons
                warnings.warn(f"step {step} is damaged in every place; taking the next older one", stacklevel=5)
        if found < 0 and there:
            raise CheckpointError(
                f"all checkpoints in {self.directory} and {self.bucket.url} are damaged, so there is none to resume "
                "from; start in another place, or restore one of these from a copy"
            )
        return found

    def _fetch(self, step: int, why: list[str]) -> bool:
        """Bring a step from the bucket into the folder; if that must not be changed, only verify it there."""
        if self._read_only or self.local is None:
            problems = self.bucket.verify(step)
            if problems:
                raise Damaged("\n  ".join([f"step {step} in {self.bucket.url} is damaged:", *problems]))
        else:
            self.bucket.fetch(step, self.directory)
            self.local.skipped.pop(step, None)
        self._tell(step, why)
        return True

    def _restore_by_itself(self, step: int, like: Mapping[str, Any], why: str, options: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="styrax-checkpoint-") as folder:
            self.bucket.fetch(step, Path(folder), items=like)
            self._tell(step, [why])
            return Store(folder, self._config, read_only=True).restore(step, like, **options)

    def _tell(self, step: int, why: list[str]) -> None:
        if self.fetched.get(step) != why:
            self.fetched[step] = why
            warnings.warn(f"step {step} comes from {self.bucket.url}: {'; '.join(why)}", stacklevel=6)

    def _shared(self, ask: Callable[[], int]) -> int:
        """Ask on process 0, and give every process the answer or the error; each asks by itself if read-only."""
        talk = None if self.local is None else self.local.talk()
        if talk is None:
            return ask()
        error, found = None, 0
        if talk.first:
            try:
                found = ask()
            except CheckpointError as raised:
                error = raised
        return int(talk.agree(error, str(int(found)))[0])
