"""What a restore may do where the checkpoint is not what was asked for; nothing, unless told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

from styrax.checkpoint.errors import CheckpointError
from styrax.core import nearest, tree

Cast = Literal["exact", "widen", "any"]
Missing = str | Callable[[str, Any], Any]

_CASTS = ("exact", "widen", "any")


class Policy:
    """What to do with leaves, by pattern.

    Args:
        given: One answer for all, or pattern over `item/path` -> answer, of which the first that fits counts
            and an error is the answer where none fits.
        argument: The name of the argument, for the error text.
        answers: Which texts are answers besides `error`.
        functions: Whether a function is an answer, too.

    Raises:
        CheckpointError: One of the answers is none.
    """

    def __init__(self, given: Any, argument: str, answers: tuple[str, ...], *, functions: bool = False) -> None:
        self._answers: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"**": given}
        allowed = ("error", *answers)
        check_patterns(self._answers, argument)
        for pattern, answer in self._answers.items():
            if (isinstance(answer, str) and answer in allowed) or (functions and callable(answer)):
                continue
            near = nearest(answer, allowed) if isinstance(answer, str) else ""
            expected = ", ".join(map(repr, allowed)) + (" or a function of path and leaf" if functions else "")
            raise CheckpointError(f"{argument}: expected {expected} for {pattern!r}, got {answer!r}{near}")

    def __call__(self, path: str) -> Any:
        """Give the answer for a leaf."""
        return next((answer for pattern, answer in self._answers.items() if tree.match(pattern, path)), "error")


def check_patterns(patterns: Any, argument: str) -> None:
    """Raise if these are no patterns over paths."""
    if isinstance(patterns, Iterable):
        patterns = list(patterns)
        wrong = [pattern for pattern in patterns if not isinstance(pattern, str)]
        if not wrong:
            return
        patterns = wrong[0]
    raise CheckpointError(f"{argument}: expected patterns over item/path, such as 'params/**', got {patterns!r}")


def check_cast(cast: str) -> None:
    """Raise if this is no way to cast."""
    if not isinstance(cast, str) or cast not in _CASTS:
        expected = ", ".join(map(repr, _CASTS))
        raise CheckpointError(f"cast: expected {expected}, got {cast!r}{nearest(str(cast), _CASTS)}")


def castable(saved: np.dtype, wanted: np.dtype, cast: Cast) -> bool:
    """Tell whether values may be given another dtype.

    Args:
        saved: Theirs.
        wanted: The other one.
        cast: `exact`: never; `widen`: if every value stays what it is; `any`: also if values are rounded or
            wrapped, but not from complex numbers to real ones.

    Example:
        >>> bf16, f16, f32 = np.dtype(ml_dtypes.bfloat16), np.dtype("float16"), np.dtype("float32")
        >>> castable(bf16, f32, "widen"), castable(f16, bf16, "widen"), castable(f32, bf16, "any")
        (True, False, True)
    """
    if saved == wanted:
        return True
    if cast == "widen":
        return _lossless(saved, wanted)
    return cast == "any" and not (saved.kind == "c" and wanted.kind != "c")


def convert(data: Any, dtype: np.dtype) -> Any:
    """Cast an array, numpy's or jax's; some pairs of the rarer dtypes only by way of a wider one.

    Example:
        >>> convert(np.array([1, 2]).astype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.int4)).tolist()
        [1, 2]
    """
    try:
        return data.astype(dtype)
    except TypeError:
        wide = np.int32 if _is_int(np.dtype(data.dtype)) and _is_int(dtype) else np.float32
        return data.astype(wide).astype(dtype)


def _lossless(saved: np.dtype, wanted: np.dtype) -> bool:
    if wanted.name == "float8_e8m0fnu":
        return False  # it has powers of two alone, no zero and no sign
    if saved.kind == "b":
        return True
    if wanted.kind == "b":
        return False
    if wanted.kind == "c":
        part = np.finfo(wanted).dtype
        return _lossless(np.finfo(saved).dtype if saved.kind == "c" else saved, np.dtype(part))
    if saved.kind == "c":
        return False
    if _is_int(saved):
        low, high = int(ml_dtypes.iinfo(saved).min), int(ml_dtypes.iinfo(saved).max)
        if _is_int(wanted):
            return int(ml_dtypes.iinfo(wanted).min) <= low and high <= int(ml_dtypes.iinfo(wanted).max)
        info = ml_dtypes.finfo(wanted)
        return max(-low, high) <= min(2 ** (info.nmant + 1), float(info.max))
    if _is_int(wanted):
        return False
    have, want = ml_dtypes.finfo(saved), ml_dtypes.finfo(wanted)
    return (
        want.nmant >= have.nmant
        and float(want.max) >= float(have.max)
        and float(want.smallest_subnormal) <= float(have.smallest_subnormal)
        and (_has_inf(want.dtype) or not _has_inf(have.dtype))
    )


def _is_int(dtype: np.dtype) -> bool:
    try:
        ml_dtypes.iinfo(dtype)
    except ValueError:
        return False
    return True


def _has_inf(dtype: np.dtype) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isinf(np.asarray(np.inf).astype(dtype).astype(np.float64)))
