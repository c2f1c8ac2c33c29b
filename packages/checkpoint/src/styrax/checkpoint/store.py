"""A folder of checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from styrax.checkpoint import commit, processes
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError, explain
from styrax.checkpoint.lock import Lock
from styrax.checkpoint.manifest import read_manifest, step_name
from styrax.checkpoint.pending import Save, Ticket
from styrax.checkpoint.reading import Reader
from styrax.checkpoint.retention import Kept, expired
from styrax.checkpoint.saving import Writer

_log = logging.getLogger(__name__)


class Store(Reader):
    """Checkpoints of one run in one folder: saved in the background, listed only when whole, verified when read.

    Use it in a `with` block, or call `close`. With several processes, all of them make the same calls in the
    same order, on a folder that they share.

    Args:
        directory: The folder; made if missing, unless `read_only`.
        config: What to keep and how to verify; the defaults if not given.
        read_only: Only restore: take no lock and change nothing.
        on_committed: Called with step and folder of each new checkpoint, in the background, on process 0.
        protected: Called before older ones are deleted, for steps that have to stay.

    Attributes:
        directory: The folder.
        skipped: Steps that `latest` or `resume` passed over, and why.

    Raises:
        CheckpointError: The folder cannot be used, or another process saves there.

    Example:
        >>> import tempfile, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> with Store(folder) as store:
        ...     ticket = store.save(10, {"params": {"w": np.ones(3)}, "run": {"note": "first"}})
        ...     ticket.committed()
        >>> store = Store(folder, read_only=True)
        >>> store.latest(), store.restore(10, {"params": None})
        (10, {'params': {'w': array([1., 1., 1.])}})
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig | None = None,
        *,
        read_only: bool = False,
        on_committed: Callable[[int, Path], None] | None = None,
        protected: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        super().__init__(directory, config)
        self._read_only = read_only
        self._on_committed, self._protected = on_committed, protected
        self._closed = False
        self._lock: Lock | None = None
        self._save: Save | None = None
        self._saves = 0
        self._previous: processes.Channel | None = None
        self._known: dict[int, tuple[Any, Kept]] = {}
        self._last_save = time.monotonic()
        if read_only:
            if not self.directory.is_dir():
                raise CheckpointError(
                    f"{self.directory} is not a folder, so there are no checkpoints to read; check the path"
                )
            return
        error = None
        if processes.first():
            try:
                commit.make_folders(self.directory)
                self._lock = Lock(self.directory)
                commit.sweep(self.directory)
            except (OSError, CheckpointError) as raised:
                error = explain(raised, self.directory, "checkpoints cannot be kept")
                if self._lock is not None:
                    self._lock.release()
        processes.agree(error)
        self._group = processes.Group(self.directory)
        self._main = self._group.channel("main", self._config.timeout)

    def due(self, step: int) -> Literal["lasting", "temporary"] | None:
        """Tell whether a checkpoint is due when `step` steps are done, and which kind.

        With `minutes` set and several processes, they agree on the time; so all have to ask.
        """
        if self._config.should_save(step):
            return "lasting"
        if self._config.minutes is None:
            return None
        late = time.monotonic() - self._last_save >= 60 * self._config.minutes
        return "temporary" if self._main.share("late" if late else "") else None

    def save(
        self, step: int, items: Mapping[str, Any], *, metrics: Mapping[str, Any] | None = None, temporary: bool = False
    ) -> Ticket:
        """Save named items as the checkpoint of a step, in place of one that is there.

        Returns when the arrays may be donated, changed or deleted; writing goes on in the background, one save at
        a time: see `on_busy`. The new checkpoint is listed once it is whole and on the disk; then those are deleted
        that nothing keeps (`keep_last`, `keep_every`, `keep_best`).

        Args:
            step: At least 0.
            items: Name -> item. An item is a tree of arrays (numpy, jax, typed random keys, numpy and Python
                scalars, texts, bytes), an `nnx` module or optimizer, an iterator with `get_state` and `set_state`,
                or plain JSON: dictionaries with text keys, lists, texts, numbers, truth values, `None`.
            metrics: Name -> number, written into the manifest.
            temporary: It goes when the next one is saved.

        Raises:
            CheckpointError: Something in `items` cannot be saved (all is listed by path), the store is closed
                or read-only, or the save before this one failed.
        """
        self._writable()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"step: expected an integer, 0 or more, got {step!r}")
        measured = _numbers({} if metrics is None else metrics)
        if self._config.on_busy != "wait" and self._busy():
            if self._config.on_busy == "error":
                raise CheckpointError(f"step {step} cannot be saved while another save goes on (on_busy='error')")
            _log.warning("the checkpoint of step %d is skipped: another save goes on (on_busy='skip')", step)
            return Ticket(step, skipped=True)
        self.wait()
        self._saves += 1
        channel = self._group.channel(f"save-{self._saves}", self._config.timeout)
        folder = commit.staging(self.directory, step, f"{self._group.token}{self._saves:08x}")
        writer = Writer(folder, step, self._config, channel, metrics=measured, temporary=temporary)
        writer.stage(items)
        if self._previous is not None:
            self._previous.end()
        self._previous = channel
        self._last_save = time.monotonic()
        if not self._config.async_save:
            self._write(writer, step)
            return Ticket(step)
        try:
            self._save = Save(step, self.directory, lambda: self._write(writer, step))
        except RuntimeError as error:  # no thread can be started any more
            raise CheckpointError(
                f"step {step} cannot be saved in the background: {error}; use async_save=False"
            ) from error
        return Ticket(step, self._save)

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong in the background, once."""
        save, self._save = self._save, None
        if save is not None:
            try:
                save.result()
            except KeyboardInterrupt:
                self._save = save  # it still goes on
                raise

    def close(self) -> None:
        """Wait, free the lock, and refuse further saves; raise what went wrong. May be called again."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            if not self._read_only:
                self._group.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as raised:
            error.add_note(f"while this was raised, a save failed too: {raised}")

    def talk(self) -> processes.Channel | None:
        """Give the conversation with the other processes; `None` if they can only ask over the devices."""
        return None if self._read_only or self._closed else self._main

    def _busy(self) -> bool:
        """Whether a save is going on, as process 0 sees it."""
        running = self._save is not None and self._save.running
        return bool(self._main.share("busy" if running else ""))

    def _write(self, writer: Writer, step: int) -> None:
        """Write a staged checkpoint, then do what follows from it."""
        writer.write(lambda: self._follow(step))

    def _follow(self, step: int) -> None:
        """Tell that there is a new checkpoint, and delete what nothing keeps."""
        self.skipped.pop(step, None)
        what = f"step {step} is saved, but "
        try:
            if self._on_committed is not None:
                self._on_committed(step, self.directory / step_name(step))
            what += "older ones cannot be deleted"
            config = self._config
            old = expired(
                {each: self._facts(each) for each in self.steps()},
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                newest=step,
                best=config.keep_best,
                spared={*self.skipped, *(self._protected() if self._protected is not None else ())},
            )
            commit.retire(self.directory, old)
        except OSError as error:
            raise explain(error, self.directory, what) from error

    def _facts(self, step: int) -> Kept:
        """Give what retention asks of a checkpoint; one that cannot be read is nothing special."""
        identity = self._identity(step)
        known = self._known.get(step)
        if known is None or known[0] != identity:
            try:
                manifest = read_manifest(self.directory / step_name(step))
                facts = Kept(temporary=manifest.temporary, metrics=manifest.metrics)
            except CheckpointError:
                facts = Kept()
            self._known[step] = known = identity, facts
        return known[1]

    def _writable(self) -> None:
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened with read_only=True; open it without to save")
        if self._closed:
            raise CheckpointError(f"the store of {self.directory} is closed; open a new one to save")


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise CheckpointError(f"metrics: expected name -> number, such as {{'loss': 0.5}}, got {metrics!r:.200}")
    found, problems = {}, []
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            problems.append(f"metrics: {name!r} is {type(value).__name__} {value!r:.200}, expected a number")
    if problems:
        raise CheckpointError("\n".join(problems))
    return found
