"""Statistics of an array, and of how far two are apart, without more memory than a piece of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_PIECE = 2**18


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the numbers of an array are like.

    Attributes:
        count: How many there are.
        zeros: How many are 0.
        nans: How many are no number.
        infs: How many are infinite.
        min: The least that is finite; `None` if there is none. Of complex numbers, here and below, the magnitude.
        max: The greatest that is finite.
        mean: Of those that are finite.
        std: Their standard deviation, of the whole and not of a sample.
    """

    count: int
    zeros: int
    nans: int
    infs: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two arrays of one shape are apart.

    Attributes:
        count: How many numbers each has.
        different: How many of them differ: in a bit if the dtypes are equal, else in value.
        max_abs: The greatest difference of two finite numbers; `None` if there are no such pairs.
        relative: The L2 norm of the difference over that of the first array, of pairs that are finite; infinite if
            the first is all zeros and the second is not.
        nans: Numbers that are none, in the first and the second.
        infs: Infinite ones, in the first and the second.
    """

    count: int
    different: int
    max_abs: float | None
    relative: float | None
    nans: tuple[int, int]
    infs: tuple[int, int]

    @property
    def fraction(self) -> float:
        """Which part of the numbers differs, 0 to 1."""
        return self.different / self.count if self.count else 0.0


def summarize(array: np.ndarray) -> Summary:
    """Describe the numbers of an array.

    Args:
        array: Of any shape, and any dtype of numpy or `ml_dtypes`.

    Example:
        >>> summarize(np.array([0.0, 1.0, 3.0, np.nan]))
        Summary(count=4, zeros=1, nans=1, infs=0, min=0.0, max=3.0, mean=1.3333333333333333, std=1.247219128924647)
    """
    zeros = nans = infs = finite = 0
    least, most, total = math.inf, -math.inf, 0.0
    for piece in _pieces(array):
        values = _wide(piece)
        zeros += int(np.count_nonzero(values == 0))
        nans += int(np.count_nonzero(np.isnan(values)))
        infs += int(np.count_nonzero(np.isinf(values)))
        good = _magnitude(values[np.isfinite(values)])
        if good.size:
            finite += good.size
            least, most = min(least, _number(good.min())), max(most, _number(good.max()))
            total += float(good.sum(dtype=np.float64))
    if not finite:
        return Summary(count=array.size, zeros=zeros, nans=nans, infs=infs)
    mean, norm = total / finite, 0.0
    for piece in _pieces(array):
        values = _wide(piece)
        norm = math.hypot(norm, _norm(_magnitude(values[np.isfinite(values)]).astype(np.float64) - mean))
    std = norm / math.sqrt(finite)
    return Summary(count=array.size, zeros=zeros, nans=nans, infs=infs, min=least, max=most, mean=mean, std=std)


def compare(a: np.ndarray, b: np.ndarray) -> Distance:
    """Measure how far two arrays are apart; their dtypes may differ.

    Args:
        a: Of any shape, and any dtype of numpy or `ml_dtypes`.
        b: Of the same shape.

    Example:
        >>> found = compare(np.array([3.0, 4.0, np.nan]), np.array([3.0, 4.5, np.nan]))
        >>> found.different, found.max_abs, found.relative, found.nans
        (1, 0.5, 0.1, (1, 1))
    """
    assert a.shape == b.shape, f"{a.shape} and {b.shape}"
    different, pairs, most, norm, norm_a = 0, 0, 0.0, 0.0, 0.0
    nans, infs = [0, 0], [0, 0]
    for left, right in zip(_pieces(a), _pieces(b)):
        x, y = _wide(left), _wide(right)
        for number, values in enumerate((x, y)):
            nans[number] += int(np.count_nonzero(np.isnan(values)))
            infs[number] += int(np.count_nonzero(np.isinf(values)))
        different += int(np.count_nonzero(_differ(left, right) if left.dtype == right.dtype else x != y))
        both = np.isfinite(x) & np.isfinite(y)
        if both.any():
            gap = _gap(x[both], y[both])
            pairs += gap.size
            most = max(most, _number(gap.max()))
            norm = math.hypot(norm, _norm(gap))
            norm_a = math.hypot(norm_a, _norm(_magnitude(x[both])))
    relative = None
    if pairs:
        relative = norm / norm_a if norm_a else (math.inf if norm else 0.0)
    return Distance(
        count=a.size,
        different=different,
        max_abs=most if pairs else None,
        relative=relative,
        nans=(nans[0], nans[1]),
        infs=(infs[0], infs[1]),
    )


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for begin in range(0, flat.size, _PIECE):
        yield flat[begin : begin + _PIECE]


def _wide(piece: np.ndarray) -> np.ndarray:
    """Give the same numbers in a dtype that numpy counts with: whole numbers stay exact."""
    kind = piece.dtype.kind
    if kind in "iu":
        return piece
    if kind == "b":
        return piece.astype(np.uint8)
    if kind == "c":
        return piece.astype(np.complex128)
    if kind == "f":
        return piece if piece.dtype.itemsize > 8 else piece.astype(np.float64)
    return piece.astype(np.int64 if "int" in piece.dtype.name else np.float64)  # those of ml_dtypes


def _differ(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Tell which numbers differ in a bit, so that a zero and a negative one do, and two equal NaNs do not."""
    size = left.dtype.itemsize
    return (left.view(np.uint8).reshape(-1, size) != right.view(np.uint8).reshape(-1, size)).any(axis=1)


def _number(value: np.generic) -> float:
    return value.item() if value.dtype.kind in "iu" else float(value)


def _magnitude(values: np.ndarray) -> np.ndarray:
    return np.abs(values) if values.dtype.kind == "c" else values


def _gap(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "iu" and x.dtype == y.dtype:
        # Larger minus smaller, modulo 2**bits, is right without a sign: a difference may not fit the signed dtype.
        unsigned = f"u{x.dtype.itemsize}"
        return np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)
    with np.errstate(over="ignore"):
        return np.abs(np.subtract(x, y, dtype=np.result_type(x, y, np.float64)))


def _norm(values: np.ndarray) -> float:
    """Give the L2 norm; scaled, so that squares of large numbers do not overflow."""
    values = np.abs(values.astype(np.float64))
    most = float(values.max()) if values.size else 0.0
    if most == 0 or not math.isfinite(most):
        return most
    return most * math.sqrt(float(np.square(values / most).sum()))
