"""Steps whose data are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Skips:
    """Ranges of data steps that no step of the run reads.

    Attributes:
        ranges: Pairs `[first, last + 1]`, rising, apart from one another.

    Example:
        >>> skips = Skips([[3, 5]])
        >>> [skips.data_step(step) for step in range(5)], skips.steps_before(6)
        ([0, 1, 2, 5, 6], 4)
    """

    ranges: list[list[int]]

    @classmethod
    def parse(cls, ranges: Sequence[tuple[int, int]], problems: list[str]) -> Skips:
        """Read pairs of steps, joining those that meet."""
        try:
            pairs = sorted([int(first), int(last)] for first, last in ranges)
        except (TypeError, ValueError):
            problems.append(f"skip_steps = {ranges!r}: expected pairs [first, last + 1]")
            return cls([])
        wrong = [pair for pair in pairs if not 0 <= pair[0] < pair[1]]
        problems += [f"skip_steps: {pair} is no range; expected [first, last + 1] from 0 on" for pair in wrong]
        joined: list[list[int]] = []
        for first, last in pairs:
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last])
        return cls(joined)

    def data_step(self, step: int) -> int:
        """Give the data step that a step reads."""
        for first, last in self.ranges:
            if step < first:
                break
            step += last - first
        return step

    def steps_before(self, data_step: int) -> int:
        """Count the steps that read data before a data step."""
        return data_step - sum(max(0, min(last, data_step) - first) for first, last in self.ranges)
