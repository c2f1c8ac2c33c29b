"""Curves and bars as SVG and HTML that need no script, no network, and follow the page's colours."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COLOURS = ("#2f7fc1", "#d9702b", "#2b9d72", "#b8509c", "#8b78d6", "#a38c12", "#cf4a4a", "#6b7f92")
"""Of runs; each can be told from the page in light and in dark."""

PARTS = {
    "step": "#2b9d72",
    "compile": "#2f7fc1",
    "startup": "#8b78d6",
    "data": "#d9702b",
    "checkpoint": "#a38c12",
    "evaluate": "#4bb3c4",
    "sample": "#b8509c",
    "lost": "#cf4a4a",
    "other": "#8d99a6",
    "down": "#55606b",
}
"""Colours of the parts of a run's time, in the order of the bar."""

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 12, 30
MOST = 300


class Line(NamedTuple):
    """One curve.

    Attributes:
        name: Of the run.
        points: ``(step, value)`` in order.
        colour: Of :data:`COLOURS`.
        dashed: A line to compare with.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def colour(number: int) -> str:
    """The colour of the run of this number."""
    return COLOURS[number % len(COLOURS)]


def chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """Draw curves over the step; nothing if there is no point.

    Args:
        title: What is shown.
        unit: Of the values.
        lines: The curves; values that are no finite numbers are left out.
    """
    lines = [line._replace(points=[p for p in line.points if math.isfinite(p[1])]) for line in lines]
    lines = [line for line in lines if line.points]
    if not any(not line.dashed for line in lines):
        return ""
    steps = [x for line in lines for x, _ in line.points]
    low, high = limits([y for line in lines for _, y in line.points])
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def across(x: float) -> float:
        return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y, text in labels(ticks(low, high)):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{text}</text>')
    for x, text in labels(ticks(first, last)):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    frame = f'x="{LEFT}" y="{TOP - 2}" width="{WIDTH - LEFT - RIGHT + 4}" height="{HEIGHT - TOP - BOTTOM + 4}"'
    drawn = []
    for line in lines:
        points = [(x, min(max(y, low), high)) for x, y in thin(line.points)]
        if line.dashed:
            points = [(first, points[0][1]), (last, points[-1][1])]
        style = f'stroke="{line.colour}"' + (' stroke-dasharray="5 4"' if line.dashed else "")
        name = html.escape(line.name)
        if len(points) == 1:
            (x, y) = points[0]
            drawn.append(
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{line.colour}">'
                f"<title>{name}</title></circle>"
            )
        else:
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
            drawn.append(f'<polyline points="{path}" {style}><title>{name}</title></polyline>')
            if len(points) <= 30 and not line.dashed:
                drawn += [
                    f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.2" fill="{line.colour}"/>' for x, y in points
                ]
    return (
        f'<figure><figcaption>{html.escape(title)} <span class="unit">{html.escape(unit)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)} by step">'
        f'<rect class="frame" {frame}/>{"".join(parts)}{"".join(drawn)}</svg></figure>'
    )


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of the upright axis: all values, but for a few that are far above all others.

    >>> limits([1.0, 2.0, 3.0]), limits([1.0] * 50 + [2.0] * 50 + [1e6])[1] < 10
    ((0.9, 3.1), True)
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    middle, usual = ordered[len(ordered) // 2], ordered[int((len(ordered) - 1) * 0.98)]
    if high - middle > 8 * max(usual - low, 1e-12) and usual > low:
        high = usual
    room = (high - low) * 0.05 or max(abs(high) * 0.05, 1e-9)
    return low - room, high + room


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within a range, about as many as wanted.

    >>> ticks(0.93, 3.1), ticks(0, 450)
    ([1.0, 1.5, 2.0, 2.5, 3.0], [0, 100, 200, 300, 400])
    """
    rough = (high - low) / wanted
    scale = 10 ** math.floor(math.log10(rough))
    gap = scale * min((1, 2, 5, 10), key=lambda unit: abs(unit * scale - rough))
    gap = int(gap) if gap >= 1 else gap
    return [round(i * gap, 12) for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def thin(points: Sequence[tuple[float, float]], most: int = MOST) -> list[tuple[float, float]]:
    """Fewer points: the least and the greatest of each piece, so that no spike is lost.

    >>> thin([(i, float(i == 500)) for i in range(1000)], most=20).count((500, 1.0))
    1
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        piece = range(start, min(start + size, len(points)))
        ends = {min(piece, key=lambda i: points[i][1]), max(piece, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


def labels(values: Sequence[float]) -> list[tuple[float, str]]:
    """The numbers of an axis, with as many digits as tell them apart.

    >>> labels([1.0, 1.5]), labels([5.5445, 5.545])
    ([(1.0, '1'), (1.5, '1.5')], [(5.5445, '5.5445'), (5.545, '5.5450')])
    """
    texts = [number(value) for value in values]
    if len(set(texts)) < len(texts):
        gap = min(after - before for before, after in itertools.pairwise(values))
        digits = max(0, -math.floor(math.log10(gap)))
        texts = [f"{value:,.{digits}f}" for value in values]
    return list(zip(values, texts, strict=True))


def number(value: float) -> str:
    """A number for an axis.

    >>> number(0.00025), number(1500), number(2.5), number(2_000_000), number(0)
    ('0.00025', '1,500', '2.5', '2M', '0')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:g}G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


def bar(seconds: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Draw how a whole is made up of parts, as one bar with the share of each on hovering.

    Args:
        seconds: By part; parts of nothing are left out.
        labels: What each part is called.
    """
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    pieces = [
        f'<span style="width:{100 * seconds[part] / whole:.3f}%;background:{shade}" '
        f'title="{html.escape(labels[part])}: {100 * seconds[part] / whole:.1f} %"></span>'
        for part, shade in PARTS.items()
        if seconds.get(part, 0) > 0
    ]
    return f'<div class="bar">{"".join(pieces)}</div>'
