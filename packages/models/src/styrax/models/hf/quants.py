r"""The block formats of ggml, and their values in float32.

A row is cut into blocks of 32 or 256 values, which share a scale $d$ and, in some, an offset $m$, in float16.
The K formats cut a block of 256 again, into parts with a scale $s$ and an offset $o$ of 6 or 8 bits each. All
products below are exact in float32, and each value is rounded at most once, in its last sum.

| kind       | value                                     |
|------------|-------------------------------------------|
| Q4_0, Q5_0 | $d\,(q - 8)$ and $d\,(q - 16)$            |
| Q4_1, Q5_1 | $d\,q + m$                                |
| Q8_0       | $d\,q$                                    |
| Q4_K, Q5_K | $(d\,s)\,q - (m\,o)$                      |
| Q6_K       | $(d\,s)\,(q - 32)$                        |

Source: ggml, `ggml-common.h` (layouts of the blocks) and `ggml-quants.c` (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from styrax.core import UserError, nearest

if TYPE_CHECKING:
    from jaxtyping import Float32, UInt8

    Blocks = UInt8[np.ndarray, "blocks bytes"]
    Values = Float32[np.ndarray, "blocks values"]

_AT_ONCE = 2**18  # values, so that the steps between stay in a cache


class Kind(NamedTuple):
    """How the values of a tensor are stored.

    Attributes:
        name: ggml's name.
        values: Number of values of a block.
        nbytes: Bytes of a block.
    """

    name: str
    values: int
    nbytes: int


#: ggml's number -> kind, of all that files may have; `dequantize` knows some of them.
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
    41: Kind("Q1_0", 128, 18),
}
_BY_NAME = {kind.name: kind for kind in KINDS.values()}


def dequantize(kind: str, data: UInt8[np.ndarray, " bytes"]) -> Float32[np.ndarray, " values"]:
    """Give the values of whole blocks.

    Args:
        kind: ggml's name: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K.
        data: Blocks, one after the other.

    Returns:
        A new array. A scale that is infinite or not a number gives such values, as the formula does.

    Raises:
        UserError: The kind is another, or the bytes are no whole number of blocks.

    Example:
        >>> half = np.frombuffer(np.float16(0.5).tobytes() + bytes([0x19] * 16), np.uint8)
        >>> dequantize("Q4_0", half)[[0, 15, 16, 31]].tolist()  # the low four bits are 9, the high ones 1
        [0.5, 0.5, -3.5, -3.5]
    """
    if kind not in _DECODERS:
        raise UserError(f"values of kind {kind!r} are not read here{nearest(kind, _DECODERS)}; {SUPPORTED}")
    _, values, nbytes = _BY_NAME[kind]
    if data.size % nbytes:
        raise UserError(f"{kind}: expected whole blocks of {nbytes} bytes, got {data.size} bytes")
    blocks = np.ascontiguousarray(data).reshape(-1, nbytes)
    out = np.empty((len(blocks), values), np.float32)
    step = _AT_ONCE // values
    with np.errstate(invalid="ignore", over="ignore"):
        for at in range(0, len(blocks), step):
            out[at : at + step] = _DECODERS[kind](blocks[at : at + step])
    return out.reshape(-1)


def _numbers(dtype: type | np.dtype) -> Callable[[Blocks], Values]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def _half(blocks: Blocks, at: int) -> Values:
    """Read a float16, `[blocks, 1]`."""
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: Blocks) -> UInt8[np.ndarray, "blocks 2 bytes"]:
    """Take the low halves of all bytes, then the high halves."""
    return np.stack([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Blocks) -> UInt8[np.ndarray, "blocks 32"]:
    """Bit i of 32 belongs to value i; moved to where the fifth bit of a number stands."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(blocks: Blocks) -> Values:
    q = _nibbles(blocks[:, 2:]).reshape(-1, 32)
    return _half(blocks, 0) * (q.astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Values:
    q = _nibbles(blocks[:, 4:]).reshape(-1, 32)
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Values:
    q = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> Values:
    q = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Values:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_offsets(blocks: Blocks) -> tuple[Float32[np.ndarray, "blocks 8 1"], Float32[np.ndarray, "blocks 8 1"]]:
    """Give $d s$ and $m o$ of the eight parts of a block of Q4_K or Q5_K.

    Twelve bytes hold eight scales and eight offsets of 6 bits: the first four of each in the low bits of bytes 0-3
    and 4-7; of the last four, the low halves in bytes 8-11, and the upper two bits on top of bytes 0-3 and 4-7.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (low & 15) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (low >> 4) | (second >> 6 << 4)], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * offsets)[:, :, None]


def _q4_k(blocks: Blocks) -> Values:
    # Four times 32 bytes, each with one part in its low halves and the next part in its high halves.
    q = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)
    scales, offsets = _scales_and_offsets(blocks)
    return (scales * q.astype(np.float32) - offsets).reshape(-1, 256)


def _q5_k(blocks: Blocks) -> Values:
    q = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    part = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> part & 1  # bit p of byte i belongs to value i of part p
    scales, offsets = _scales_and_offsets(blocks)
    return (scales * (q | fifth << 4).astype(np.float32) - offsets).reshape(-1, 256)


def _q6_k(blocks: Blocks) -> Values:
    # Each half of a block has 64 bytes of low halves, and 32 bytes of two upper bits for each of its four quarters.
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    q = (low | upper << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scales[:, :, None] * q).reshape(-1, 256)


_DECODERS: dict[str, Callable[[Blocks], Values]] = {
    "F32": _numbers(np.float32),
    "F16": _numbers(np.float16),
    "BF16": _numbers(ml_dtypes.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
SUPPORTED = f"those that are read: {', '.join(_DECODERS)}"
