"""A folder of checkpoints."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from styrax.checkpoint import commit, processes, restore, snapshot
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError, explain
from styrax.checkpoint.lock import Lock
from styrax.checkpoint.manifest import (
    ARRAYS,
    FILE,
    LEAVES,
    Manifest,
    list_incomplete,
    list_steps,
    read_manifest,
    step_name,
)
from styrax.checkpoint.pending import THREADS_OUTLIVE_MAIN, Save
from styrax.checkpoint.verify import Stamp, verify

_ATTEMPTS = 3


class Store:
    """Checkpoints of one run in one folder: saved in the background, listed only when whole, verified when read.

    Use it in a `with` block, or call `close`. With several processes, all of them make the same calls in the
    same order, on a folder that they share.

    Args:
        directory: The folder; made if missing, unless `read_only`.
        config: What to keep and how to verify; the defaults if not given.
        read_only: Only restore: take no lock and change nothing.

    Attributes:
        directory: The folder.
        skipped: Steps that `latest` passed over, and why.

    Raises:
        CheckpointError: The folder cannot be used, or another process saves there.

    Example:
        >>> import tempfile, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> with Store(folder) as store:
        ...     store.save(10, {"params": {"w": np.ones(3)}, "run": {"note": "first"}})
        >>> store = Store(folder, read_only=True)
        >>> store.latest(), store.restore(10, {"params": None})
        (10, {'params': {'w': array([1., 1., 1.])}})
    """

    def __init__(
        self, directory: str | Path, config: CheckpointConfig | None = None, *, read_only: bool = False
    ) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.skipped: dict[int, list[str]] = {}
        self._config = config or CheckpointConfig()
        self._read_only = read_only
        self._closed = False
        self._lock: Lock | None = None
        self._save: Save | None = None
        self._trusted: dict[Path, Stamp] = {}
        if read_only:
            if not self.directory.is_dir():
                raise CheckpointError(
                    f"{self.directory} is not a folder, so there are no checkpoints to read; check the path"
                )
            return
        error = None
        if processes.first():
            try:
                if not self.directory.is_dir():
                    self.directory.mkdir(parents=True, exist_ok=True)
                    commit.sync(self.directory.parent)
                self._lock = Lock(self.directory)
                commit.sweep(self.directory)
            except (OSError, CheckpointError) as raised:
                error = explain(raised, self.directory, "checkpoints cannot be kept")
                if self._lock is not None:
                    self._lock.release()
        processes.agree(error)

    def save(self, step: int, items: Mapping[str, Any]) -> None:
        """Save named items as the checkpoint of a step, in place of one that is there.

        Returns when the arrays may be donated, changed or deleted; writing goes on in the background, one
        save at a time: a second one waits for the first. The new checkpoint is listed once it is whole and on
        the disk; then those that `keep_last` and `keep_every` do not keep are deleted.

        Args:
            step: At least 0.
            items: Name -> item. An item is a tree of arrays (numpy, jax, typed random keys, numpy and Python
                scalars), or plain JSON: dictionaries with text keys, lists, texts, numbers, truth values, `None`.

        Raises:
            CheckpointError: Something in `items` cannot be saved (all is listed by path), the store is closed
                or read-only, or the save before this one failed.
        """
        self._writable()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"step: expected an integer, 0 or more, got {step!r}")
        self.wait()
        what = f"the checkpoint of step {step} cannot be written"
        folder = commit.staging(self.directory, step, f"{processes.share(secrets.randbits(31)):08x}")
        error: Exception | None = None
        taken = snapshot.Snapshot()
        try:
            taken = snapshot.take(items, pack_below=self._config.pack_below)
            if processes.first():
                folder.mkdir()
        except (OSError, CheckpointError) as raised:
            error = explain(raised, self.directory, what)
        processes.agree(error)
        try:
            finish = self._begin_arrays(folder, taken)
            write = functools.partial(self._write, step, folder, taken, finish, what)
            if self._config.async_save:
                self._save = Save(step, self.directory, write)
        except Exception as raised:
            shutil.rmtree(folder, ignore_errors=True)
            raise explain(raised, self.directory, what) from raised
        if not self._config.async_save:
            self._settle(write)

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Restore items of a step, exactly as they were saved.

        Args:
            step: Which checkpoint.
            like: Item -> what to restore it as. `None` gives the item as it was saved, with numpy arrays, and
                other nodes than dictionaries, lists and tuples as dictionaries of their fields. Otherwise a
                tree with the same paths: `jax.ShapeDtypeStruct` or a `jax.Array` for a `jax.Array` with that
                sharding (default device if it has none), a numpy array or scalar for such a one, a Python
                scalar for a Python scalar. Its leaves' values are not looked at.

        Returns:
            The items in `like`, with the containers of `like`.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or it differs from `like` in an item,
                path, shape, dtype or kind; all differences are listed.
        """
        if not self._closed:
            self.wait()
        before = self._identity(step)
        error, found = None, {}
        for _ in range(_ATTEMPTS):
            error = None
            try:
                found = self._restore(step, like)
            except CheckpointError as raised:
                error = raised
            after = self._identity(step)
            if before == after:
                break
            before = after  # its writer put a new one in its place meanwhile: what was read may be a mix
        else:
            error = CheckpointError(f"step {step} in {self.directory} is being replaced all the time; try again")
        if error is not None:
            raise error
        return found

    def steps(self) -> list[int]:
        """List the complete checkpoints on disk, in order."""
        return list_steps(self.directory)

    def latest(self, *, verified: bool = True) -> int | None:
        """Give the newest step that can be resumed from.

        Args:
            verified: Verify all files of it, and when they are damaged, go to the next older step with a
                warning and an entry in `skipped` (or raise, with `on_corrupt="error"`). If false, give the
                newest one unread.

        Returns:
            The step, or `None` when there is none.

        Raises:
            CheckpointError: A checkpoint is damaged, with `on_corrupt="error"`; or there are only damaged ones.
        """
        error, found = None, -1
        if processes.first():
            try:
                found = self._newest(verified)
            except CheckpointError as raised:
                error = raised
        processes.agree(error)
        found = processes.share(found)
        return None if found < 0 else found

    def verify(self, step: int) -> list[str]:
        """Compare every file of a step with its manifest by size and checksum.

        Returns:
            One text for each damaged file, with the leaf or item that it holds; empty if all is well.
        """
        self._listed(step)
        return verify(self.directory / step_name(step))

    def manifest(self, step: int) -> Manifest:
        """Read what a step holds: items, leaves, shapes, dtypes, files."""
        self._listed(step)
        try:
            return read_manifest(self.directory / step_name(step))
        except CheckpointError as error:
            raise self._damaged(step, [str(error)]) from error

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong in the background, once."""
        if not self._read_only:
            self._collect(processes.agree)

    def close(self) -> None:
        """Wait, free the lock, and refuse further saves; raise what went wrong. May be called again."""
        self._close(processes.agree)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(processes.alone)  # the other processes may not be coming here
        except CheckpointError as raised:
            error.add_note(f"while this was raised, a save failed too: {raised}")

    def _collect(self, agree: Callable[[Exception | None], None]) -> None:
        error = None
        try:
            if self._save is not None:
                self._save.result()
        except CheckpointError as raised:
            error = raised
        self._save = None  # not if the wait was interrupted: it still goes on
        agree(error)

    def _close(self, agree: Callable[[Exception | None], None]) -> None:
        if self._closed:
            return
        try:
            if not self._read_only:
                self._collect(agree)
        finally:
            self._closed = True
            if self._lock is not None:
                self._lock.release()

    def _restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        manifest = self.manifest(step)
        checkpoint = self.directory / step_name(step)
        plan = restore.plan(manifest, like, self.directory)
        problems = verify(checkpoint, mode=self._config.verify, items=like, trusted=self._trusted)
        if problems:
            raise self._damaged(step, problems)
        try:
            return restore.read(checkpoint, plan, timeout=self._config.timeout)
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            problems = verify(checkpoint) or [f"{type(error).__name__}: {error}"]
            raise self._damaged(step, problems) from error

    def _identity(self, step: int) -> tuple[int, int] | None:
        try:
            stat = (self.directory / step_name(step) / FILE).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _begin_arrays(self, folder: Path, taken: snapshot.Snapshot) -> Callable[[], None] | None:
        """Begin what Orbax has to do; gives what waits for its end, in the background."""
        if not taken.arrays:
            return None
        from styrax.checkpoint import arrays

        begin = functools.partial(arrays.Writing, folder / ARRAYS, taken.arrays, timeout=self._config.timeout)
        if taken.on_host and THREADS_OUTLIVE_MAIN and not processes.several():
            return lambda: begin().wait()
        writing = begin()
        if not THREADS_OUTLIVE_MAIN:
            writing.wait()
        return writing.wait

    def _write(
        self,
        step: int,
        folder: Path,
        taken: snapshot.Snapshot,
        finish: Callable[[], None] | None,
        what: str,
    ) -> None:
        """Make the checkpoint; runs in the background."""
        try:
            if finish is not None:
                finish()
            commit.kill_point("after_arrays")
            if not processes.first():
                return
            if taken.packed.size:
                commit.write_file(folder / LEAVES, taken.packed.data)
            for file, text in taken.documents.items():
                commit.write_file(folder / file, text)
            manifest = Manifest(
                step=step,
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                items=taken.checksum(),
                files=commit.seal(folder),
                writer=writer(),
            )
            commit.publish(folder, manifest)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise explain(error, self.directory, what) from error
        self.skipped.pop(step, None)
        try:
            old = commit.expired(
                self.steps(),
                keep_last=self._config.keep_last,
                keep_every=self._config.keep_every,
                newest=step,
                damaged=list(self.skipped),
            )
            commit.retire(self.directory, old)
        except OSError as error:
            raise explain(error, self.directory, f"step {step} is saved, but older ones cannot be deleted") from error

    def _settle(self, write: Callable[[], None]) -> None:
        error = None
        try:
            write()
        except CheckpointError as raised:
            error = raised
        processes.agree(error)

    def _newest(self, verified: bool) -> int:
        complete = self.steps()
        # Without its manifest a checkpoint is damaged too: starting over without a word would replace it.
        steps = sorted([*complete, *list_incomplete(self.directory)]) if verified else complete
        for step in reversed(steps):
            problems = []
            if verified:
                checkpoint = self.directory / step_name(step)
                problems = verify(checkpoint, mode=self._config.verify, trusted=self._trusted)
            if not problems:
                return step
            if self._config.on_corrupt == "error":
                raise self._damaged(step, problems)
            if self.skipped.get(step) != problems:
                self.skipped[step] = problems
                warnings.warn(f"{self._damaged(step, problems)}; taking the next older one", stacklevel=4)
        if steps:
            raise CheckpointError(
                f"all {len(steps)} checkpoints in {self.directory} are damaged, so there is none to resume from; "
                "`styrax checkpoint verify` says how. Restore the folder from a copy, or start in another one"
            )
        return -1

    def _damaged(self, step: int, problems: list[str]) -> CheckpointError:
        head = f"the checkpoint of step {step} in {self.directory} is damaged:"
        return CheckpointError("\n  ".join([head, *problems]))

    def _listed(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}: {there}")

    def _writable(self) -> None:
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened with read_only=True; open it without to save")
        if self._closed:
            raise CheckpointError(f"the store of {self.directory} is closed; open a new one to save")


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("styrax-checkpoint", "jax", "orbax-checkpoint", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def writer() -> dict[str, Any]:
    """Say who writes, for a manifest: versions, host and process."""
    return {"versions": _versions(), "host": socket.gethostname(), "pid": os.getpid()}
