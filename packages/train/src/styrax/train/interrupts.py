"""SIGTERM and Ctrl-C as a request to stop at the next moment at which nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

NUMBERS = (signal.SIGTERM, signal.SIGINT)

UNBEGUN = "before training began; the same command starts again"
ENDED = "after the last step, which is saved; the same command takes the sample and writes the report"


class Interrupts:
    """A context in which the first SIGTERM or SIGINT is noted and the second SIGINT interrupts at once.

    Nothing is raised by the first, because Python runs handlers wherever it happens to be: an exception out of a
    garbage collector's callback is lost, and one out of a half-made import is called a bug.

    Contexts nest: the inner one begins with what the outer one has noted, and tells it what it notes. Outside the
    main thread, where Python allows no handlers, nothing is installed and nothing is ever noted.

    Args:
        notify: Called once, in the main thread, with the name of the first signal.
        command: The process is a command's: say on standard error that a signal came, and let a second Ctrl-C end
            the process with status 130, even while the main thread is inside of a long call such as a
            compilation. Without it the second raises ``KeyboardInterrupt``.

    Attributes:
        received: Name of the signal that was noted (``"SIGTERM"``), or None.

    >>> with Interrupts() as interrupts:
    ...     interrupts.received is None
    True
    """

    def __init__(self, notify: Callable[[str], None] | None = None, *, command: bool = False) -> None:
        self.received: str | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}
        self._outer: Interrupts | None = None
        self._watch = Watch() if command else None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._watch is not None:
            self._watch.start()
        for number in NUMBERS:
            self._previous[number] = signal.signal(number, self._handle)
        outer = getattr(self._previous[signal.SIGINT], "__self__", None)
        if isinstance(outer, Interrupts):
            self._outer = outer
            if outer.received is not None:
                self._note(outer.received)
        _entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self in _entered:
            _entered.remove(self)
        self._put_back()
        if self._watch is not None:
            self._watch.stop()

    def check(self, what: str) -> None:
        """Stop here if a signal was noted.

        Args:
            what: What that means, after the signal's name.

        Raises:
            KeyboardInterrupt: With that text; the command line prints it and exits with 130.
        """
        if self.received is not None:
            raise KeyboardInterrupt(f"{self.received} {what}")

    @contextlib.contextmanager
    def stopping(self, what: str) -> Iterator[None]:
        """A part that a signal ends: at :meth:`check`, at its end, or with an error, which is then the signal's doing.

        Args:
            what: As for :meth:`check`.
        """
        try:
            yield
        except Exception as error:
            if self.received is None:
                raise
            raise KeyboardInterrupt(f"{self.received} {what}") from error
        self.check(what)

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        self._outer = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self._note(signal.Signals(number).name)
        elif number == signal.SIGINT and not self._watched():
            raise KeyboardInterrupt

    def _note(self, name: str) -> None:
        self.received = name
        if self._outer is not None and self._outer.received is None:
            self._outer._note(name)
        if self._notify is not None:
            # A handler can run while the main thread is printing, and printing inside of that is refused.
            with contextlib.suppress(RuntimeError):
                self._notify(name)

    def _watched(self) -> bool:
        outer = self._outer is not None and self._outer._watched()
        return outer or (self._watch is not None and self._watch.running)


class Watch:
    """A thread that is told of every signal at once, and ends the process when a second one is Ctrl-C.

    Python runs a signal's handler in the main thread, when that is back from whatever it called. A compilation can
    take minutes, and an exception raised at its end crashes in XLA's teardown; so the thread leaves without one.
    """

    def __init__(self) -> None:
        self.running = False
        self._before = -1
        self._seen = 0
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; only in the main thread."""
        read, write = socket.socketpair()
        write.setblocking(False)
        self._ends = read, write
        self._before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, args=(read,), name="styrax-signals", daemon=True)
        self._thread.start()
        self.running = True

    def stop(self) -> None:
        """End; only in the main thread."""
        self.running = False
        if self._ends is None:
            return
        read, write = self._ends
        signal.set_wakeup_fd(self._before)
        write.close()
        if self._thread is not None:
            self._thread.join()
        read.close()
        self._ends = self._thread = None

    def forget(self) -> None:
        """In a forked child, whose signals are not the parent's."""
        self.running = False
        if self._ends is not None:
            signal.set_wakeup_fd(-1)
            self._ends = self._thread = None

    def _run(self, read: socket.socket) -> None:
        while numbers := read.recv(64):
            for number in numbers:
                if number not in NUMBERS:
                    continue
                self._seen += 1
                if self._seen > 1 and number == signal.SIGINT:
                    leave()
                if self._seen == 1:
                    name = signal.Signals(number).name
                    _tell(f"{name}: stopping as soon as nothing is lost; Ctrl-C again stops at once")


def leave() -> NoReturn:
    """End this process with status 130, as it stands: what was logged and saved is on the disk already."""
    _tell("stopped at once")
    with contextlib.suppress(Exception):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a progress bar may have hidden the cursor
    os._exit(130)


def _tell(text: str) -> None:
    """Write a line to standard error without Python's buffers, which the main thread may be holding."""
    with contextlib.suppress(Exception):
        fresh = "\r\x1b[K" if sys.stderr.isatty() else ""  # over a progress bar, which will be drawn again below
        os.write(sys.stderr.fileno(), f"{fresh}{text}\n".encode())


_entered: list[Interrupts] = []


def _in_child() -> None:
    """A forked child gets its signals as if no context had been entered."""
    with contextlib.suppress(ValueError):
        for interrupts in reversed(_entered):
            interrupts._put_back()
            if interrupts._watch is not None:
                interrupts._watch.forget()
    _entered.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
