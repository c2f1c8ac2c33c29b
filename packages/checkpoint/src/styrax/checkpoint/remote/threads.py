"""Many requests at once, in threads that never keep a process from ending."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


def ordered(function: Callable[[A], R], tasks: Iterable[A], *, workers: int) -> Iterator[R]:
    """Call a function on each task, several at a time, and give the results in the order of the tasks.

    At most `workers` results are held, so a slow consumer slows the calls down. After an error no call is begun,
    and those under way have ended before it is raised: nothing happens behind.

    Args:
        function: Called with one task, in a thread.
        tasks: Taken as there is room.
        workers: How many at a time.

    Example:
        >>> list(ordered(abs, [-3, -1, -2], workers=2))
        [3, 1, 2]
    """
    window: deque[concurrent.futures.Future[R]] = deque()
    try:
        for task in tasks:
            if len(window) == workers:
                yield window.popleft().result()
            window.append(_start(function, task))
        while window:
            yield window.popleft().result()
    finally:
        concurrent.futures.wait(window)


def _start(function: Callable[[A], R], task: A) -> concurrent.futures.Future[R]:
    future: concurrent.futures.Future[R] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(function(task))
        except BaseException as error:
            future.set_exception(error)

    # A pool's threads would be waited for when the interpreter ends, however long a request hangs.
    thread = threading.Thread(target=work, name="checkpoint-remote", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # some versions of Python start none while they end
        work()
    return future
