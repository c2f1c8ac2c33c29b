"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from styrax.core.config import Positive, check


@dataclass(frozen=True, kw_only=True)
class Best:
    """The checkpoints with the best values of a metric, of those that `save(..., metrics=...)` was given one for.

    Attributes:
        metric: Its name.
        mode: Whether a lower (`min`) or a higher (`max`) value is better; one that is not a number is worst.
        count: How many to keep.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    count: Positive = 1

    def __post_init__(self) -> None:
        check(self)

    def choose(self, values: Mapping[int, float]) -> list[int]:
        """Give the steps with the best values, best first; of equal ones the newer is better.

        Example:
            >>> Best(count=2).choose({1: 0.5, 2: float("nan"), 3: 0.4, 4: 0.5})
            [3, 4]
        """
        sign = 1 if self.mode == "min" else -1
        numbers = {step: value for step, value in values.items() if not math.isnan(value)}
        return sorted(numbers, key=lambda step: (sign * numbers[step], -step))[: self.count]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is known of one checkpoint when it is chosen what stays."""

    temporary: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def expired(
    steps: Mapping[int, Kept],
    *,
    keep_last: int,
    keep_every: int | None,
    newest: int,
    best: Best | None = None,
    spared: Iterable[int] = (),
) -> list[int]:
    """Choose what to delete.

    Args:
        steps: All complete checkpoints.
        keep_last: How many of the highest steps to keep, temporary ones not counted.
        keep_every: Also keep the steps that this divides.
        newest: What was saved just now, kept even where later steps of a run that was rewound are there.
        best: Also keep the best of these.
        spared: Steps that are not counted and not deleted, such as damaged ones.

    Example:
        >>> two = dict.fromkeys([2, 4, 6, 8, 10], Kept())
        >>> expired(two, keep_last=2, keep_every=4, newest=10)
        [2, 6]
        >>> expired({1: Kept(), 2: Kept(temporary=True), 3: Kept()}, keep_last=3, keep_every=None, newest=3)
        [2]
        >>> losses = {step: Kept(metrics={"loss": step % 3}) for step in (1, 2, 3, 4)}
        >>> expired(losses, keep_last=1, keep_every=None, newest=4, best=Best())
        [1, 2]
    """
    spared = set(spared)
    good = [step for step in sorted(steps) if step not in spared]
    lasting = [step for step in good if not steps[step].temporary]
    kept = {newest, *lasting[-keep_last:]}
    if best is not None:
        kept.update(best.choose({s: steps[s].metrics[best.metric] for s in good if best.metric in steps[s].metrics}))
    if keep_every is not None:
        kept.update(step for step in lasting if step % keep_every == 0)
    return [step for step in good if step not in kept]
