"""Reading GGUF, the one-file format of llama.cpp: metadata, and tensors that become float32.

A file is a magic number, a version, the number of tensors and of metadata entries, the entries, a record for each
tensor, and the tensors' bytes, each padded to the alignment.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core import UserError
from styrax.models.hf.mapped import COPY_AGAIN, MappedFile, problem_of_shape, refuse
from styrax.models.hf.quants import KINDS, Kind, dequantize

if TYPE_CHECKING:
    from os import PathLike

    from jaxtyping import Float32, Shaped

_VERSIONS = (2, 3)
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_CODES = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_NUMBERS = {number: np.dtype(f"<{code}") for number, code in _CODES.items()}
# The fewest bytes that each takes, so that no count can say more than the file has room for.
_LEAST = {_STRING: 8, _ARRAY: 12, **{number: dtype.itemsize for number, dtype in _NUMBERS.items()}}
_LEAST_ENTRY, _LEAST_RECORD = 13, 24
_MOST_NESTED = 8
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32


class GgufTensor:
    """One tensor of a file, not read yet.

    Attributes:
        name: In the file.
        shape: Its shape in C order, which is ggml's `ne` reversed.
        kind: ggml's name of how it is stored, such as "Q4_1".
        dtype: What `read` gives: float32.
        path: Of the file.
    """

    dtype = np.dtype("float32")

    def __init__(self, name: str, shape: tuple[int, ...], kind: Kind, file: MappedFile, begin: int) -> None:
        self.name, self.shape, self.kind, self.path = name, shape, kind.name, file.path
        self._file, self._begin, self._kind = file, begin, kind

    @property
    def nbytes(self) -> int:
        """Bytes in memory, as float32."""
        return math.prod(self.shape) * 4

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self._bytes(self.shape)

    def read(self, index: Any = ...) -> Float32[np.ndarray, "..."]:
        """Give the values, or a part of them, as an array of your own; the file's pages go back to the system.

        Args:
            index: What numpy takes between brackets. Where it begins with a slice, only its rows are read.

        Raises:
            UserError: The kind is not one that is read here, or the file is closed or was cut.
        """
        index = index if isinstance(index, tuple) else (index,)
        begin, shape = self._begin, self.shape
        if index and isinstance(index[0], slice) and len(shape) > 1:  # blocks lie within a row
            start, stop, step = index[0].indices(shape[0])
            if step == 1:
                begin += start * self._bytes(shape[1:])
                shape, index = (max(0, stop - start), *shape[1:]), (slice(None), *index[1:])
        data = self._file.array(begin, self._bytes(shape))
        try:
            whole = dequantize(self.kind, data).reshape(shape)
        except UserError as error:
            raise UserError(f"{self.path}: {self.name!r}: {error}") from error
        self._file.drop(begin, len(data))
        part = np.asarray(whole[index])
        return part if part.size == whole.size else part.copy()

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self._kind.values * self._kind.nbytes

    def __repr__(self) -> str:
        return f"GgufTensor({self.name!r}, {self.kind}{list(self.shape)})"


class Gguf(Mapping[str, GgufTensor]):
    """The tensors of a GGUF file by name, in its order. Close it, or use it in a `with` block.

    Attributes:
        path: Of the file.
        version: Of the format, 2 or 3.
        metadata: Key -> number, truth value, text, `list` of texts or of arrays, or `np.ndarray` of numbers.
    """

    def __init__(self, file: MappedFile, version: int, metadata: dict[str, Any], tensors: list[GgufTensor]) -> None:
        self.path, self.version, self.metadata = file.path, version, metadata
        self._file, self._tensors = file, {tensor.name: tensor for tensor in tensors}

    def __getitem__(self, name: str) -> GgufTensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(path: str | PathLike[str]) -> Gguf:
    """Open a GGUF file: its metadata is read, its tensors are not.

    Args:
        path: Of a file of version 2 or 3, little endian.

    Raises:
        UserError: It is another file, of another version or byte order, cut short, or damaged. No count or length in
            it is believed before the file is seen to have room for it.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "empty.gguf"
        >>> entry = struct.pack("<Q9sII", 9, b"vocab.dim", 4, 32000)
        >>> _ = file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry)
        >>> with open_gguf(file) as gguf:
        ...     print(gguf.metadata, len(gguf))
        {'vocab.dim': 32000} 0
    """
    file = MappedFile(Path(path))
    try:
        return _parse(file)
    except BaseException:
        file.close()
        raise


def unpermute(weight: Shaped[np.ndarray, "rows ..."], heads: int) -> Shaped[np.ndarray, "rows ..."]:
    """Put the rows of a query or key projection back into the order of Hugging Face.

    For models of the Llama kind, llama.cpp turns neighbours $(2i, 2i + 1)$ of a head by an angle, Hugging Face the
    pair $(i, i + d/2)$. Its converter therefore interleaves the two halves of each head; this undoes it.

    Args:
        weight: `[heads * head_dim, ...]`, a weight as stored (rows are outputs) or a bias.
        heads: Query heads, or for a key projection the key heads.

    Returns:
        A view or copy of the same shape.

    Raises:
        UserError: The rows are not pairs for each head.

    Example:
        >>> unpermute(np.array([0, 3, 1, 4, 2, 5]), 1).tolist()
        [0, 1, 2, 3, 4, 5]
    """
    rows = weight.shape[0] if weight.ndim else 0
    if heads < 1 or not rows or rows % (2 * heads):
        raise UserError(f"expected rows in pairs for each of {heads} heads, got a weight of shape {weight.shape}")
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


class _Cursor:
    """A place in a file that moves on as it is read, and never beyond the end."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.at, self.what = file, 0, "the header"

    def error(self, text: str) -> UserError:
        return UserError(f"{self.file.path}: {self.what}: {text}. {COPY_AGAIN}")

    def take(self, length: int) -> bytes:
        if length > self.file.size - self.at:
            raise self.error(
                f"is cut short or damaged: expected {length} bytes at {self.at}, the file has {self.file.size}"
            )
        self.at += length
        return self.file.bytes(self.at - length, self.at)

    def number(self, kind: int) -> Any:
        return np.frombuffer(self.take(_LEAST[kind]), _NUMBERS[kind])[0].item()

    def unsigned(self, format: str) -> int:
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def count(self, least: int) -> int:
        """Read how many of something follow, each of which has so many bytes at least."""
        count = self.unsigned("<Q")
        if count * least > self.file.size - self.at:
            raise self.error(
                f"is cut short or damaged: {count} parts of {least} bytes or more, the file has "
                f"{self.file.size - self.at} bytes left"
            )
        return count

    def text(self) -> str:
        raw = self.take(self.unsigned("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{raw[:40]!r} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _LEAST:
            raise self.error(f"type {kind} is none of 0 to 12")
        if kind != _ARRAY:
            value = self.number(kind)
            return self._truth(np.array(value)).item() if kind == _BOOL else value
        if depth == _MOST_NESTED:
            raise self.error(f"has arrays in arrays, more than {_MOST_NESTED} deep")
        inner = self.unsigned("<I")
        if inner not in _LEAST:
            raise self.error(f"type {inner} of an array's elements is none of 0 to 12")
        count = self.count(_LEAST[inner])
        if inner in (_STRING, _ARRAY):
            return [self.value(inner, depth + 1) for _ in range(count)]
        dtype = _NUMBERS[inner]
        array = np.frombuffer(self.take(count * dtype.itemsize), dtype).astype(dtype.newbyteorder("="))
        return self._truth(array) if inner == _BOOL else array

    def _truth(self, values: np.ndarray) -> np.ndarray:
        if values.size and values.max() > 1:
            raise self.error(f"has a truth value of {values.max()}, expected 0 or 1")
        return values.astype(bool)


def _parse(file: MappedFile) -> Gguf:
    cursor = _Cursor(file)
    magic = file.bytes(0, 4)
    if magic != b"GGUF":
        raise UserError(f"{file.path}: is no GGUF file: expected b'GGUF' at its beginning, got {magic!r}")
    cursor.at = 4
    version = cursor.unsigned("<I")
    if version and version % 2**16 == 0:
        raise UserError(f"{file.path}: is big endian, which is not read here; convert it (gguf-convert-endian)")
    if version not in _VERSIONS:
        raise UserError(f"{file.path}: is GGUF version {version}, expected 2 or 3; convert it with llama.cpp")
    cursor.what = "the number of tensors"
    tensor_count = cursor.count(_LEAST_RECORD)
    cursor.what = "the number of metadata entries"
    metadata = _metadata(cursor, cursor.count(_LEAST_ENTRY))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    records = _records(cursor, tensor_count)
    start = _padded(cursor.at, alignment)
    problems = _gaps(records, file.size - start, alignment) if records else []
    refuse(file.path, problems, COPY_AGAIN)
    return Gguf(
        file, version, metadata, [GgufTensor(name, shape, kind, file, start + at) for name, shape, kind, at in records]
    )


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found = {}
    for number in range(count):
        cursor.what = f"metadata entry {number}"
        key = cursor.text()
        cursor.what = f"metadata {key!r}"
        if key in found:
            raise cursor.error("is there more than once")
        kind = cursor.unsigned("<I")
        found[key] = cursor.value(kind)
        if key == "general.alignment" and (kind != _UINT32 or found[key].bit_count() != 1):
            raise cursor.error(f"expected a power of two of type {_UINT32}, got {found[key]!r} of type {kind}")
    return found


def _records(cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], Kind, int]]:
    """Read name, shape, kind and place of each tensor."""
    found, names, problems = [], set(), []
    for number in range(count):
        cursor.what = f"the record of tensor {number}"
        name = cursor.text()
        cursor.what = f"the record of tensor {name!r}"
        if name in names:
            raise cursor.error("is there more than once")
        names.add(name)
        dimensions = cursor.unsigned("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise cursor.error(f"has {dimensions} dimensions, at most {_MOST_DIMENSIONS} may be")
        shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))[::-1]
        number_of_kind, offset = cursor.unsigned("<I"), cursor.unsigned("<Q")
        kind = KINDS.get(number_of_kind)
        if kind is None:
            problems.append(f"{name!r}: kind {number_of_kind} is none that files have now")
        elif problem := problem_of_shape(shape, max(4, kind.nbytes)):
            problems.append(f"{name!r}: {problem}")
        elif (shape[-1] if shape else 1) % kind.values:
            problems.append(f"{name!r}: {kind.name}{list(shape)}: rows are no multiple of {kind.values} values")
        else:
            found.append((name, shape, kind, offset))
    refuse(cursor.file.path, problems, f"{COPY_AGAIN}, or convert it with a newer llama.cpp")
    return found


def _gaps(records: list[tuple[str, tuple[int, ...], Kind, int]], size: int, alignment: int) -> list[str]:
    """Say where tensors overlap, leave bytes out, or end elsewhere than the file; llama.cpp wants them close too."""
    places = [
        (offset, offset + math.prod(shape) // kind.values * kind.nbytes, name) for name, shape, kind, offset in records
    ]
    problems, last, at = [], "the records", 0
    for begin, end, name in sorted(places):
        if begin != at:
            what = "overlaps" if begin < at else f"leaves {begin - at} bytes after"
            problems.append(f"{name!r}: {what} {last}: begins at {begin}, expected {at}")
        if end > size:
            problems.append(f"{name!r}: ends at {end}, the file has {max(0, size)} bytes for tensors: it is cut short")
        last, at = repr(name), max(at, _padded(end, alignment))
    if size > at:
        problems.append(f"goes on after the last tensor: {size} bytes for tensors, expected {at}")
    return problems


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
