"""When the loss is suddenly far above what it was, by the losses before it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from styrax.core import UserError
from styrax.train.config import Spike

LEAST = 1e-3
"""The least deviation, as a share of the median: losses that hardly move have none worth comparing with."""


class SpikeWatch:
    r"""Judges each loss by the ones before it.

    With $m$ the median of the last ``window`` losses, $d$ the median of their distances from it, and $k$ the
    ``sigmas``, a loss $x$ is a spike if

    $$ x > m + k \max(1.4826\, d,\ 10^{-3} |m|) $$

    once half the window is filled; $1.4826\, d$ is the standard deviation where the losses are normal, and a few
    outliers in the window do not move it. A loss that is not finite is a spike at any time. An update that the
    optimizer has skipped did no harm, so its loss is none. What is a spike, or was skipped, is no part of the history.
    The history is part of each checkpoint, so a resumed run judges as the one that was not stopped.

    Source: for going back and leaving data out, Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5.1.

    Args:
        config: Window and threshold.

    >>> watch = SpikeWatch(Spike(action="rollback", window=4, sigmas=6.0))
    >>> [watch.judge(loss) for loss in (2.0, 2.1, 2.2, 2.6, 2.3)]
    [False, False, False, False, False]
    >>> watch.judge(3.9), watch.judge(float("nan")), watch.judge(2.2)
    (True, True, False)
    """

    def __init__(self, config: Spike) -> None:
        self.config = config
        self.rollbacks = 0
        self._losses: deque[float] = deque(maxlen=config.window)
        self._skipped = 0.0

    def judge(self, loss: float, skipped: float = 0.0) -> bool:
        """Whether a loss is a spike; if not, it is part of the history from now on.

        Args:
            loss: Of the step.
            skipped: How many updates the optimizer has skipped so far.
        """
        before, self._skipped = self._skipped, skipped
        if skipped > before:
            return False
        if not math.isfinite(loss):
            return True
        if len(self._losses) * 2 >= self.config.window:
            middle = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in self._losses)
            if loss > middle + self.config.sigmas * max(spread, LEAST * abs(middle)):
                return True
        self._losses.append(loss)
        return False

    def get_state(self) -> dict[str, Any]:
        """The history, as JSON."""
        return {"losses": list(self._losses), "skipped": self._skipped}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a history that :meth:`get_state` gave; an empty one starts anew."""
        self._losses.clear()
        self._losses.extend(float(x) for x in state.get("losses", ()))
        self._skipped = float(state.get("skipped", 0.0))

    def saved(self) -> None:
        """A checkpoint was made: the next rollback goes there, and is the first to do so."""
        self.rollbacks = 0

    def count(self, step: int, loss: float, to: int) -> None:
        """Note a rollback.

        Raises:
            UserError: There were too many to the same checkpoint.
        """
        self.rollbacks += 1
        if self.rollbacks > self.config.limit:
            raise UserError(
                f"the loss was a spike {self.rollbacks} times since step {to} (last: {loss} at step {step}), each time "
                f"over other data, so the data are not the reason; train.spike.limit = {self.config.limit} rollbacks "
                "are allowed to one checkpoint. Lower the learning rate, clip harder, or go on from an older checkpoint"
            )
