"""Floating-point arrays as another dtype while they are copied."""

from __future__ import annotations

import dataclasses

import numpy as np

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.formats.base import Array
from styrax.core import nearest

SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_LONG = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_PIECE = 2**20


def dtype_named(name: str) -> np.dtype:
    """Give a dtype by its name, those of `ml_dtypes` included.

    Raises:
        ValueError: There is none.

    Example:
        >>> dtype_named("bfloat16").itemsize
        2
    """
    import ml_dtypes

    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise ValueError(f"no dtype {name!r}") from error


def target(name: str) -> np.dtype:
    """Give the dtype that floating-point arrays are to be cast to.

    Args:
        name: `bf16`, `f16`, `f32`, `f64`, or a full name.

    Raises:
        CheckpointError: There is no such one; the text lists those there are.
    """
    full = SHORT.get(name, name)
    if full not in _LONG:
        options = [*SHORT, *_LONG]
        raise CheckpointError(f"cast: no dtype {name!r}{nearest(name, options)}; there are {', '.join(options)}")
    return dtype_named(full)


def cast(path: str, array: Array, dtype: np.dtype) -> Array:
    """Give an array in another floating-point dtype; integers, truth values and complex numbers stay as they are.

    Args:
        path: Its path, for the error text.
        array: The array.
        dtype: What to round to, to the nearest and to even at ties.

    Returns:
        An array whose `load` raises `CheckpointError` if a finite number becomes infinite or no number.

    Example:
        >>> array = Array.of(np.array([1.001, 2.0], np.float32))
        >>> cast("w", array, dtype_named("bfloat16")).load().tolist()
        [1.0, 2.0]
    """
    import ml_dtypes

    try:
        floating = np.issubdtype(array.dtype, np.floating) or bool(ml_dtypes.finfo(array.dtype))
    except ValueError:
        floating = False
    if not floating or array.dtype == dtype or array.dtype.kind == "c":
        return array
    return dataclasses.replace(array, dtype=dtype, load=lambda: _cast(path, array.load(), dtype), mapped=None)


def _cast(path: str, data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    result = np.empty(data.shape, dtype)
    left, right = data.reshape(-1), result.reshape(-1)
    lost = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, left.size, _PIECE):
            piece = left[begin : begin + _PIECE]
            rounded = piece.astype(dtype)
            lost += int(np.count_nonzero(np.isfinite(piece) & ~np.isfinite(rounded)))
            right[begin : begin + _PIECE] = rounded
    if lost:
        raise CheckpointError(
            f"{path}: {lost} of {data.size} numbers are too large for {dtype.name}; leave this array out of the cast, "
            "or cast to a dtype of larger range"
        )
    return result
