"""Metrics on their way from the device to trackers and hooks, and what they say about going on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from styrax.core import UserError
from styrax.train.goodput import Goodput
from styrax.train.hooks import Hook
from styrax.train.spikes import SpikeWatch

if TYPE_CHECKING:
    from styrax.core.protocols import Tracker

Further = Callable[[], Mapping[str, float]]
"""Gives metrics of a step that is over."""

MAX_BAD_STEPS = 10
"""A run stops after this many skipped steps in a row: it would only burn time."""


class Ledger:
    """Takes the metrics of each step and passes them on one step later, so that nothing waits for the device.

    Args:
        tracker: Is given the metrics to log.
        hooks: Are told of each step.
        goodput: Is told what the waiting was for.
        every: Steps between logged steps.
        steps: The last step; it is logged whatever ``every`` is.
        saved: The newest checkpoint.
        watch: Judges losses; None for no judging.
    """

    def __init__(
        self,
        tracker: Tracker | None,
        hooks: Sequence[Hook],
        goodput: Goodput,
        *,
        every: int,
        steps: int,
        saved: int | None = None,
        watch: SpikeWatch | None = None,
    ) -> None:
        self.last: dict[str, float] = {}
        self.saved = saved
        self.wish: str | None = None
        self.spike: tuple[int, float] | None = None
        self._tracker, self._hooks, self._goodput, self._watch = tracker, hooks, goodput, watch
        self._every, self._steps = every, steps
        self._pending: deque[tuple[int, Any, Sequence[Further], dict[str, float]]] = deque()
        self._bad = 0

    def watch(self, step: int, state: Any, batch: Any) -> list[Further]:
        """Tell the hooks what a step begins with; gives what they want to add to its metrics."""
        with self._goodput.during("other"):
            asked = [hook.on_batch(step, state, batch) for hook in self._hooks]
        return [further for further in asked if further is not None]

    def add(self, step: int, report: Mapping[str, Any], further: Sequence[Further] = ()) -> None:
        """Take a step's metrics, still being computed, and pass on those of the step before.

        Args:
            step: The step.
            report: Its metrics.
            further: Give more of them once they are asked, which they are when the step is over.
        """
        self._pending.append((step, report, further, {}))
        while len(self._pending) > 1:
            self._emit(*self._pending.popleft())

    def annotate(self, step: int, extra: Mapping[str, float]) -> None:
        """Add to the metrics of the newest step."""
        newest, report, further, old = self._pending.pop()
        assert newest == step
        self._pending.append((step, report, further, {**old, **extra}))

    def flush(self) -> None:
        """Pass on everything, and make it durable."""
        while self._pending:
            self._emit(*self._pending.popleft())
        if flush := getattr(self._tracker, "flush", None):
            with self._goodput.during("other"):
                flush()

    def rewind(self, step: int) -> None:
        """Forget every step after this one; the run goes on from it."""
        self._pending.clear()
        self.last, self.spike, self._bad = {}, None, 0
        if truncate := getattr(self._tracker, "truncate", None):
            truncate(step)

    def tell(self, event: str, *args: Any) -> None:
        """Tell the hooks; what they return is a wish to stop."""
        with self._goodput.during("other"):
            self._note(tell(self._hooks, event, *args))

    def _emit(
        self, step: int, report: Mapping[str, Any], further: Sequence[Further], extra: Mapping[str, float]
    ) -> None:
        if self.spike is not None:
            return  # a step after a spike; both are undone
        with self._goodput.step(step):
            values = {k: float(v) for k, v in jax.device_get(dict(report)).items()} | dict(extra)
            for each in further:
                values |= {name: float(value) for name, value in each().items() if name not in values}
        if self._watch is not None and self._watch.judge(values["loss"], values.get("skipped", 0.0)):
            self.spike = step, values["loss"]
        else:
            self._check(step, values)
        self.last = values
        with self._goodput.during("other"):
            if self._tracker is not None and (step % self._every == 0 or step == self._steps or extra or further):
                self._tracker.log(step, values)
            due = [hook for hook in self._hooks if step % hook.every == 0 or step == self._steps]
            self._note(tell(due, "on_step", step, values))

    def _note(self, wishes: Sequence[str]) -> None:
        if wishes and self.wish is None:
            self.wish = wishes[0]

    def _check(self, step: int, values: Mapping[str, float]) -> None:
        skipped = values.get("skipped", 0.0) - self.last.get("skipped", values.get("skipped", 0.0))
        finite = math.isfinite(values["loss"]) and not skipped
        self._bad = 0 if finite else self._bad + 1
        if self._bad > MAX_BAD_STEPS or (not math.isfinite(values["loss"]) and "skipped" not in values):
            first = step - self._bad + 1
            kept = (
                "nothing was saved, so start anew with the change"
                if self.saved is None
                else f"the newest checkpoint is of step {self.saved}"
            )
            raise UserError(
                f"the loss or its gradient is not finite since step {first} (loss {values['loss']} at step {step}). "
                "Lower the learning rate, lengthen the warm-up, clip harder, or look at the batch of that step; "
                f"{kept}"
            )


def tell(hooks: Iterable[Hook], event: str, *args: Any) -> list[str]:
    """Tell hooks of an event; gives the reasons to stop that they returned."""
    told = [getattr(hook, event)(*args) for hook in hooks]
    return [reason for reason in told if isinstance(reason, str)]
