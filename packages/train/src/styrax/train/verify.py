"""Whether a configuration resumes exactly: N steps at once, and N steps with a stop in between, are the same run."""

from __future__ import annotations

import dataclasses
import json
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from styrax.core import UserError, tree
from styrax.core.config import Resolved
from styrax.core.trackers import Jsonl
from styrax.train.compose import compose, fit_options, make_dataset, make_hooks
from styrax.train.loop import FitResult, fit
from styrax.train.resume import flat
from styrax.train.shardings import batch_sharding
from styrax.train.snapshot import encode

SHOWN = 20
"""Differences that are told; more are counted."""


class Kept(NamedTuple):
    """What a run is, to compare it bit for bit.

    Attributes:
        arrays: Path -> array: parameters, optimizer state, variables, step, key.
        lines: Step -> line of metrics.
        position: Where the data stand, as dotted keys.
    """

    arrays: dict[str, np.ndarray]
    lines: dict[int, str]
    position: dict[str, Any]


class Verdict(NamedTuple):
    """What :func:`verify_resume` found.

    Attributes:
        differences: A line each; empty if the runs are the same.
        arrays: How many arrays were compared.
        numbers: How many numbers are in them.
        lines: How many lines of metrics were compared.
        steps: Steps of the runs.
        at: Step at which one of them was stopped.
    """

    differences: list[str]
    arrays: int
    numbers: int
    lines: int
    steps: int
    at: int


def verify_resume(resolved: Resolved, *, steps: int, at: int) -> Verdict:
    """Train three times in temporary folders: to the end, until a signal comes, and on from there.

    The parts are those of ``styrax train``: data, model, optimizer, checkpoints and the loop. Each of the three starts
    composes them anew. Schedules are those of the whole run, of ``train.steps``.

    Args:
        resolved: The configuration.
        steps: Steps in all, N.
        at: Steps before the signal, k.

    Raises:
        UserError: Not ``0 < at < steps``, or not called from the main thread, which alone hears signals.
        KeyboardInterrupt: Somebody wants this to end.
    """
    if not 0 < at < steps:
        raise UserError(f"--at {at}: expected at least 1 and less than the {steps} steps (--steps)")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("verify_resume stops a run by a signal, so call it from the main thread")
    with tempfile.TemporaryDirectory(prefix="styrax-verify-") as name:
        straight = _run(resolved, Path(name, "straight"), steps)
        _run(resolved, Path(name, "stopped"), steps, stop=at)
        resumed = _run(resolved, Path(name, "stopped"), steps, expect=at)
    numbers = sum(array.size for array in straight.arrays.values())
    found = differences(straight, resumed)
    return Verdict(found, len(straight.arrays), numbers, len(straight.lines), steps, at)


def differences(one: Kept, other: Kept) -> list[str]:
    """Compare two runs bit for bit.

    >>> a = Kept({"params/w": np.zeros(3)}, {1: '{"step": 1}'}, {"step": 1})
    >>> b = a._replace(arrays={"params/w": np.array([0.0, -0.0, 2.0])})
    >>> differences(a, a), differences(a, b)
    ([], ['params/w: 2 of 3 numbers differ, first at [1]: 0.0 and -0.0'])
    """
    found = []
    for path in sorted(one.arrays.keys() | other.arrays.keys()):
        a, b = one.arrays.get(path), other.arrays.get(path)
        if a is None or b is None:
            found.append(f"{path}: only in the run that was {'not ' if b is None else ''}resumed")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{path}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
        elif a.tobytes() != b.tobytes():
            bits = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (a, b)]
            where = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
            index = tuple(int(i) for i in np.unravel_index(where[0], a.shape))
            many = f"{len(where):,} of {a.size:,} numbers differ"
            found.append(f"{path}: {many}, first at {list(index)}: {a[index]} and {b[index]}")
    for step in sorted(one.lines.keys() | other.lines.keys()):
        if one.lines.get(step) != other.lines.get(step):
            pair = (one.lines.get(step, "no line"), other.lines.get(step, "no line"))
            found.append(f"metrics of step {step}: {pair[0]} and {pair[1]}")
    for key in sorted(one.position.keys() | other.position.keys()):
        if one.position.get(key) != other.position.get(key):
            found.append(f"data position, {key}: {one.position.get(key)!r} and {other.position.get(key)!r}")
    return found


class _StoppedBy:
    """Data that send this process a signal when they give a batch, as a scheduler would during that step."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._left = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._loader)
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGTERM)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _run(resolved: Resolved, folder: Path, steps: int, *, stop: int | None = None, expect: int = 0) -> Kept:
    """One start of a run, from what its folder holds."""
    folder.mkdir(exist_ok=True)
    dataset = make_dataset(resolved)
    parts = compose(resolved, dataset)
    section = resolved.sections["checkpoint"]
    if getattr(section, "mirror", None) is not None:
        section = dataclasses.replace(section, mirror=None)  # nothing of this is to be kept
    sharding = batch_sharding(parts.mesh) if parts.mesh is not None else None
    loader = dataset.loader(sharding=sharding)
    tracker = Jsonl(folder / "metrics.jsonl")
    try:
        with section.build(folder / "checkpoints") as checkpointer:
            begun = max(checkpointer.steps(), default=0)
            if begun != expect:
                raise UserError(f"a run that was stopped at step {expect} goes on from step {begun}")
            result = fit(
                parts.make_model, parts.tx, loader if stop is None else _StoppedBy(loader, stop),
                steps=steps, checkpointer=checkpointer, tracker=tracker, hooks=make_hooks(resolved),
                **fit_options(resolved, parts),
            )  # fmt: skip
    finally:
        tracker.close()
    if result.interrupted not in (None, "SIGTERM") or (stop is None and result.interrupted):
        raise KeyboardInterrupt(f"{result.interrupted} before the runs were compared; nothing is left of them")
    kept = keep(result, loader.get_state(), folder / "metrics.jsonl")
    loader.close()
    return kept


def keep(result: FitResult, position: Any, metrics: Path) -> Kept:
    """Copy to the host what is compared of a run."""
    state = result.state._replace(key=jax.random.key_data(result.state.key))
    arrays = {path: np.asarray(x) for path, x in tree.flatten(state._asdict()).items()}
    lines = {json.loads(line)["step"]: line for line in metrics.read_text().splitlines()}
    place = encode(position)
    return Kept(arrays, lines, flat(dict(place)) if isinstance(place, Mapping) else {"": place})
