"""A file that is mapped into memory: arrays that are views of it, and its pages given back."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core import UserError

COPY_AGAIN = "Copy it again from where it came from, or have it written again"
_MOST_SHOWN = 20
_MOST_DIMENSIONS = 64
_MOST_BYTES = 2**62


class MappedFile:
    """A file that is open for reading, as a memory map.

    Args:
        path: Of the file.

    Attributes:
        path: Of the file.
        size: Bytes it had when it was opened.

    Raises:
        UserError: It cannot be opened or mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as handle:
                self.size = os.fstat(handle.fileno()).st_size
                if self.size:  # nothing cannot be mapped
                    self._map = mmap.mmap(handle.fileno(), self.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(f"{path}: cannot be opened ({getattr(error, 'strerror', None) or error})") from error
        self._closed = False

    def bytes(self, begin: int, end: int) -> bytes:
        """Copy some bytes; fewer come where the file ends."""
        whole = self._whole()
        return whole[begin:end] if whole else b""

    def array(self, begin: int, length: int) -> np.ndarray:
        """Give bytes as a read-only view, `[length]` uint8. The range must lie within the file."""
        assert 0 <= begin <= begin + length <= self.size, (begin, length, self.size)
        whole = self._whole()
        if not length or whole is None:
            return np.empty(0, np.uint8)
        return np.frombuffer(whole, np.uint8, length, begin)

    def drop(self, begin: int, length: int) -> None:
        """Let the system take the memory of these bytes; views stay good, they read the file again."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if self._map is None or advice is None or not length:
            return
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # locked pages, for one; it was advice
            self._map.madvise(advice, first, begin + length - first)

    def close(self) -> None:
        """Close the file. Memory that arrays still look at goes when the last of them does."""
        self._closed = True
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def _whole(self) -> mmap.mmap | None:
        if self._closed:
            raise UserError(f"{self.path}: is closed; read within the `with` block that opened it")
        # To touch a page that is no longer there would kill the process.
        if self._map is not None and self._map.size() < self.size:
            raise UserError(
                f"{self.path}: was cut to {self._map.size()} bytes since it was opened with {self.size}. {COPY_AGAIN}"
            )
        return self._map


def problem_of_shape(shape: Any, itemsize: float) -> str | None:
    """Say what is wrong with a shape that a file claims, or `None`.

    Args:
        shape: What stands there.
        itemsize: Bytes of an element.

    Example:
        >>> problem_of_shape([2, -3], 1)
        'shape [2, -3] is not a list of integers, 0 or more'
    """
    text = repr(shape)
    text = text if len(text) < 100 else text[:97] + "..."
    if not isinstance(shape, (list, tuple)) or any(type(length) is not int or length < 0 for length in shape):
        return f"shape {text} is not a list of integers, 0 or more"
    if len(shape) > _MOST_DIMENSIONS:
        return f"has {len(shape)} dimensions, numpy has at most {_MOST_DIMENSIONS}"
    # numpy multiplies without the zeros, to see whether strides can overflow.
    if math.prod(length for length in shape if length) * itemsize > _MOST_BYTES:
        return f"shape {text} is larger than any memory"
    return None


def refuse(path: Path, problems: Sequence[str], cure: str) -> None:
    """Raise all problems with a file or folder at once, if there are any.

    Args:
        path: Of the file or folder.
        problems: A line for each.
        cure: What to do.

    Raises:
        UserError: There are problems.
    """
    if problems:
        rest = [f"... and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
        raise UserError("\n  ".join([f"{path} cannot be used:", *problems[:_MOST_SHOWN], *rest]) + f"\n{cure}")
