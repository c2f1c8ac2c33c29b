"""What ends the processes of a job when their launcher is gone, however it went: a small program beside it.

A process cannot be asked to end with its parent on every system, and a launcher that is killed can ask nobody. So one
more process of its own session holds the other end of a socket. The system closes the launcher's end with it. This file
is that program, started without anything of styrax or jax, and the launcher's side of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

DONE = "done"


class Keeper:
    """The launcher's side: says which process groups are to end when it is gone.

    What is not covered: a process that has left its group by a session of its own, and a launcher and keeper that are
    killed together, as by a kill of everything in a container, which then ends the rest too.

    Args:
        grace: Seconds from SIGTERM to SIGKILL.

    >>> with Keeper(grace=1.0) as keeper:
    ...     pass
    """

    def __init__(self, grace: float) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            # -P: not to take styrax.train.bisect for the standard library's; -S: nobody's start-up files.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-S", __file__, str(grace)],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *exc: object) -> None:
        self._say(DONE)
        self._ours.close()
        self._process.wait()

    def watch(self, group: int, outputs: list[int]) -> None:
        """End this process group when the launcher is gone.

        Args:
            group: Its number.
            outputs: What the launcher reads of it. They are read on then, so that a process which has something to
                say while it saves does not end by a broken pipe.
        """
        self._say(f"+{group}", outputs)

    def forget(self, group: int) -> None:
        """Leave this process group alone if nobody is in it any more: its number may be another's soon."""
        if not alive(group):
            self._say(f"-{group}")

    def _say(self, word: str, files: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):  # it was killed, and there is nobody to tell
            socket.send_fds(self._ours, [f"{word}\n".encode()], files or [])


def alive(group: int) -> bool:
    """Tell whether anybody is in a process group."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # the latter: macOS, where all have ended and wait for their parent
        return False
    return True


def listen(told: socket.socket) -> tuple[set[int], list[int]]:
    """Hear the launcher until it is gone.

    Returns:
        The process groups to end, and what to read of them; neither if it said that it was done.
    """
    groups: set[int] = set()
    outputs: list[int] = []
    rest = b""
    while True:
        data, files, _, _ = socket.recv_fds(told, 4096, 64)
        outputs += files
        if not data:
            return groups, outputs
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            word = line.decode()
            if word == DONE:
                return set(), []
            (groups.add if word[0] == "+" else groups.discard)(int(word[1:]))


def end(groups: set[int], grace: float) -> None:
    """Send SIGTERM to process groups, and SIGKILL to those that are still there after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    send(groups, signal.SIGTERM)
    while (groups := {each for each in groups if alive(each)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    send(groups, signal.SIGKILL)


def send(groups: set[int], number: int) -> None:
    """Send a signal to process groups, of which some may be gone."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _drain(file: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(file, 65536):
            pass


def main() -> None:
    """The program: hears the launcher at its standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launcher, and not before
    groups, outputs = listen(socket.socket(fileno=os.dup(0)))
    for file in outputs:
        threading.Thread(target=_drain, args=(file,), daemon=True).start()
    end(groups, float(sys.argv[1]))


if __name__ == "__main__":
    main()
