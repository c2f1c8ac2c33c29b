"""Uploads that go on in the background, and what becomes of them when the program ends: done, or loud."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from styrax.checkpoint.errors import CheckpointError, Damaged
from styrax.checkpoint.manifest import FILE, Manifest, read_manifest, step_name
from styrax.checkpoint.remote import ending
from styrax.checkpoint.remote.bucket import Bucket
from styrax.checkpoint.remote.config import Mirror
from styrax.checkpoint.retention import Kept, expired

_LOG = logging.getLogger("styrax.checkpoint")
_TRIES = 3
_POLL = 0.02


class Uploader:
    """Uploads the steps of one folder to a bucket, one at a time, the newest first.

    When uploads take longer than the time between two saves, older steps wait; those that the bucket would not keep
    beside the newer ones are given up, which is logged and kept in `skipped`. A step that failed is tried again after
    the next one, three times in all.

    Args:
        bucket: Where to.
        directory: The folder of the checkpoints.
        mirror: Which steps, and what stays in the bucket.
        saving: Whether a step may still be offered by a save that goes on; asked when the program ends.

    Attributes:
        uploaded: The steps that were uploaded, in the order in which they arrived.
        skipped: Steps that will not be uploaded, and why.
    """

    def __init__(
        self, bucket: Bucket, directory: Path, mirror: Mirror, *, saving: Callable[[], bool] = lambda: False
    ) -> None:
        self.uploaded: list[int] = []
        self.skipped: dict[int, str] = {}
        self._bucket, self._directory, self._mirror, self._saving = bucket, directory, mirror, saving
        self._changed = threading.Condition()
        self._waiting: dict[int, None] = {}  # in the order in which they were saved
        self._failed: dict[int, CheckpointError] = {}  # waiting as well, until something else was tried
        self._tries: dict[int, int] = {}
        self._untold: list[CheckpointError] = []
        self._given_up: dict[int, CheckpointError] = {}  # after the last try; a new store tries again
        self._there: dict[int, Kept] = {}
        self._current: int | None = None
        self._swept = False
        self._running = self._closed = False
        ending.watch(self)

    def offer(self, step: int) -> None:
        """Upload a step that was saved just now, if it is one of those to be uploaded; returns at once."""
        try:
            kept = self._describe(step)
        except CheckpointError as error:
            self._skip(step, f"it cannot be read: {error}")
            return
        if kept is None:
            return
        with self._changed:
            self._waiting.pop(step, None)
            self._waiting[step] = None
            self._tries.pop(step, None)
            self._given_up.pop(step, None)
            self.skipped.pop(step, None)
            self._go_on()

    def catch_up(self, here: Iterable[int], there: Iterable[int]) -> None:
        """Offer what the bucket lacks and would keep beside what it has.

        Args:
            here: The steps in the folder.
            there: Those in the bucket.
        """
        there = set(there)
        missing: dict[int, Kept] = {}
        for step in here:
            if step not in there:
                try:
                    kept = self._describe(step)
                except CheckpointError:
                    kept = Kept()  # its upload will say what is wrong
                if kept is not None:
                    missing[step] = kept
        if not missing:
            return
        known = dict.fromkeys(there, Kept())
        if self._mirror.keep_best is not None or self._mirror.temporary:  # else its number says all
            for step in there:
                with contextlib.suppress(Damaged, FileNotFoundError):
                    known[step] = _kept(self._bucket.manifest(step))
        known.update(missing)
        unwanted = self._expired(known, max(known))
        for step in missing:
            if step not in unwanted:
                self.offer(step)

    def waiting(self) -> set[int]:
        """Give the steps that are still to be uploaded, the one under way included."""
        with self._changed:
            return {*self._waiting, *(() if self._current is None else (self._current,))}

    def wait(self, step: int | None = None, timeout: float | None = None) -> bool:
        """Wait until a step, or all of them, are uploaded, failed or skipped.

        Args:
            step: Which; all by default.
            timeout: Seconds; without limit by default.

        Returns:
            Whether it is so.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def done() -> bool:
            if step is None:
                return not self._running
            return step != self._current and (step not in self._waiting or step in self._failed)

        with self._changed:
            while not done():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def problem(self, step: int) -> str | None:
        """Say why a step is not uploaded, `None` if it is or is still waiting."""
        with self._changed:
            error = self._failed.get(step)
            return str(error) if error is not None else self.skipped.get(step)

    def check(self) -> None:
        """Raise what went wrong behind, once, unless it is only to be logged."""
        with self._changed:
            errors, self._untold = self._untold, []
        if errors and self._mirror.on_error == "raise":
            raise _together(errors)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the uploads, trying those that failed once more; a second call does nothing.

        Raises:
            CheckpointError: Not all steps are uploaded; they stay in the folder.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._go_on()
        done = self.wait(timeout=timeout)
        ending.forget(self)
        left = self.lost() + self._missing()
        if left:
            limit = "" if done else f" after {timeout:g} s (close_timeout)"
            raise CheckpointError(
                "\n  ".join([f"not everything is in {self._bucket.url}{limit}:", *left])
                + f"\nThe checkpoints are in {self._directory}; they are uploaded when a store is opened there again"
            )

    def finish(self) -> None:
        """Wait until all is uploaded that will ever be offered; raise nothing."""
        while self._saving():
            time.sleep(_POLL)
        self.wait()
        with self._changed:
            left = not self._running and any(step not in self._failed for step in self._waiting)
            self._running = self._running or left
        if left:  # no thread could be started
            self._run()

    def lost(self) -> list[str]:
        """Say which steps are not uploaded and not skipped, one text each."""
        with self._changed:
            names = [*self._waiting, *(() if self._current is None else (self._current,))]
            return [
                f"step {step}: {self._failed.get(step) or 'its upload has not ended'}" for step in dict.fromkeys(names)
            ]

    def _missing(self) -> list[str]:
        """Say which steps were given up although the bucket would have kept them, and are still in the folder."""
        with self._changed:
            if not self._given_up:
                return []
            here = [step for step in self._given_up if (self._directory / step_name(step) / FILE).exists()]
            known = {**self._there, **self._read(here)}
            unwanted = self._expired(known, max(known)) if known else []
            return [
                f"step {step}: {error}"
                for step, error in self._given_up.items()
                if step in here and step not in unwanted
            ]

    def _go_on(self) -> None:
        """Start the thread if there is something to do; the lock is held."""
        self._failed.clear()
        if self._waiting and not self._running:
            self._running = True
            # Not waited for by the interpreter, but by `ending`, so that a request that hangs can be given up.
            thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the program is ending, and `finish` will do it
                self._running = False

    def _run(self) -> None:
        while True:
            with self._changed:
                self._give_up_old()
                ready = [step for step in self._waiting if step not in self._failed]
                self._current = ready[-1] if ready else None
                self._running = bool(ready)
                self._changed.notify_all()
                if self._current is None:
                    return
                step = self._current
                del self._waiting[step]
            error = None
            try:
                self._upload(step)
            except CheckpointError as raised:
                error = raised
            except Exception as raised:  # nobody else would hear of it
                error = CheckpointError(f"step {step} cannot be uploaded: {type(raised).__name__}: {raised}")
                error.__cause__ = raised
            with self._changed:
                self._current = None
                if error is not None and step not in self._waiting:  # or else it was saved anew meanwhile
                    self._fail(step, error)

    def _upload(self, step: int) -> None:
        kept = self._describe(step)
        if kept is None:
            return
        started = time.monotonic()
        self._bucket.upload(self._directory / step_name(step), verify=self._mirror.verify)
        _LOG.info("step %d is in %s after %.1f s", step, self._bucket.url, time.monotonic() - started)
        with self._changed:
            self.uploaded.append(step)
            self._tries.pop(step, None)
            self._failed.clear()  # the way is free, so those that failed get another chance
        try:
            self._tidy(step, kept)
        except CheckpointError as error:
            _LOG.warning("step %d is in %s, but older ones cannot be deleted: %s", step, self._bucket.url, error)
            with self._changed:
                self._untold.append(error)

    def _tidy(self, step: int, kept: Kept) -> None:
        """Delete from the bucket what nothing keeps beside a new step, and once what uploads left that were cut off."""
        there = {step: kept}
        for other in self._bucket.steps():
            if other not in there:
                # A damaged one, or one that was deleted just now, is not ours to judge.
                with contextlib.suppress(Damaged, FileNotFoundError):
                    there[other] = self._there.get(other) or _kept(self._bucket.manifest(other))
        with self._changed:
            self._there = there
        for old in self._expired(there, step):
            self._bucket.delete(old)
            with self._changed:
                self._there.pop(old, None)
        if not self._swept:
            self._bucket.sweep()
            self._swept = True

    def _describe(self, step: int) -> Kept | None:
        """Read what decides about a step; `None` if it is not to be uploaded."""
        if self._mirror.every is not None and step % self._mirror.every:
            return None
        kept = _kept(read_manifest(self._directory / step_name(step)))
        return None if kept.temporary and not self._mirror.temporary else kept

    def _read(self, steps: Iterable[int]) -> dict[int, Kept]:
        found = {}
        for step in steps:
            try:
                found[step] = _kept(read_manifest(self._directory / step_name(step)))
            except CheckpointError:
                found[step] = self._there.get(step, Kept())  # its upload will say what is wrong
        return found

    def _expired(self, steps: dict[int, Kept], newest: int) -> list[int]:
        mirror = self._mirror
        return expired(
            steps, keep_last=mirror.keep_last, keep_every=mirror.keep_every, best=mirror.keep_best, newest=newest
        )

    def _give_up_old(self) -> None:
        """Skip what the bucket would not keep anyway; the lock is held."""
        if len(self._waiting) < 2:
            return
        known = {**self._there, **self._read(self._waiting)}
        newest = list(self._waiting)[-1]
        for step in self._expired(known, newest):
            if step in self._waiting:
                self._drop(step, f"newer ones were saved before it could be uploaded, the last of them step {newest}")

    def _fail(self, step: int, error: CheckpointError) -> None:
        self._tries[step] = self._tries.get(step, 0) + 1
        self._untold.append(error)
        _LOG.warning("step %d is not uploaded: %s", step, error)
        if not (self._directory / step_name(step) / FILE).exists():
            self._skip(step, "it was deleted before it was uploaded")
        elif self._tries[step] >= _TRIES:
            self._given_up[step] = error
            self._skip(step, f"it failed {_TRIES} times, at last: {error}")
        else:
            # Before the others, as it is older than what comes; tried again after the next one.
            self._waiting = {step: None, **self._waiting}
            self._failed[step] = error

    def _drop(self, step: int, why: str) -> None:
        self._waiting.pop(step, None)
        self._failed.pop(step, None)
        self._skip(step, why)

    def _skip(self, step: int, why: str) -> None:
        self.skipped[step] = why
        _LOG.warning("step %d will not be uploaded to %s: %s", step, self._bucket.url, why)


def _kept(manifest: Manifest) -> Kept:
    return Kept(temporary=manifest.temporary, metrics=manifest.metrics)


def _together(errors: list[CheckpointError]) -> CheckpointError:
    first, *others = errors
    for other in others:
        first.add_note(f"and before it was told: {other}")
    return first
