"""What every format gives and takes: arrays by tree path, described at once and read one at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from styrax.checkpoint.errors import CheckpointError
from styrax.core import nearest

_MOST_DIMENSIONS = 64
_MOST_BYTES = 2**62
_READ = 2**24


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array that is not read yet.

    Attributes:
        shape: Its shape.
        dtype: Its dtype in native byte order, one of numpy's or of `ml_dtypes`.
        load: Reads it: a C-contiguous numpy array of that shape and dtype, which belongs to the caller.
        mapped: Gives the same as a read-only view of the file, without reading it, where the file has the
            very bytes.

    Example:
        >>> Array.of(np.ones((2, 3), np.float32)).nbytes
        24
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]
    mapped: Callable[[], np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, value: Any) -> Array:
        """Describe an array that is in memory: of numpy, a scalar, or a `jax.Array` that is wholly on this host."""
        if isinstance(value, Array):
            return value
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            value = np.asarray(value)
        dtype = np.dtype(value.dtype).newbyteorder("=")
        return cls(
            shape=tuple(value.shape),
            dtype=dtype,
            load=lambda: np.array(value, dtype=dtype, order="C", copy=True),
        )


class Source(Mapping[str, Array]):
    """Arrays of a file or folder: tree path -> `Array`.

    Args:
        format: Name of the format.
        path: Of the file or folder.
        arrays: Tree path -> array.
        skipped: Tree path -> why it is there but cannot be given as an array.
        items: The named items, if the first key of every path is the name of one.

    Attributes:
        format: Name of the format.
        path: Of the file or folder.
        skipped: What is there and is not an array.
        named_items: Names of the items, or empty.
    """

    def __init__(
        self,
        format: str,
        path: Path,
        arrays: Mapping[str, Array],
        *,
        skipped: Mapping[str, str] | None = None,
        items: tuple[str, ...] = (),
    ) -> None:
        self.format = format
        self.path = path
        self.skipped = dict(skipped or {})
        self.named_items = items
        self._arrays = dict(arrays)

    def __getitem__(self, path: str) -> Array:
        try:
            return self._arrays[path]
        except KeyError:
            if path in self.skipped:
                raise CheckpointError(f"{self.path}: {path!r} {self.skipped[path]}") from None
            raise KeyError(f"no array {path!r} in {self.path}{nearest(path, self._arrays)}") from None

    def __contains__(self, path: object) -> bool:
        return path in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in memory."""
        return sum(array.nbytes for array in self._arrays.values())


@contextlib.contextmanager
def reading(path: Path, what: str, cure: str = "copy it again, or have it written again") -> Iterator[None]:
    """Turn whatever a parser raises over a damaged file into an error for the user.

    Args:
        path: Of the file.
        what: What is being read.
        cure: What to do.
    """
    try:
        yield
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{path}: {what} does not fit into memory; use a machine with more") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().rstrip(":")
        raise CheckpointError(f"{path}: {what} cannot be read, it may be damaged ({text}); {cure}") from error


def read_into(handle: Any, data: np.ndarray) -> None:
    """Fill an array from a file, in pieces, of which a member of a zip archive makes copies.

    Raises:
        EOFError: The file is shorter.
    """
    view, at = memoryview(data.data), 0
    while at < len(view):
        count = handle.readinto(view[at : at + _READ])
        if not count:
            raise EOFError(f"the file ends after {at} of {len(view)} bytes")
        at += count


def loaded(name: str, array: Array) -> np.ndarray:
    """Load an array that is to be written, and make sure that it is what was announced."""
    data = array.load()
    assert (data.shape, data.dtype) == (array.shape, array.dtype), f"{name}: got {data.dtype}{data.shape}"
    return np.ascontiguousarray(data).reshape(array.shape)


def problem_of_shape(shape: Any, dtype: np.dtype) -> str | None:
    """Say what is wrong with a shape that a file claims, or `None`.

    Example:
        >>> problem_of_shape([2, -3], np.dtype("int8"))
        'shape [2, -3] is not a list of integers, 0 or more'
    """
    if not isinstance(shape, (list, tuple)) or any(type(length) is not int or length < 0 for length in shape):
        return f"shape {_short(shape)} is not a list of integers, 0 or more"
    if len(shape) > _MOST_DIMENSIONS:
        return f"has {len(shape)} dimensions, numpy has at most {_MOST_DIMENSIONS}"
    # numpy multiplies without the zeros, to see whether strides can overflow.
    if math.prod(length for length in shape if length) * dtype.itemsize > _MOST_BYTES:
        return f"shape {_short(shape)} is larger than any memory"
    return None


def refuse(path: Path, problems: list[str], cure: str) -> None:
    """Raise all problems of a file at once, if there are any."""
    if problems:
        rest = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError("\n  ".join([f"{path} cannot be used:", *problems[:20], *rest]) + f"\n{cure}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:97] + "..."
