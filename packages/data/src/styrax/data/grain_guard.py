"""Grain's own pipelines with its traps closed: dead or hanging workers, states of others, costly defaults."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import permutation

if TYPE_CHECKING:
    import grain

VERSION = 1
CLOSE_SECONDS = 5.0
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.2


def iterate(
    dataset: grain.MapDataset | grain.IterDataset,
    *,
    name: str = "",
    workers: int = 0,
    threads: int = 0,
    buffer: int = 4,
    timeout: float | None = 600.0,
) -> Guarded:
    """Iterate over any Grain dataset, so that it ends with its data or with an error, and never goes on wrongly.

    What differs from `iter(dataset.to_iter_dataset().mp_prefetch(...))`:

    - nothing is read ahead by default, instead of 500 elements in 16 threads, which costs more than it saves for
      quick records;
    - workers run in programs without `absl.app` too;
    - a worker that died, with whatever exit code, is an error instead of a hang or of records that are missing;
    - a record that does not come in time is an error;
    - after an error the iterator stays failed, since Grain's would go on with records missing;
    - `close` returns within seconds;
    - the state knows its pipeline and number of workers, and another's is refused.

    Args:
        dataset: What to read. Batch before, so that a worker hands over whole batches.
        name: What the state calls the pipeline: change it whenever the pipeline changes, since Grain's datasets cannot
            be told apart by themselves.
        workers: Processes; 0 reads in this one. Worth it for decoding images, not for tokens.
        threads: Threads in each process that read ahead.
        buffer: Elements that they read ahead.
        timeout: Seconds to wait for an element; `None` waits for ever.

    Returns:
        The iterator, with `get_state`, `set_state` and `close`.

    Raises:
        UserError: Numbers out of range.

    Example:
        >>> import grain
        >>> with iterate(grain.MapDataset.range(10).batch(4)) as batches:
        ...     print([batch.tolist() for batch in batches])
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    import grain

    wrong = [
        f"{key} = {value}: expected 0 or more"
        for key, value in (("workers", workers), ("threads", threads))
        if value < 0
    ]
    if timeout is not None and not timeout > 0:
        wrong.append(f"timeout = {timeout}: expected seconds above 0, or None")
    if wrong:
        raise UserError("\n".join(wrong))
    if isinstance(dataset, grain.MapDataset):
        ahead = max(1, buffer) if threads else 0
        dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
    if workers:
        from absl import flags

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain 0.2.18 reads flags in order to start a worker
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return Guarded(dataset, {"name": name, "workers": workers}, timeout)


def window_shuffle(dataset: grain.MapDataset, *, window: int, seed: int) -> grain.MapDataset:
    """Shuffle within windows of neighbours, so that reading stays local; a permutation for every length.

    Grain 0.2.18's own `WindowShuffleMapDataset` gives some elements twice and others never where the window does not
    divide the length.

    Args:
        dataset: What to shuffle.
        window: Elements in a window; the last has what is left.
        seed: Decides the order.

    Example:
        >>> import grain
        >>> sorted(window_shuffle(grain.MapDataset.range(10), window=4, seed=1))
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    import grain

    if window < 1:
        raise UserError(f"window = {window}: expected 1 or more")
    return grain.MapDataset.source(_Windows(dataset, window, seed))


class _Windows:
    def __init__(self, dataset: Any, window: int, seed: int):
        self._dataset, self._window, self._seed = dataset, window, seed
        self._last: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        number, within = divmod(int(index), self._window)
        last = self._last
        if last[0] != number:
            size = min(self._window, len(self) - number * self._window)
            self._last = last = number, permutation(size, "window", self._seed, number)
        return self._dataset[number * self._window + int(last[1][within])]

    def __repr__(self) -> str:
        return f"Windows({self._window}, {self._seed})"


class Guarded(Iterator[Any]):
    """An iterator over a Grain dataset that ends or fails, and stays failed; see `iterate`."""

    def __init__(self, dataset: grain.IterDataset, about: Mapping[str, Any], timeout: float | None):
        self._dataset, self._about, self._timeout = dataset, dict(about), timeout
        self._children: list[Any] = []
        self._error: BaseException | None = None
        self._closed = False
        self._start(None)

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StopIteration
        self._asked.put("next")
        try:
            kind, value = self._answer()
        except UserError as error:
            self._error = error
            raise
        if kind == "end":
            raise StopIteration
        if kind == "error":
            self._error = value
            raise value
        return value

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """Describe the position; JSON where Grain's own state is."""
        if self._error is not None:
            raise self._error
        return {"version": VERSION, **self._about, "grain": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `get_state` gave, with a fresh iterator.

        Raises:
            UserError: It is no such state, or that of another pipeline or number of workers.
        """
        if not isinstance(state, Mapping) or "grain" not in state or state.get("version") != VERSION:
            raise UserError(f"expected a state with 'version' {VERSION} and 'grain', got {state!r}")
        lines = [
            f"  - {key}: saved with {state.get(key)!r}, now {value!r}"
            for key, value in self._about.items()
            if state.get(key) != value
        ]
        if lines:
            raise UserError(
                "the state is that of another pipeline:\n"
                + "\n".join(lines)
                + "\nGrain's position depends on both; go on with the same ones, or start anew"
            )
        self._stop()
        self._error = None
        self._start(state["grain"])

    def close(self) -> None:
        """Stop reading; returns within seconds even when a read never does."""
        self._closed = True
        self._stop()

    def _start(self, state: Any) -> None:
        before = set(multiprocessing.active_children())
        self._iterator: Any = iter(self._dataset)
        if state is not None:
            self._iterator.set_state(state)
        self._before = before
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        work = threading.Thread(
            target=_serve, args=(self._iterator, self._asked, self._made), name="styrax-grain", daemon=True
        )
        work.start()

    def _answer(self) -> tuple[str, Any]:
        """Wait for the element that was asked for, with an eye on the clock and on the workers."""
        begin, dead_since = time.monotonic(), None
        while True:
            try:
                return self._made.get(timeout=POLL_SECONDS)
            except queue.Empty:
                now = time.monotonic()
            for child in multiprocessing.active_children():
                if child not in self._before and child not in self._children:
                    self._children.append(child)
            dead = [child for child in self._children if not child.is_alive()]
            dead_since = (dead_since or now) if dead else None
            if dead_since is not None and now - dead_since > GRACE_SECONDS:
                codes = ", ".join(f"{child.name} (exit code {child.exitcode})" for child in dead)
                raise UserError(
                    f"a worker of the Grain pipeline died: {codes}; its records would be missing. Look for what "
                    "ended it (memory, a native library), or read without workers (workers=0) to see the error"
                )
            if self._timeout is not None and now - begin > self._timeout:
                raise UserError(
                    f"the Grain pipeline gave nothing within {self._timeout:g} seconds: reading hangs, or is too slow; "
                    "check the storage, or give it more time (timeout)"
                )

    def _stop(self) -> None:
        self._asked.put("close")
        end = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < end:
            try:
                if self._made.get(timeout=POLL_SECONDS)[0] == "closed":
                    break
            except queue.Empty:
                continue
        for child in self._children:
            if child.is_alive():
                child.terminate()
        self._children = []


def _serve(iterator: Any, asked: queue.SimpleQueue[str], made: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Take requests in a thread of its own, since a read that hangs cannot be broken off."""
    while True:
        if asked.get() == "close":
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
            made.put(("closed", None))
            return
        try:
            made.put(("element", next(iterator)))
        except StopIteration:
            made.put(("end", None))
        except BaseException as error:
            made.put(("error", error))
