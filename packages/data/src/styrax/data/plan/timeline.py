r"""What each step reads: how many rows, how long, and from which source on from which place; random access by step.

Sources are mixed row by row. With $w_i(r)$ the weight of source $i$ at row $r$, an integer number of $2^{-24}$ parts
that sum to one, source $i$ is owed $D_i(r) = \sum_{q<r} w_i(q)$ rows before row $r$, and its row number $m$ (from 0)
falls due at the first row $r$ with $\lceil D_i(r + 1) \rceil > m$. The rows of the mixture are the rows of all sources
in the order in which they fall due, those of one row by the order of the sources. So what the first $r$ rows are
depends on the weights of these rows alone, a later change of weights neither repeats nor skips a row, each source is
within as many rows as there are sources of what it is owed, and a source of weight zero gives none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from styrax.core.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Int64

ONE = 1 << 24
#: A ramp of weights is climbed in at most so many equal stairs.
STAIRS = 4096
FOREVER = 1 << 38

Points = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Rows:
    """The rows of a step.

    Attributes:
        source: Number of the source of each row; -1 after the end of the data.
        place: Where on the source's line each row begins.
        width: Columns.
    """

    source: Int64[np.ndarray, " batch"]
    place: Int64[np.ndarray, " batch"]
    width: int


class Timeline:
    """The rows of every step, from schedules and limits.

    Args:
        batch_size: Rows per step, from a step on: pairs of step and number, the first at step 0.
        seq_len: Columns, likewise.
        weights: Integer weights of the sources from a row of `ONE` on: pairs of step and weights that sum to `ONE`.
        limits: For each source the places after which it ends, or `None`.
    """

    def __init__(
        self,
        batch_size: Points,
        seq_len: Points,
        weights: Sequence[tuple[int, Int64[np.ndarray, " sources"]]],
        limits: Sequence[int | None],
    ):
        steps = sorted({step for points in (batch_size, seq_len, weights) for step, _ in points})
        self._steps = np.array(steps, np.int64)
        self._batch = _at(batch_size, self._steps)
        self._width = _at(seq_len, self._steps)
        self._row = np.zeros(len(steps), np.int64)
        np.cumsum(np.diff(self._steps) * self._batch[:-1], out=self._row[1:])
        starts = np.array([step for step, _ in weights], np.int64)
        table = np.stack([weight for _, weight in weights])
        # Pieces of constant weights, by row. A limit that is reached adds one in the middle of a step.
        self._piece_row = self._row
        self._weight = table[np.searchsorted(starts, self._steps, side="right") - 1]
        self._owed = self._sum()
        self.num_rows: int | None = None
        self._phases: list[tuple[int, np.ndarray, np.ndarray]] = []  # row, rows and places of each source before it
        self._lay_phases(limits)

    @property
    def num_steps(self) -> int | None:
        """How many steps there are; `None` for no end."""
        return None if self.num_rows is None else self.step_of(self.num_rows - 1) + 1

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns, each pair once."""
        return list(dict.fromkeys(zip(self._batch.tolist(), self._width.tolist(), strict=True)))

    def batch_size(self, step: int) -> int:
        """Rows of a step."""
        return int(self._batch[self._phase(step)])

    def width(self, step: int) -> int:
        """Columns of a step."""
        return int(self._width[self._phase(step)])

    def first_row(self, step: int) -> int:
        """Rows before a step."""
        phase = self._phase(step)
        return int(self._row[phase] + (step - self._steps[phase]) * self._batch[phase])

    def step_of(self, row: int) -> int:
        """The step that has a row."""
        phase = int(np.searchsorted(self._row, row, side="right")) - 1
        return int(self._steps[phase] + (row - self._row[phase]) // self._batch[phase])

    def weights(self, step: int) -> Int64[np.ndarray, " sources"]:
        """The sources' weights at the first row of a step, in parts of `ONE`; limits that were reached count."""
        return self._weight[np.searchsorted(self._piece_row, self.first_row(step), side="right") - 1]

    def rows(self, step: int) -> Rows:
        """Say what the rows of a step are."""
        first, count = self.first_row(step), self.batch_size(step)
        source, number = self._events(first, count)
        _, rows_before, places_before = self._phases[self._phase_of_row(first)]
        width = self.width(step)
        known = np.maximum(source, 0)
        place = np.where(source < 0, 0, places_before[known] + (number - rows_before[known]) * width)
        return Rows(source, place, width)

    def before(self, step: int) -> tuple[Int64[np.ndarray, " sources"], Int64[np.ndarray, " sources"]]:
        """Count the rows and the places of each source that are used before a step."""
        first = self.first_row(step)
        _, rows_before, places_before = self._phases[self._phase_of_row(first)]
        rows = self._count(first)
        return rows, places_before + (rows - rows_before) * self.width(step)

    def _phase(self, step: int) -> int:
        return int(np.searchsorted(self._steps, step, side="right")) - 1

    def _phase_of_row(self, row: int) -> int:
        return int(np.searchsorted([phase[0] for phase in self._phases], row, side="right")) - 1

    def _sum(self) -> np.ndarray:
        owed = np.zeros_like(self._weight)
        np.cumsum(np.diff(self._piece_row)[:, None] * self._weight[:-1], axis=0, out=owed[1:])
        return owed

    def _owed_at(self, rows: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, "rows sources"]:
        piece = np.searchsorted(self._piece_row, rows, side="right") - 1
        return self._owed[piece] + self._weight[piece] * (rows - self._piece_row[piece])[:, None]

    def _events(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """List the sources of rows `[first, first + count)` and the number of each row within its source."""
        sources = self._weight.shape[1]
        if sources == 1 and self.num_rows is None:
            return np.zeros(count, np.int64), first + np.arange(count)
        begin = max(0, first - sources)
        due = -(-self._owed_at(np.arange(begin, first + count + 1)) // ONE)
        _, source = np.nonzero(due[1:] > due[:-1])
        number = due[:-1][due[1:] > due[:-1]]
        skip = first - int(due[0].sum())
        source, number = source[skip : skip + count], number[skip : skip + count]
        missing = count - len(source)
        if missing:
            source = np.concatenate([source, np.full(missing, -1)])
            number = np.concatenate([number, np.zeros(missing, np.int64)])
        return source, number

    def _count(self, row: int) -> Int64[np.ndarray, " sources"]:
        """Count the rows of each source before a row of the mixture."""
        sources = self._weight.shape[1]
        begin = max(0, row - sources)
        before = -(-self._owed_at(np.array([begin]))[0] // ONE)
        late = row - int(before.sum())
        source, _ = self._events(row - late, late) if late else (np.zeros(0, np.int64), None)
        return before + np.bincount(source[source >= 0], minlength=sources)

    def _lay_phases(self, limits: Sequence[int | None]) -> None:
        """Find where each phase of one width begins in every source, and end the sources that have a limit."""
        sources = self._weight.shape[1]
        rows, places = np.zeros(sources, np.int64), np.zeros(sources, np.int64)
        for phase, first in enumerate(self._row.tolist()):
            if phase:
                if self._width[phase] == self._width[phase - 1]:
                    continue
                now = self._count(first)
                places = places + (now - rows) * int(self._width[phase - 1])
                rows = now
            self._phases.append((first, rows, places))
            self._limit(phase, limits, rows, places)

    def _limit(self, phase: int, limits: Sequence[int | None], rows: np.ndarray, places: np.ndarray) -> None:
        """End sources whose limit is reached in a phase, the earliest first, where one row more would fall due."""
        width = int(self._width[phase])
        later = np.flatnonzero(self._width[phase:] != width)
        end = int(self._row[phase + later[0]]) if len(later) else FOREVER
        while True:
            ends = []
            for source, limit in enumerate(limits):
                if limit is not None:
                    allowed = int(rows[source]) + max(0, -(-(limit - int(places[source])) // width))
                    ends.append((self._due(source, allowed), source))
            due = min(ends, default=(FOREVER, 0))
            if due[0] >= min(end, FOREVER):
                return
            self._drop(*due)

    def _due(self, source: int, number: int) -> int:
        """Give the row at which a source's row falls due; `FOREVER` for never."""
        owed = self._owed[:, source]
        # The last piece that begins with no more than `number` rows owed: there, or never, it passes that.
        piece = int(np.searchsorted(owed, number * ONE, side="right")) - 1
        while piece < len(owed) and self._weight[piece, source] == 0:
            piece += 1
        if piece == len(owed):
            return FOREVER
        gone = (number * ONE - int(owed[piece])) // int(self._weight[piece, source])
        row = int(self._piece_row[piece]) + max(0, gone)
        return min(row, FOREVER)

    def _drop(self, row: int, source: int) -> None:
        """Give a source no weight from a row on, and its share to the others."""
        piece = int(np.searchsorted(self._piece_row, row, side="right")) - 1
        if self._piece_row[piece] < row:
            self._piece_row = np.insert(self._piece_row, piece + 1, row)
            self._weight = np.insert(self._weight, piece + 1, self._weight[piece], axis=0)
            piece += 1
        rest = self._weight[piece:].copy()
        rest[:, source] = 0
        total = rest.sum(axis=1)
        empty = np.flatnonzero(total == 0)
        if len(empty):  # here the data end
            rest = rest[: empty[0] + 1]
            total = np.maximum(total[: empty[0] + 1], 1)
        shares = np.cumsum(rest, axis=1) * ONE // total[:, None]
        rest = np.diff(shares, axis=1, prepend=0)
        self._piece_row = self._piece_row[: piece + len(rest)]
        self._weight = np.concatenate([self._weight[:piece], rest])
        self._owed = self._sum()
        if len(empty):
            self.num_rows = int((-(-self._owed[-1] // ONE)).sum())


def parse_points(name: str, value: int | Points, problems: list[str]) -> list[tuple[int, int]]:
    """Read a number, or pairs of a step and a number from there on."""
    if isinstance(value, int):
        points = [(0, value)]
    else:
        try:
            points = [(int(step), int(number)) for step, number in value]
        except (TypeError, ValueError):
            problems.append(f"{name} = {value!r}: expected a number, or pairs [step, number]")
            return [(0, 1)]
    steps = [step for step, _ in points]
    if steps[:1] != [0] or steps != sorted(set(steps)):
        problems.append(f"{name}: expected rising steps that begin with 0, got {steps}")
        return [(0, 1)]
    wrong = [number for _, number in points if number < 1 or isinstance(number, bool)]
    if wrong:
        problems.append(f"{name} = {wrong[0]}: expected 1 or more")
        return [(0, 1)]
    return points


def quantise(weights: Mapping[str, float], names: Sequence[str]) -> Int64[np.ndarray, " sources"]:
    """Turn weights into parts of `ONE`: by largest remainder, and a positive weight is never nothing.

    Raises:
        UserError: Negative, not finite, or all zero.

    Example:
        >>> (quantise({"a": 3, "b": 1}, ["a", "b", "c"]) / ONE).tolist()
        [0.75, 0.25, 0.0]
    """
    values = np.array([float(weights.get(name, 0.0)) for name in names])
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise UserError(f"weights {dict(weights)}: expected numbers of 0 or more, at least one of them positive")
    exact = values / values.max()
    exact = exact / exact.sum() * ONE
    parts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - parts), kind="stable")
    parts[order[: ONE - int(parts.sum())]] += 1
    lost = (parts == 0) & (values > 0)
    parts[lost] = 1
    parts[np.argmax(parts)] -= int(lost.sum())
    return parts


def ramp(begin: tuple[int, np.ndarray], end: tuple[int, np.ndarray]) -> list[tuple[int, Int64[np.ndarray, " sources"]]]:
    """List the stairs from one point of weights to the next, which is left out."""
    (first, low), (last, high) = begin, end
    steps = np.unique(np.linspace(first, last, min(last - first, STAIRS) + 1).astype(np.int64))[:-1]
    # Prefix sums are interpolated, so that the parts of each stair sum to ONE and zero stays zero.
    span = last - first
    sums = (np.cumsum(low) * (last - steps)[:, None] + np.cumsum(high) * (steps - first)[:, None]) // span
    return [(int(step), parts) for step, parts in zip(steps, np.diff(sums, axis=1, prepend=0), strict=True)]


def _at(points: Points, steps: np.ndarray) -> np.ndarray:
    starts = [step for step, _ in points]
    return np.array([number for _, number in points], np.int64)[np.searchsorted(starts, steps, side="right") - 1]
