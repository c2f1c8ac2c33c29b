"""In which order layers of different kinds come, and which of them share one stack of parameters."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """All by which two layers of one model can differ.

    Attributes:
        mixer: Name of its attention or recurrence in the config's `arch`.
        sparse: Whether it has experts.
        role: Whose keys and values it uses: its "own", which later layers may use too if it is a "source", or those
            of the source of its mixer, if it is "shared".
    """

    mixer: str
    sparse: bool
    role: str = "own"


class Stack(NamedTuple):
    """Equal layers whose parameters are one array with a leading axis.

    Attributes:
        kind: What they are.
        layers: Their numbers.
    """

    kind: Kind
    layers: tuple[int, ...]


class Segment(NamedTuple):
    """A run of layers that is one cycle, repeated.

    Attributes:
        stacks: Numbers of the stacks of the cycle, in order.
        first: Number of its first layer.
        repeats: How often the cycle comes.
    """

    stacks: tuple[int, ...]
    first: int
    repeats: int


def roles(mixers: tuple[str, ...], sharing: int) -> tuple[str, ...]:
    """Say which layers make keys and values, and which use those of others.

    Args:
        mixers: Of each layer.
        sharing: How many of the last layers use those of the last layer of their mixer before them all.

    Returns:
        A role for each, as in `Kind`.

    Example:
        >>> roles(("local", "attn", "local", "attn", "local"), 2)
        ('own', 'source', 'source', 'shared', 'shared')
    """
    first = len(mixers) - sharing
    sources = {max((at for at in range(first) if mixers[at] == mixer), default=-1) for mixer in mixers[first:]}
    makes = tuple("source" if layer in sources else "own" for layer in range(first))
    return makes + ("shared",) * sharing


def plan(kinds: tuple[Kind, ...]) -> tuple[tuple[Stack, ...], tuple[Segment, ...]]:
    """Cut a row of layers into runs of repeated cycles, the longest first run that there is, and so on.

    A loop over a run compiles one cycle. Each place in the cycle has a stack of its own, so that nothing is cut out
    of a larger array.

    Args:
        kinds: One for each layer.

    Returns:
        The stacks, and the runs in order.

    Example:
        >>> near, far = Kind("local", False), Kind("attn", False)
        >>> stacks, segments = plan((near, near, far) * 2 + (near,))
        >>> [stack.layers for stack in stacks]
        [(0, 3), (1, 4), (2, 5), (6,)]
        >>> [(segment.stacks, segment.repeats) for segment in segments]
        [((0, 1, 2), 2), ((3,), 1)]
    """
    stacks: list[Stack] = []
    segments: list[Segment] = []
    first = 0
    while first < len(kinds):
        cycle, repeats = _run(kinds[first:])
        numbers = tuple(range(len(stacks), len(stacks) + cycle))
        end = first + cycle * repeats
        stacks += [Stack(kinds[start], tuple(range(start, end, cycle))) for start in range(first, first + cycle)]
        segments.append(Segment(numbers, first, repeats))
        first = end
    return tuple(stacks), tuple(segments)


def _run(kinds: tuple[Kind, ...]) -> tuple[int, int]:
    """Find the cycle that covers most from the start; of several, the shortest."""
    best = (1, 1)
    for cycle in range(1, len(kinds) // 2 + 1):
        repeats = 1
        while kinds[repeats * cycle : (repeats + 1) * cycle] == kinds[:cycle]:
            repeats += 1
        if repeats > 1 and cycle * repeats > best[0] * best[1]:
            best = (cycle, repeats)
    return best
