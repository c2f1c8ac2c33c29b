"""The first bad step of a run, and the document in its batch that makes it so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from styrax.core import UserError
from styrax.core.config import find_schema, read_config
from styrax.train.probe import Probed, Prober, isolated
from styrax.train.replay import Rebuilt, Taken, documents, mask_of, prober, rebuild, retake
from styrax.train.rundir import RunDir

MANY = 8
"""Documents that are each bad alone; with so many it is not the data."""

Bad = Callable[[Mapping[str, float]], bool]
Span = dict[str, Any]


@dataclass(kw_only=True)
class Culprit:
    """What :func:`bisect` found.

    Attributes:
        why: What counts as bad.
        step: The first bad step; None if no step is.
        start: The checkpoint that it was made from; 0 for the run's beginning.
        last_good: The step before, or the checkpoint.
        metrics: What the bad step reports.
        not_finite: Its tensors with numbers that are not finite, in order.
        documents: The stretches of documents that make it bad: one, if leaving it out mends the step.
        without: What the step reports without them; empty if nothing was left out.
        mended: Whether it is good without them.
        many: Whether more documents do so than could be the cause, so that none is named.
        before: Whether the state was bad before the step, so that no document of this step can be the cause.
    """

    why: str
    step: int | None = None
    start: int = 0
    last_good: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    not_finite: dict[str, int] = field(default_factory=dict)
    documents: list[Span] = field(default_factory=list)
    without: dict[str, float] = field(default_factory=dict)
    mended: bool = False
    many: bool = False
    before: bool = False


def bisect(
    folder: RunDir, *, metric: str = "loss", above: float | None = None, overrides: Sequence[str] = ()
) -> Culprit:
    """Find the first bad step of a run and the document that makes it so.

    ``metrics.jsonl`` says near which step to look; the steps there are taken again, so a step counts as bad by what it
    does now. Then documents of its batch are made into padding, half of them at a time, until one is left that makes
    the step bad alone; leaving just that one out is the proof.

    Args:
        folder: The run; nothing in it is changed.
        metric: What is compared with ``above``.
        above: From more than this a step is bad; None: when its loss or gradient is not finite.
        overrides: ``a.b=value``, such as a mesh for the devices that there are here.

    Raises:
        UserError: There is no such run or metric.
    """
    folder.require()
    bad = judge(metric, above)
    why = f"{metric} above {above:g}" if above is not None else "a loss or gradient that is not finite"
    found, lines = Culprit(why=why), folder.read_metrics()
    known = sorted({name for line in lines for name in line} - {"step"})
    if above is not None and lines and metric not in known:
        raise UserError(f"--metric {metric}: metrics.jsonl has no such metric; it has {', '.join(known)}")
    steps, after = read_config(find_schema("train"), str(folder.config)).sections["train"].steps, 0
    while True:
        first, last = candidates(lines, bad, after)
        if last is None or first > steps:
            return found
        run = rebuild(folder, first, overrides)
        probe = prober(run)
        if (taken := _first_bad(run, probe, first, min(last, steps), bad, look_in=above is None)) is not None:
            break
        lines, after = [line for line in lines if line["step"] > last], last
        if not lines:
            return found
    probed = probe(taken.before, taken.batch)
    target: int | None = taken.step
    while above is None and _was_bad(probed) and target is not None:
        # The losses of earlier steps were numbers, but one of those steps has left a state that is not.
        run = rebuild(folder, target, overrides)
        earlier = _first_bad(run, probe, (run.start or 0) + 1, target, bad, look_in=True)
        assert earlier is not None, "a step that was bad is not bad any more"
        taken, probed, target = earlier, probe(earlier.before, earlier.batch), run.start
    found.step, found.start, found.last_good = taken.step, run.start or 0, taken.step - 1
    found.metrics, found.not_finite = taken.metrics, probed.not_finite
    found.before = _was_bad(probed)
    if not found.before and {"tokens", "targets", "loss_mask"} <= set(taken.batch):
        blame(found, run.parts.dataset, probe, taken, bad, by_gradient=above is None)
    return found


def _was_bad(probed: Probed) -> bool:
    """Whether the state had numbers that are not finite before the step."""
    return any(name.startswith(("parameter ", "variable ")) for name in probed.not_finite)


def _first_bad(run: Rebuilt, probe: Prober, first: int, last: int, bad: Bad, *, look_in: bool) -> Taken | None:
    """Take steps again until one is bad; ``look_in`` asks each for what is not finite too."""
    for taken in retake(run, last, watched=0):
        if taken.step < first:
            continue
        if bad(taken.metrics) or (look_in and probe(taken.before, taken.batch).not_finite):
            return taken
    return None


def judge(metric: str, above: float | None) -> Bad:
    """What tells a bad step by its metrics.

    >>> judge("loss", 3.0)({"loss": 3.5}), judge("loss", None)({"loss": float("inf")})
    (True, True)
    """
    if above is None:
        return lambda metrics: not math.isfinite(metrics.get("loss", 0.0))
    return lambda metrics: metric in metrics and not metrics[metric] <= above


def candidates(lines: Sequence[Mapping[str, float]], bad: Bad, after: int = 0) -> tuple[int, int | None]:
    """The steps among which the first bad one is: after the last line that is good, up to the first that is not.

    A run ends at a loss that is not finite before it logs it, so after lines that are all good the next steps come.
    An update that the optimizer skipped had a gradient that was not finite, or too large.

    Args:
        lines: Of metrics.jsonl.
        bad: Judges one.
        after: A step before all of them that is good.

    Returns:
        ``(first, last)``; ``last`` is None where nothing is bad.

    >>> nan = judge("loss", None)
    >>> candidates([{"step": 5, "loss": 2.0}, {"step": 10, "loss": float("nan")}], nan)
    (6, 10)
    >>> candidates([{"step": 5, "loss": 2.0}, {"step": 10, "loss": 2.0}], nan)
    (11, 15)
    """
    good, skipped, every = after, 0.0, 1
    nonfinite = bad({"loss": math.nan}) and bad({"loss": math.inf}) and not bad({"loss": 1e300})
    for line in lines:
        every = max(every, int(line["step"]) - good)
        more, skipped = line.get("skipped", skipped) > skipped, line.get("skipped", skipped)
        if bad(line) or (nonfinite and more):
            return good + 1, int(line["step"])
        good = int(line["step"])
    return good + 1, good + every if nonfinite else None


def blame(found: Culprit, dataset: Any, probe: Prober, taken: Taken, bad: Bad, *, by_gradient: bool) -> None:
    """Find the document of a bad step's batch that makes it so, and note it in ``found``."""
    batch = {name: np.asarray(x) for name, x in taken.batch.items()}
    losses = probe.token_losses(taken.before, taken.batch)
    every = [span for span in documents(dataset, taken, losses) if span["tokens"]]
    shape = mask_of(batch).shape

    def outcome(kept: Sequence[Span]) -> tuple[bool, dict[str, float]]:
        places = np.zeros(shape, bool)
        for span in kept:
            places[span["row"], span["column"] : span["column"] + span["length"]] = True
        put = {name: _like(x, taken.batch[name]) for name, x in isolated(batch, places).items()}
        probed = probe(taken.before, put)
        wrong = bad(probed.metrics) or (by_gradient and bool(probed.not_finite))
        return wrong, probed.metrics

    rest = every
    while rest:
        if by_gradient:
            suspects = halved(rest, lambda kept: outcome(kept)[0])
        else:  # they are in order of their losses, so those that lift the step's are the first ones
            suspects = rest[: fewest(len(rest) - 1, lambda count: not outcome(every[count:])[0])]
        found.documents += suspects
        rest = [span for span in rest if span not in suspects]
        if rest:
            wrong, found.without = outcome(rest)
            found.mended = not wrong
        if found.mended or not by_gradient:
            break
        if not rest or len(found.documents) >= MANY:
            found.documents, found.without, found.many = [], {}, True
            break


def fewest(most: int, enough: Callable[[int], bool]) -> int:
    """The least number from 1 to ``most`` that is enough, where every larger one is too; ``most`` if none is.

    >>> fewest(10, lambda n: n >= 7), fewest(3, lambda n: False)
    (7, 3)
    """
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def halved(every: list[Span], bad: Callable[[list[Span]], bool]) -> list[Span]:
    """The fewest things that are still bad together, by trying halves.

    Args:
        every: All of them; the likeliest first.
        bad: Whether some of them are bad without the others.

    >>> halved([{"n": n} for n in range(8)], lambda some: {"n": 5} in some)
    [{'n': 5}]
    >>> halved([{"n": n} for n in range(4)], lambda some: len(some) == 4)  # only all together
    [{'n': 0}, {'n': 1}, {'n': 2}, {'n': 3}]
    """
    if not every:
        return every
    if len(every) > 1 and bad(every[:1]):
        return every[:1]
    while len(every) > 1:
        half = (len(every) + 1) // 2
        for part in (every[:half], every[half:]):
            if bad(part):
                every = part
                break
        else:
            return every
    return every


def _like(x: np.ndarray, placed: Any) -> Any:
    """Put an array where another one is."""
    import jax

    return jax.device_put(x, placed.sharding) if isinstance(placed, jax.Array) else x
