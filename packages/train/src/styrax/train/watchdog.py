"""Notices that a run stands still, and writes down where."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from styrax.train.evaluate import HeldOut
from styrax.train.hooks import Hook

ENDED = 74
"""Exit status of a process that a watchdog ended."""


class Watchdog(Hook):
    """Writes the Python stacks of all threads to a file when no step, evaluation, sample or save has ended for long.

    It counts from the first compilation on, and not while a step is compiled, nor for as long after that. It writes
    once for each time that the run stands still. A thread does it, so the main thread may wait for a device or for
    another process.

    Args:
        path: The file; stacks are appended. Its folder must be there by then.
        seconds: How long is long.
        end: End the process then, with status 74, so that whoever started it can start it again.
        process: The number of this process in the run, for the message.
        leave: Ends the process.

    Attributes:
        barked: How often stacks were written.
    """

    def __init__(
        self, path: Path, seconds: float, *, end: bool = False, process: int = 0,
        leave: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        self.barked = 0
        self._path, self._seconds, self._end, self._process, self._leave = path, seconds, end, process, leave
        self._change = threading.Condition()
        self._since: float | None = None
        self._step, self._closed = 0, False
        self._thread: threading.Thread | None = None

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        """Begin, at rest."""
        self._step = step
        self._thread = threading.Thread(target=self._run, name="styrax-watchdog", daemon=True)
        self._thread.start()

    def on_compile(self, seconds: float | None) -> None:
        """Rest while a step is compiled, and as long again: another process may take twice as long for it."""
        self._note(rest=seconds is None, more=seconds or 0.0)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        self._step = step
        self._note()

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> None:
        """An evaluation has ended."""
        self._note()

    def on_sample(self, step: int, seconds: float) -> None:
        """A sample was taken."""
        self._note()

    def on_save(self, step: int, seconds: float) -> None:
        """A checkpoint was handed to the background."""
        self._note()

    def on_end(self, step: int) -> None:
        """The loop has ended."""
        self.close()

    def close(self) -> None:
        """Stop; calling it again does nothing."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _note(self, rest: bool = False, more: float = 0.0) -> None:
        with self._change:
            self._since = None if rest else time.monotonic() + more
            self._change.notify_all()

    def _run(self) -> None:
        with self._change:
            while not self._closed:
                since = self._since
                left = None if since is None else since + self._seconds - time.monotonic()
                if left is None or left > 0:
                    self._change.wait(left)
                    continue
                self._since = None  # until something ends
                self._change.release()  # writing may take long, and the main thread is not to wait for it
                try:
                    self._bark()
                finally:
                    self._change.acquire()

    def _bark(self) -> None:
        self.barked += 1
        told = (
            f"process {self._process} stands still: nothing has ended for {self._seconds:g} s "
            f"(train.watchdog.seconds); the last metrics are of step {self._step}"
        )
        with contextlib.suppress(OSError):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {told}\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
                file.write("\n")
            told += f"; the stacks of its threads are in {self._path}"
        more = "; this process ends (train.watchdog.end)" if self._end else ""
        with contextlib.suppress(Exception):  # the main thread may hold the lock of sys.stderr
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"warning: {told}{more}\n".encode())
        if self._end:
            self._leave(ENDED)
