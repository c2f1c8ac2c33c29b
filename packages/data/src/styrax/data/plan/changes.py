"""Whether data can go on where others stopped: exactly, or with changes that were asked for by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import nearest
from styrax.data.plan.skips import Skips
from styrax.data.plan.timeline import Timeline, quantise, ramp

if TYPE_CHECKING:
    from styrax.data.dataset import LMData

#: Settings that may change from a step on, as long as what was before it stays.
SCHEDULES = ("mixture", "batch_size", "seq_len", "skip_steps")


def differences(data: LMData, saved: Mapping[str, Any], step: int, allow: Sequence[str]) -> list[str]:
    """List what differs between saved settings and the data at hand and may not; see `LMData.differences`."""
    here = data.settings
    unknown = [name for name in allow if name not in here]
    lines = [f"allow: no setting {name!r}{nearest(name, list(here))}" for name in unknown]
    changed = [name for name in sorted({*saved, *here}) if saved.get(name) != here.get(name)]
    for name in changed:
        if name not in allow:
            lines.append(f"{name}: saved with {saved.get(name)!r}, now {here.get(name)!r}")
    if lines or not any(name in SCHEDULES for name in changed):
        return lines
    if any(name not in SCHEDULES for name in changed):
        return []  # a new order begins, so there is no past to keep
    return _past(data, saved, step)


def _past(data: LMData, saved: Mapping[str, Any], step: int) -> list[str]:
    """Compare what both read before `step`."""
    old, new = Skips([list(pair) for pair in saved["skip_steps"]]), data._skips
    place = old.data_step(step - 1) + 1 if step else 0
    if any(old.data_step(probe) != new.data_step(probe) for probe in _probes(old, new, step)):
        return [f"skip_steps: the change reaches back before step {step}; leave out data steps from {place} on only"]
    lines = []
    for name, mark in saved["mixture"]["sources"].items():
        now = data.settings["mixture"]["sources"].get(name)
        if now != mark and _used(saved["mixture"], name, place):
            found = "it is gone" if now is None else "it is another store"
            cure = "keep it, with weight 0 from there on"
            lines.append(f"mixture: source {name!r} was read before step {step}, and {found}; {cure}")
    if lines:
        return lines
    before = _timeline(data, saved)
    rows = data.timeline.first_row(place)
    if before.first_row(place) != rows or not np.array_equal(_pieces(data.timeline, rows), _pieces(before, rows)):
        what = [name for name in ("mixture", "seq_len", "batch_size") if saved[name] != data.settings[name]]
        reach = f"the change reaches back before step {step}; append a point at {place} or later"
        return [f"{', '.join(what)}: {reach}"]
    return []


def _probes(old: Skips, new: Skips, step: int) -> list[int]:
    """Steps before `step` at which two ways of leaving out can begin to differ."""
    edges = {skips.steps_before(first) for skips in (old, new) for first, _ in skips.ranges}
    return sorted({s for edge in edges | {step} for s in (edge - 1, edge) if 0 <= s < step})


def _used(mixture: Mapping[str, Any], name: str, place: int) -> bool:
    """Tell whether a source had a weight before a data step."""
    points = mixture["weights"]
    for number, (step, weights) in enumerate(points):
        rises = (
            mixture["interpolate"] == "linear" and number + 1 < len(points) and points[number + 1][1].get(name, 0) > 0
        )
        if step < place and (weights.get(name, 0) > 0 or rises):
            return True
    return False


def _timeline(data: LMData, saved: Mapping[str, Any]) -> Timeline:
    """Lay the timeline of the saved settings over the sources at hand."""
    names, mixture = data.mixture.names, saved["mixture"]
    points = [
        (step, {name: weight for name, weight in weights.items() if name in names} or {names[0]: 1.0})
        for step, weights in mixture["weights"]
    ]
    table = [(step, quantise(weights, names)) for step, weights in points]
    if mixture["interpolate"] == "linear":
        stairs = [stair for low, high in pairwise(table) for stair in ramp(low, high)]
        table = [*stairs, table[-1]]
    limits = [mixture["max_epochs"].get(name) for name in names]
    return Timeline(
        [tuple(point) for point in saved["batch_size"]],
        [tuple(point) for point in saved["seq_len"]],
        table,
        [None if limit is None else round(limit * line.places) for limit, line in zip(limits, data.lines, strict=True)],
    )


def _pieces(timeline: Timeline, rows: int) -> np.ndarray:
    """What holds before a row: for each row where something changes, it, rows, columns and weights."""
    edges = np.unique(np.concatenate([timeline._row, timeline._piece_row]))
    edges = edges[edges < rows]
    phase = np.searchsorted(timeline._row, edges, side="right") - 1
    piece = np.searchsorted(timeline._piece_row, edges, side="right") - 1
    parts = (edges[:, None], timeline._batch[phase][:, None], timeline._width[phase][:, None], timeline._weight[piece])
    table = np.concatenate(parts, axis=1)
    same = np.zeros(len(table), bool)
    same[1:] = (table[1:, 1:] == table[:-1, 1:]).all(axis=1)
    return table[~same]
