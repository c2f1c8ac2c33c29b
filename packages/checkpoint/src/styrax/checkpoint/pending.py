"""Saves that go on in the background, and what becomes of them when the program ends: written, or loud.

A save runs in a thread that the interpreter waits for. That alone is too late for Orbax, which needs to start
threads of its own; so a save is also waited for as the very first step of the interpreter's shutdown (where
Python has such a hook), and Orbax's part is not left running in the background on versions where nothing
helps (`THREADS_OUTLIVE_MAIN`). If a save failed and nobody was told, its step is named on stderr and the
exit code is not 0.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  its own shutdown hook must be there before ours, to run after it
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from styrax.checkpoint.errors import CheckpointError

# From CPython 3.12.0 to 3.12.1 no thread can start once the main thread has ended, hook or not.
THREADS_OUTLIVE_MAIN = hasattr(threading, "_register_atexit") and not (3, 12, 0) <= sys.version_info < (3, 12, 2)


class Save:
    """One save in the background.

    Args:
        step: The step.
        directory: The folder of the checkpoints.
        work: Writes it.

    Attributes:
        error: What `work` raised, until `result` has raised it.
        failure: What `work` raised.
    """

    def __init__(self, step: int, directory: Path, work: Callable[[], None]) -> None:
        self.step, self.directory = step, directory
        self.error: Exception | None = None
        self.failure: Exception | None = None
        self._work = work
        # Not the thread's own state: up to Python 3.12 a `join` that Ctrl-C interrupts takes it for ended.
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=False)
        _watch()
        _unfinished.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            _unfinished.discard(self)
            raise

    def result(self, timeout: float | None = None) -> None:
        """Wait, then raise what went wrong, once.

        Raises:
            TimeoutError: It takes longer than `timeout` seconds; it goes on.
        """
        if not self._over.wait(timeout):
            raise TimeoutError
        self._thread.join()
        _unfinished.discard(self)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait, and raise nothing."""
        self._over.wait()

    @property
    def running(self) -> bool:
        """Whether it is still being written."""
        return not self._over.is_set()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = self.failure = error
        else:
            _unfinished.discard(self)
        finally:
            self._work = _nothing  # frees the copied arrays
            self._over.set()


class Ticket:
    """What `Store.save` gives: one save, which may still be going on.

    Args:
        step: The step.
        save: The save; `None` if it is over, or was skipped.
        skipped: Whether nothing is saved, because another save was going on (`on_busy="skip"`).

    Attributes:
        step: The step.
        skipped: See above.
    """

    def __init__(self, step: int, save: Save | None = None, *, skipped: bool = False) -> None:
        self.step, self.skipped = step, skipped
        self._save = save

    def staged(self) -> None:
        """Return when the arrays may be donated, changed or deleted: `save` has seen to that before it returned."""

    def committed(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is whole and on the disk.

        Args:
            timeout: Seconds to wait at most; without end by default.

        Raises:
            CheckpointError: It cannot be written (the store says so as well, where it was not asked here), it
                was skipped, or it takes longer than `timeout`; it goes on then.
        """
        if self.skipped:
            raise CheckpointError(f"step {self.step} was skipped (on_busy): another save was going on")
        if self._save is not None:
            try:
                self._save.result(timeout)
            except TimeoutError:
                raise CheckpointError(
                    f"step {self.step} is not written after {timeout} s; it goes on, ask again"
                ) from None
            if self._save.failure is not None:  # told before, by another call
                raise self._save.failure

    @property
    def done(self) -> bool:
        """Whether nothing is going on any more, well or not."""
        return self._save is None or not self._save.running


def abandon(reason: str) -> None:
    """Note that another process of this run is gone, so that this one ends without waiting for it.

    jax and Orbax would wait at exit, for minutes, and jax then kills the process. Nothing that is not told can be
    lost by that: whoever learned that a process is gone has raised it.

    Args:
        reason: Which process, and how that is known.
    """
    _watch()
    if reason not in _gone:
        _gone.append(reason)


def _nothing() -> None:
    pass


# The interpreter ends once for all stores, so this is the process's and not a store's.
_unfinished: set[Save] = set()
_watching: list[int] = []
_gone: list[str] = []


def _watch() -> None:
    if at_exit(_watching, _drain, _report):
        _unfinished.clear()  # after a fork these are the parent's
        _gone.clear()


def at_exit(watching: list[int], drain: Callable[[], None], report: Callable[[], None]) -> bool:
    """Have something done when this process ends: once, and again in a child of `fork` that asks for it.

    Args:
        watching: The process that it was asked for in; changed.
        drain: As the very first step, while threads can still be started.
        report: When they have ended.

    Returns:
        Whether it was not asked for before.
    """
    if os.getpid() in watching:
        return False
    watching[:] = [os.getpid()]
    atexit.register(report)
    hook = getattr(threading, "_register_atexit", None)
    if hook is not None:
        hook(drain)
    return True


def end(code: int, lines: Iterable[str]) -> NoReturn:
    """End this process at once, with some last words on stderr.

    Nothing else can change the exit code while the interpreter ends, and what is lost must not look like success.
    """
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _drain() -> None:
    if os.getpid() in _watching:
        try:
            for save in list(_unfinished):
                save.join()
        except KeyboardInterrupt:
            if _lost():
                _end(130)  # who asks again does not want to wait
            raise
        if _gone:
            _end(1)


def _report() -> None:
    if os.getpid() not in _watching:
        return
    _drain()
    if _lost():
        _end(1)


def _lost() -> list[Save]:
    return [save for save in _unfinished if save.running or save.error is not None]


def _end(code: int) -> NoReturn:
    lines = [f"{reason}; this process ends without waiting for it" for reason in _gone]
    for save in _lost():
        reason = save.error or f"interrupted while it was written to {save.directory}"
        lines.append(f"the checkpoint of step {save.step} is lost: {reason}")
    end(code, lines)
