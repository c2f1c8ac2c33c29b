"""Where the time of a run went: parts that add up to its wall time, to the nanosecond."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from styrax.train.hooks import Hook

PARTS = ("startup", "compile", "step", "data", "checkpoint", "evaluate", "sample", "lost", "other")
"""The parts of a start's wall time; between starts a run is ``down`` besides."""

LABELS = {
    "startup": "starting",
    "compile": "compiling",
    "step": "training steps",
    "data": "waiting for data",
    "checkpoint": "blocked by checkpoints",
    "evaluate": "evaluating",
    "sample": "sampling",
    "lost": "steps done again",
    "other": "other",
    "down": "between starts",
}
"""What a report calls them."""


class Goodput:
    """Charges every moment since it was made to exactly one part.

    The parts nest: while an inner one lasts, the outer one rests. What no part claims is ``other``. Times are whole
    nanoseconds of a clock that never goes back, so the parts add up to the wall time exactly.

    Nothing waits for the device to be measured. JAX hands work to it and goes on, so its time is found in the call that
    has to wait for a result: the training step, where the metrics of the step before are read, or else an evaluation
    or a save that needs the state.

    Args:
        clock: Nanoseconds, never going back.
        begun: What the clock said when the start began, if that was before now; the time since then is ``startup``.
        done: The newest step that earlier starts had done. Steps up to there are done again, as no checkpoint kept
            them, and count as ``lost``.

    >>> ticks = iter([0, 5, 7, 8, 20])
    >>> goodput = Goodput(clock=lambda: next(ticks))
    >>> with goodput.during("step"):  # from 5 ...
    ...     with goodput.during("compile"):  # ... and this from 7
    ...         pass
    ...     print({part: ns for part, ns in goodput.spent(8).items() if ns})
    {'compile': 1, 'step': 2, 'other': 5}
    """

    def __init__(
        self, *, clock: Callable[[], int] = time.monotonic_ns, begun: int | None = None, done: int = 0
    ) -> None:
        self.done = done
        self._clock = clock
        self._since = clock()
        self._begun = self._since if begun is None else begun
        self._spent = {**dict.fromkeys(PARTS, 0), "startup": self._since - self._begun}
        self._stack = ["other"]

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Charge the time within to a part."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def step(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Charge the time within to the doing of a step, or to lost work if it was done before.

        Args:
            step: Its number, from 1.
        """
        return self.during("lost" if step <= self.done else "step")

    def enter(self, part: str) -> None:
        """Begin a part; :meth:`leave` ends it."""
        assert part in self._spent, part
        self._charge()
        self._stack.append(part)

    def leave(self) -> None:
        """End the innermost part."""
        self._charge()
        assert len(self._stack) > 1, "leave without enter"
        self._stack.pop()

    def spent(self, now: int | None = None) -> dict[str, int]:
        """Nanoseconds of each part until now; their sum is the wall time."""
        now = self._clock() if now is None else now
        current = {self._stack[-1]: now - self._since}
        return {part: spent + current.get(part, 0) for part, spent in self._spent.items()}

    def wall(self, now: int | None = None) -> int:
        """Nanoseconds since it began."""
        return (self._clock() if now is None else now) - self._begun

    def _charge(self) -> None:
        now = self._clock()
        self._spent[self._stack[-1]] += now - self._since
        self._since = now


class Meter(Hook):
    """Tells compiling and the work of other hooks apart from the step that they happen in."""

    def __init__(self, goodput: Goodput) -> None:
        self._goodput = goodput

    def on_compile(self, seconds: float | None) -> None:
        """Begin or end compiling."""
        if seconds is None:
            self._goodput.enter("compile")
        else:
            self._goodput.leave()


def total(events: Iterable[Mapping[str, Any]]) -> tuple[dict[str, int], ...]:
    """Add up the starts of a run from the events ``goodput`` that each left.

    Args:
        events: Of events.jsonl, in order: each start leaves a ``start``, and now and then a ``goodput`` with
            ``nanoseconds`` by part and its ``time``. Of a start that was killed the last one counts, and what came
            after it is time ``down``.

    Returns:
        The whole, with ``down``, and then each start.

    >>> begin, one = {"event": "start"}, {"event": "goodput", "time": 11.0, "nanoseconds": {"step": 10_000_000_000}}
    >>> whole, *starts = total([begin, one, begin, {**one, "time": 26.0}])  # the second began at 16
    >>> whole["step"], whole["down"], len(starts)
    (20000000000, 5000000000, 2)
    """
    starts: list[tuple[dict[str, int], float] | None] = []
    for event in events:
        if event["event"] == "start":
            starts.append(None)
        elif event["event"] == "goodput" and starts and (parts := _parts(event)) is not None:
            starts[-1] = parts, float(event["time"])
    known = [start for start in starts if start is not None]
    whole = {part: sum(parts[part] for parts, _ in known) for part in PARTS}
    down = 0
    for (_, ended), (parts, later) in itertools.pairwise(known):
        began = round(later * 1e9) - sum(parts.values())
        down += max(0, began - round(ended * 1e9))  # the time of day may have been set back
    return {**whole, "down": down}, *(parts for parts, _ in known)


def _parts(event: Mapping[str, Any]) -> dict[str, int] | None:
    given = event.get("nanoseconds")
    if not isinstance(given, Mapping) or not isinstance(event.get("time"), (int, float)):
        return None
    return {part: given[part] if isinstance(given.get(part), int) else 0 for part in PARTS}


def newest_step(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> int:
    """The newest step that any start of a run is known to have done; 0 if none.

    >>> newest_step([{"step": 4, "loss": 1.0}], [{"event": "throughput", "step": 6}, {"event": "interrupt"}])
    6
    """
    told = [e.get("step") for e in events if e["event"] in ("throughput", "save", "end", "goodput")]
    return max([step for step in [*(m.get("step") for m in metrics), *told] if isinstance(step, int)], default=0)
