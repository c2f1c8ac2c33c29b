"""Numbers of 4 and 6 bits: one a byte in memory, packed in files, the first in the lowest bits."""

from __future__ import annotations

import numpy as np

_PIECE = 24 * 2**14  # numbers at a time: whole bytes for either width, and little memory


def pack(data: np.ndarray, width: int) -> np.ndarray:
    """Pack bytes that hold small numbers.

    Args:
        data: uint8 of shape [n], n numbers below 2**width.
        width: Bits of a number.

    Returns:
        uint8 of shape [n * width / 8].

    Example:
        >>> pack(np.array([1, 2, 15, 0], np.uint8), 4).tolist()
        [33, 15]
    """
    result = np.empty(data.size * width // 8, np.uint8)
    for begin in range(0, data.size, _PIECE):
        piece = data[begin : begin + _PIECE, None]
        flat = np.packbits(np.unpackbits(piece, axis=1, count=width, bitorder="little"), bitorder="little")
        result[begin * width // 8 :][: flat.size] = flat
    return result


def unpack(data: np.ndarray, width: int, count: int) -> np.ndarray:
    """Unpack small numbers into a byte each; the inverse of `pack`.

    Args:
        data: uint8 of shape [count * width / 8].
        width: Bits of a number.
        count: How many numbers.

    Example:
        >>> unpack(np.array([33, 15], np.uint8), 4, 4).tolist()
        [1, 2, 15, 0]
    """
    result = np.empty(count, np.uint8)
    for begin in range(0, count, _PIECE):
        size = min(_PIECE, count - begin)
        piece = data[begin * width // 8 : (begin + size) * width // 8]
        flat = np.unpackbits(piece, bitorder="little").reshape(size, width)
        result[begin : begin + size] = np.packbits(flat, axis=1, bitorder="little")[:, 0]
    return result
