"""How a tensor of a checkpoint becomes parameters of ours, and how they become that tensor again.

A rule takes one tensor apart along one axis, transposes each part if asked, and gives each part a path. As the
parts are a permutation of the whole, every rule can be gone back: what is written is what was read, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped


@dataclass(frozen=True, eq=False)
class Rule:
    """One tensor of theirs, and the parts of it that are ours.

    Attributes:
        theirs: Name of the tensor; `{e}` in it stands for the number of an expert.
        ours: Path of each part.
        index: Which rows (or columns) of the tensor each part is, in its order; `None` for all, as they are.
        axis: 0 for rows, -1 for columns, -2 for the rows of several matrices.
        turn: Transpose each part, for torch keeps `[out, in]` and we `[in, out]`.
        squeeze: The tensor has an axis of length 1 here, which is dropped first; `None` for none.
        experts: If `theirs` has `{e}`: how many there are; the parts of all are stacked.
    """

    theirs: str
    ours: tuple[str, ...]
    index: tuple[Int[np.ndarray, " rows"] | None, ...] = (None,)
    axis: int = 0
    turn: bool = False
    squeeze: int | None = None
    experts: int | None = None

    def names(self) -> list[str]:
        """List the tensors that the rule takes.

        Example:
            >>> Rule("w{e}", ("kernel",), experts=2).names()
            ['w0', 'w1']
        """
        return [self.theirs] if self.experts is None else [self.theirs.format(e=e) for e in range(self.experts)]

    def load(self, read: Callable[[str], Shaped[np.ndarray, "..."]], part: int) -> Shaped[np.ndarray, "..."]:
        """Make one part.

        Args:
            read: Gives a tensor by its name.
            part: Its number in `ours`.
        """
        found = [self.cut(read(name), part) for name in self.names()]
        return found[0] if self.experts is None else np.stack(found)

    def save(self, parts: Sequence[Shaped[np.ndarray, "..."]], expert: int = 0) -> Shaped[np.ndarray, "..."]:
        """Make a tensor of theirs.

        Args:
            parts: All of `ours`, in order.
            expert: Whose tensor, if there are several.
        """
        own = [part if self.experts is None else part[expert] for part in parts]
        own = [part.swapaxes(-1, -2) if self.turn else part for part in own]
        if len(own) == 1 and self.index[0] is None:
            whole = own[0]
        else:
            shape = list(own[0].shape)
            shape[self.axis] = sum(part.shape[self.axis] for part in own)
            whole = np.empty(shape, own[0].dtype)
            for part, at in zip(own, self.index, strict=True):
                whole[{0: (at,), -1: (..., at), -2: (..., at, slice(None))}[self.axis]] = part
        return np.ascontiguousarray(whole if self.squeeze is None else np.expand_dims(whole, self.squeeze))

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Say what shape a tensor of theirs has.

        Args:
            parts: Shape of each of `ours`.

        Example:
            >>> rows = np.array([0, 2]), np.array([1])
            >>> Rule("qk", ("q", "k"), rows, turn=True).shape([(5, 2), (5, 1)])
            (3, 5)
        """
        own = [part if self.experts is None else part[1:] for part in parts]
        own = [(*part[:-2], part[-1], part[-2]) if self.turn else part for part in own]
        whole = list(own[0])
        whole[self.axis] = sum(part[self.axis] for part in own)
        if self.squeeze is not None:
            whole.insert(self.squeeze, 1)
        return tuple(whole)

    def within(self, theirs: str, ours: str) -> Rule:
        """Put a prefix before all names.

        Args:
            theirs: Before the tensor's.
            ours: Before the paths.
        """
        return replace(self, theirs=theirs + self.theirs, ours=tuple(ours + path for path in self.ours))

    def cut(self, whole: Shaped[np.ndarray, "..."], part: int) -> Shaped[np.ndarray, "..."]:
        """Take one part out of one tensor.

        Args:
            whole: The tensor.
            part: Number of the part in `ours`.
        """
        whole = whole if self.squeeze is None else whole.squeeze(self.squeeze)
        at = self.index[part]
        cut = whole if at is None else np.take(whole, at, axis=self.axis)
        return cut.swapaxes(-1, -2) if self.turn else cut


def linear(theirs: str, ours: str, *, bias: bool = False, weight: bool = True) -> list[Rule]:
    """Map a `torch.nn.Linear` to a `Linear`.

    Args:
        theirs: Its name, without `.weight`.
        ours: Its path, without `/kernel`.
        bias: Whether it has one.
        weight: Whether to map the kernel.

    Example:
        >>> [rule.theirs for rule in linear("q_proj", "q", bias=True)]
        ['q_proj.weight', 'q_proj.bias']
    """
    return split(theirs, [ours], [None], bias=bias) if weight else []


def split(
    theirs: str,
    ours: Sequence[str],
    index: Sequence[Int[np.ndarray, " rows"] | None],
    *,
    bias: bool = False,
) -> list[Rule]:
    """Map a `torch.nn.Linear` to several of ours, by rows.

    Args:
        theirs: Its name, without `.weight`.
        ours: Their paths, without `/kernel`.
        index: Which rows each is.
        bias: Whether it has one.
    """
    rules = [Rule(f"{theirs}.weight", tuple(f"{path}/kernel" for path in ours), tuple(index), turn=True)]
    if bias:
        rules.append(Rule(f"{theirs}.bias", tuple(f"{path}/bias" for path in ours), tuple(index)))
    return rules


def same(theirs: str, ours: str) -> Rule:
    """Map a tensor to a parameter as it is.

    Args:
        theirs: Its name.
        ours: Its path.
    """
    return Rule(theirs, (ours,))


def heads_of(heads: int, sizes: Sequence[int]) -> list[Int[np.ndarray, " rows"]]:
    """Find the rows of parts that lie side by side within each head.

    Args:
        heads: How many times the parts are repeated.
        sizes: Rows of each part in one head.

    Example:
        >>> [rows.tolist() for rows in heads_of(2, (1, 2))]
        [[0, 3], [1, 2, 4, 5]]
    """
    rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def halves(rows: Int[np.ndarray, " rows"], width: int, turned: int | None = None) -> Int[np.ndarray, " rows"]:
    """Put rows that are rotated as neighbours where halves of a head are rotated.

    Args:
        rows: Of all heads.
        width: Rows of a head.
        turned: How many of its rows are rotated, the last ones; `None` means all.

    Example:
        >>> halves(np.arange(6), 6).tolist(), halves(np.arange(6), 6, 4).tolist()
        ([0, 2, 4, 1, 3, 5], [0, 1, 2, 4, 3, 5])
    """
    turned = width if turned is None else turned
    kept = np.arange(width - turned)
    pairs = np.arange(width - turned, width)
    order = np.concatenate([kept, pairs[::2], pairs[1::2]])
    return rows.reshape(-1, width)[:, order].reshape(-1)
