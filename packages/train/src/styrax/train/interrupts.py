"""SIGTERM and Ctrl-C as a request to stop after the step that is running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """A context in which the first SIGTERM or SIGINT is noted and the second SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, nothing is installed and nothing is ever noted.

    Attributes:
        received: Name of the signal that was noted (``"SIGTERM"``), or None.

    >>> with Interrupts() as interrupts:
    ...     interrupts.received is None
    True
    """

    def __init__(self, notify: Callable[[str], None] | None = None) -> None:
        self.received: str | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if self._notify is not None:
            self._notify(self.received)
