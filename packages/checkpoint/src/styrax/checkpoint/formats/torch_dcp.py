"""Folders of torch Distributed Checkpoint: read, without torch.

`.metadata` is a pickle that says which tensors there are, in which chunks, and where each chunk lies in the files
`*.distcp`; a chunk is what torch.save writes, a zip archive. Every name in the pickles but the few that belong there
is refused, see `unpickle`.
"""

from __future__ import annotations

import io
import itertools
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from styrax.checkpoint.formats.base import Array, problem_of_shape, read_into, reading, refuse
from styrax.checkpoint.formats.casting import dtype_named
from styrax.checkpoint.formats.unpickle import DTYPES, Record, Refused, load_metadata, load_tensor

FILE = ".metadata"
_MOST_METADATA = 2**30
_MOST_PICKLE = 2**20
_CURE = "Copy the folder again, or have torch write it again"


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and where its archive lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    begin: int
    length: int


def read(folder: Path) -> tuple[dict[tuple[str, ...] | str, Array], dict[tuple[str, ...] | str, str]]:
    """Describe the tensors of a folder.

    Returns:
        Keys (the path in torch's state dictionary if it is recorded, else the flat name) -> array; and keys -> why
        it is there but not given.

    Raises:
        CheckpointError: The metadata is damaged, names what does not belong there, or does not fit the files.
    """
    path = folder / FILE
    with reading(path, "the metadata", _CURE):
        if path.stat().st_size > _MOST_METADATA:
            raise Refused(f"has {path.stat().st_size} bytes")
        record = load_metadata(path.read_bytes())
        entries, names, storage = _tables(record)
    found: dict[tuple[str, ...] | str, Array] = {}
    skipped: dict[tuple[str, ...] | str, str] = {}
    problems: list[str] = []
    sizes: dict[Path, int] = {}
    for name, entry in entries.items():
        key = names.get(name, name)
        if entry.kind == "BytesStorageMetadata":
            skipped[key] = "is a Python object in a pickle, which is not read"
            continue
        with reading(path, repr(name), _CURE):
            dtype_name, shape, boxes = _tensor(entry)
            if dtype_name not in DTYPES:
                skipped[key] = f"has torch's dtype {dtype_name}, which numpy lacks"
                continue
            dtype = dtype_named(DTYPES[dtype_name])
            chunks, problem = _chunks(folder, name, shape, dtype, boxes, storage, sizes)
        if problem:
            problems.append(f"{name!r}: {problem}")
        else:
            found[key] = _array(name, shape, dtype, chunks)
    refuse(folder, problems, _CURE)
    return found, skipped


def _tables(record: Any) -> tuple[dict[str, Record], dict[str, tuple[str, ...]], dict[tuple[str, Any], Record]]:
    """Take the metadata apart: tensors by name, their paths, and where each chunk lies by name and offsets."""
    if not isinstance(record, Record) or record.kind != "Metadata":
        raise Refused("is not that of a checkpoint")
    entries, places = record.get("state_dict_metadata"), record.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise Refused("lists no tensors or no files")
    if not all(isinstance(name, str) and isinstance(entry, Record) for name, entry in entries.items()):
        raise Refused("lists something that is no tensor")
    planned = record.get("planner_data")
    names = {
        name: tuple(map(str, keys))
        for name, keys in (planned.items() if isinstance(planned, dict) else ())
        if isinstance(keys, tuple) and keys and all(type(key) in (str, int) for key in keys)
    }
    storage = {}
    for index, place in places.items():
        if not isinstance(index, Record) or not isinstance(place, Record):
            raise Refused("says of something else than a tensor where it lies")
        storage[index.get("fqn"), index.get("offset")] = place
    return entries, names, storage


def _tensor(entry: Record) -> tuple[str, tuple[int, ...], list[tuple[Any, Any]]]:
    properties = entry.get("properties")
    # torch gives them as a tuple, of which the dtype is first; in old versions as fields.
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else properties.get("dtype")
    return str(dtype), entry.get("size"), [(chunk.get("offsets"), chunk.get("sizes")) for chunk in entry.get("chunks")]


def _chunks(
    folder: Path,
    name: str,
    shape: Any,
    dtype: np.dtype,
    boxes: list[tuple[Any, Any]],
    storage: dict[tuple[str, Any], Record],
    sizes: dict[Path, int],
) -> tuple[list[_Chunk], str | None]:
    """Find the chunks of a tensor, and make sure that they fill it, each place once."""
    problem = problem_of_shape(shape, dtype)
    if problem:
        return [], problem
    chunks: list[_Chunk] = []
    for offsets, lengths in boxes:
        problem = problem_of_shape(offsets, dtype) or problem_of_shape(lengths, dtype)
        if problem or not len(offsets) == len(lengths) == len(shape):
            return [], f"a chunk at {offsets} of {lengths} has other dimensions than {shape}"
        if any(offset + length > whole for offset, length, whole in zip(offsets, lengths, shape)):
            return [], f"a chunk at {offsets} of {lengths} reaches out of {shape}"
        place = storage.get((name, offsets))
        if place is None:
            return [], f"nothing says where the chunk at {offsets} lies"
        if place.get("transform_descriptors"):
            return [], f"was transformed when it was written ({place.get('transform_descriptors')}), which is not read"
        file, begin, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if not isinstance(file, str) or Path(file).name != file or type(begin) is not int or type(length) is not int:
            return [], "lies in no file of this folder"
        path = folder / file
        if path not in sizes:
            sizes[path] = path.stat().st_size if path.is_file() else -1
        if sizes[path] < 0:
            return [], f"{file}: missing"
        if begin < 0 or length < 0 or begin + length > sizes[path]:
            return [], f"{file}: {sizes[path]} bytes, the chunk at {offsets} ends at {begin + length}"
        chunks.append(_Chunk(offsets, lengths, path, begin, length))
    # No more memory is ever asked for than the files can fill.
    filled = sum(math.prod(chunk.sizes) for chunk in chunks)
    if filled != math.prod(shape):
        return [], f"its chunks have {filled} numbers, {shape} has {math.prod(shape)}"
    if filled * dtype.itemsize > sum(chunk.length for chunk in chunks):
        return [], f"{filled * dtype.itemsize} bytes, its chunks have {sum(chunk.length for chunk in chunks)}"
    if len(chunks) > 1 and _overlap(chunks):
        return [], "its chunks overlap"
    return chunks, None


def _overlap(chunks: list[_Chunk]) -> bool:
    """Tell whether two boxes have a place in common; those that may are near in the first dimension."""
    chunks = sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: chunk.offsets)
    for number, left in enumerate(chunks):
        for right in itertools.islice(chunks, number + 1, None):
            if right.offsets[0] >= left.offsets[0] + left.sizes[0]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in zip(left.offsets, left.sizes, right.offsets, right.sizes)):
                return True
    return False


def _array(name: str, shape: tuple[int, ...], dtype: np.dtype, chunks: list[_Chunk]) -> Array:
    def load() -> np.ndarray:
        if len(chunks) == 1 and chunks[0].sizes == shape:
            return np.ascontiguousarray(_load(name, chunks[0], dtype)).reshape(shape)
        data = np.empty(shape, dtype)
        for chunk in chunks:
            box = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes))
            data[box] = _load(name, chunk, dtype)
        return data

    return Array(shape=tuple(shape), dtype=dtype, load=load)


def _load(name: str, chunk: _Chunk, dtype: np.dtype) -> np.ndarray:
    """Read one chunk out of its archive."""
    what = f"{name!r} at {list(chunk.offsets)}"
    with reading(chunk.file, what, _CURE), chunk.file.open("rb", buffering=0) as handle:
        archive = zipfile.ZipFile(io.BufferedReader(_Part(handle, chunk.begin, chunk.length)))
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        pickled = members["data.pkl"]
        if pickled.file_size > _MOST_PICKLE:
            raise Refused(f"a description of {pickled.file_size} bytes")
        storage, offset, size, stride, named = load_tensor(archive.read(pickled)).args
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise Refused("its bytes are not in little-endian order")
        kind, key, count = storage.args
        nbytes = count * (1 if kind is None else dtype.itemsize)
        member = members[f"data/{key}"]
        if DTYPES.get(str(named)) != dtype.name or size != chunk.sizes:
            raise Refused(f"is {named}{list(size)}, the metadata says {dtype.name}{list(chunk.sizes)}")
        if member.compress_type != zipfile.ZIP_STORED or not nbytes == member.file_size <= chunk.length:
            raise Refused(f"its data have {member.file_size} bytes, expected {nbytes}")
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if math.prod(size) and last >= nbytes // dtype.itemsize:
            raise Refused("it reaches out of its data")
        data = np.empty(nbytes, np.uint8)
        with archive.open(member) as part:
            read_into(part, data)
            part.read(1)  # lets zipfile compare the checksum
        if dtype.kind == "b" and data.size and data.max() > 1:
            raise Refused("truth values other than 0 and 1")
    if not math.prod(size):
        return np.empty(size, dtype)
    strides = tuple(step * dtype.itemsize for step in stride)
    return np.ndarray(size, dtype, data.data, offset * dtype.itemsize, strides)


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, handle: Any, begin: int, length: int) -> None:
        self._handle, self._begin, self._length, self._at = handle, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise ValueError(f"position {at} is before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        self._handle.seek(self._begin + self._at)
        count = self._handle.readinto(memoryview(buffer)[:size]) if size else 0
        self._at += count
        return count
