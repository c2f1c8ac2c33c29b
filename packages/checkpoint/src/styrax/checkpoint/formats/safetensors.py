"""The safetensors format: one file, or a folder of shards with `model.safetensors.index.json`.

A file is the length of a header in 8 bytes, the header as JSON (name -> dtype, shape, begin and end), and the
arrays in C order, without gaps. Reading and writing are our own: the `safetensors` library (0.8) takes all arrays
of a file at once to write it, and its numpy side knows neither bfloat16 nor any float of 8 bits or fewer. What we
write is read by it, and the other way round.

The format has no checksums. Files of ours have one of each array and of the header in `__metadata__`, which others
pass over; they are compared when such a file is read.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.formats import bits, files
from styrax.checkpoint.formats.base import Array, loaded, problem_of_shape, read_into, reading, refuse
from styrax.checkpoint.formats.casting import dtype_named

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: The library's own limit, so that what it would refuse is refused here.
MOST_HEADER = 100_000_000
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
}
CODES = {name: code for code, name in DTYPES.items()}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_CRC = "styrax.crc32"
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")
_CURE = "Copy it again from where it came from, or have it written again"


def read(path: Path) -> dict[str, Array]:
    """Describe the arrays of a file, of an index with its shards, or of a folder with either.

    Returns:
        Name in the file -> array.

    Raises:
        CheckpointError: A header is damaged, or a shard or name is missing or there twice; all is listed.
    """
    if path.is_dir():
        index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None)
        return _read_index(index) if index else _read_folder(path)
    return _read_index(path) if path.name.endswith(".json") else _read_file(path)


def write(
    path: Path,
    arrays: Mapping[str, Array],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write a file, or where the path does not end in `.safetensors`, a folder as Hugging Face lays it out.

    Args:
        path: What to make.
        arrays: Name -> array; one at a time is loaded.
        metadata: Texts for the header; `{"format": "pt"}` by default, which other readers ask for.
        max_shard: Bytes from which a folder has several files, each of at least one array.
        overwrite: Replace what is there.
        progress: Called with the name and bytes of each array when it is written.

    Raises:
        CheckpointError: A dtype or name has no place in the format (all are listed), or it cannot be written.
    """
    problems = [f"{name!r}: {text}" for name, array in arrays.items() if (text := _unwritable(name, array))]
    refuse(path, problems, "Leave these out, cast them, or choose another format")
    texts = {"format": "pt", **(metadata or {})}
    report = progress or (lambda name, nbytes: None)
    if path.suffix == ".safetensors":
        with files.new_file(path, overwrite=overwrite) as handle:
            _write_file(handle, arrays, texts, report)
        return
    shards = _split(arrays, max_shard)
    with files.new_folder(path, overwrite=overwrite) as folder:
        places = {}
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            with files.new_file(folder / name) as handle:
                _write_file(handle, {key: arrays[key] for key in shard}, texts, report)
            places |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            total = sum(_stored(array) for array in arrays.values())
            record = {"metadata": {"total_size": total}, "weight_map": places}
            with files.new_file(folder / INDEX) as handle:
                handle.write(json.dumps(record, indent=2).encode())


def _read_file(path: Path) -> dict[str, Array]:
    size, raw = _raw_header(path)
    with reading(path, "the header"):
        header = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object. {_CURE}")
    texts = header.pop("__metadata__", {})
    problems: list[str] = []
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        problems.append("__metadata__: expected texts by name")
        texts = {}
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in header.items():
        problem, code, shape, begin, end = _entry(entry)
        if problem:
            problems.append(f"{name!r}: {problem}")
        else:
            found[name] = code, shape, begin, end
    start = 8 + len(raw)
    if not problems:
        problems = _gaps({name: (begin, end) for name, (_, _, begin, end) in found.items()}, size - start)
    refuse(path, problems, _CURE)
    crcs = _checksums(path, raw, texts.get(_CRC), list(header))
    return {
        name: _array(path, name, code, shape, start + begin, end - begin, crcs.get(name))
        for name, (code, shape, begin, end) in found.items()
    }


def _raw_header(path: Path) -> tuple[int, bytes]:
    """Give the size of the file and the bytes of the header, never more than the file has."""
    with reading(path, "the header"), path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path}: is cut short or no safetensors file: the header is to have {sized(length)}, the file has "
                f"{sized(size)}. {_CURE}"
            )
        if length > MOST_HEADER:
            raise CheckpointError(f"{path}: a header of {sized(length)}, at most {sized(MOST_HEADER)} may be. {_CURE}")
        return size, handle.read(length)


def _entry(entry: Any) -> tuple[str | None, str, tuple[int, ...], int, int]:
    """Take one entry of the header apart; the first is what is wrong with it."""
    nothing = ("", (), 0, 0)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "expected dtype, shape and data_offsets", *nothing
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        return f"dtype {str(code)[:40]!r} is none of {', '.join(DTYPES)}", *nothing
    problem = problem_of_shape(shape, dtype_named(DTYPES[code]))
    if problem:
        return problem, *nothing
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int or offset < 0 for offset in offsets)
    ):
        return f"data_offsets {str(offsets)[:60]} are not two integers, 0 or more", *nothing
    begin, end = offsets
    length = math.prod(shape) * _bits(code)
    if length % 8 or length // 8 != end - begin:
        return f"{code}{shape} takes {length / 8:g} bytes, its data_offsets {offsets} have {end - begin}", *nothing
    return None, code, tuple(shape), begin, end


def _gaps(places: Mapping[str, tuple[int, int]], size: int) -> list[str]:
    """Say where arrays overlap, leave bytes out, or end elsewhere than the file."""
    problems, last, at = [], "the header", 0
    for name, (begin, end) in sorted(places.items(), key=lambda pair: pair[1]):
        if begin != at:
            what = "overlaps" if begin < at else f"leaves {begin - at} bytes after"
            problems.append(f"{name!r}: {what} {last}: begins at {begin}, expected {at}")
        last, at = repr(name), max(at, end)
    if at != size:
        what = "is cut short" if at > size else "goes on after the last array"
        problems.append(f"the file {what}: {size} bytes after the header, expected {at}")
    return problems


def _array(
    path: Path, name: str, code: str, shape: tuple[int, ...], offset: int, length: int, crc: int | None
) -> Array:
    dtype = dtype_named(DTYPES[code])

    def checked(data: np.ndarray) -> None:
        if crc is not None and zlib.crc32(data.data) != crc:
            raise CheckpointError(f"{path}: {name!r} is damaged, its checksum does not fit. {_CURE}")
        if code == "BOOL" and data.size and data.max() > 1:
            raise CheckpointError(f"{path}: {name!r} has truth values other than 0 and 1, it is damaged. {_CURE}")

    def load() -> np.ndarray:
        data = np.empty(length, np.uint8)
        with reading(path, repr(name)), path.open("rb", buffering=0) as handle:
            handle.seek(offset)
            read_into(handle, data)
        checked(data)
        if code in _BITS:
            return bits.unpack(data, _BITS[code], math.prod(shape)).view(dtype).reshape(shape)
        return data.view(dtype).reshape(shape)

    def mapped() -> np.ndarray:
        with reading(path, repr(name)):
            data = np.asarray(np.memmap(path, np.uint8, "r", offset, (length,)))
        checked(data)
        return data.view(dtype).reshape(shape)

    # A view of the file may begin anywhere, an array of numbers only at a multiple of their size.
    whole = code not in _BITS and length > 0 and offset % dtype.itemsize == 0
    return Array(shape=shape, dtype=dtype, load=load, mapped=mapped if whole else None)


def _read_index(index: Path) -> dict[str, Array]:
    with reading(index, "the index"):
        record = json.loads(index.read_bytes(), object_pairs_hook=_unique)
    places = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index}: has no weight_map of file by name. {_CURE}")
    outside = sorted({file for file in places.values() if Path(file).name != file or file in ("", ".", "..")})
    refuse(index, [f"{file!r} is outside of its folder" for file in outside], "Shards lie beside their index")
    shards = sorted(set(places.values()))
    missing = [file for file in shards if not (index.parent / file).is_file()]
    refuse(index, [f"{file}: missing" for file in missing], "Copy the missing shards too")
    found, problems = {}, []
    for file in shards:
        arrays = _read_file(index.parent / file)
        for name, array in arrays.items():
            if places.get(name) == file:
                found[name] = array
            else:
                problems.append(f"{name!r}: in {file}, the index says {places.get(name, 'nothing of it')}")
        problems += [
            f"{name!r}: not in {file}, the index says it is"
            for name, place in places.items()
            if place == file and name not in arrays
        ]
    refuse(index, problems, "The shards are not those of this index: copy all from one place")
    return {name: found[name] for name in places}


def _read_folder(folder: Path) -> dict[str, Array]:
    shards = sorted(folder.glob("*.safetensors"))
    problems = []
    if not shards:
        raise CheckpointError(f"{folder}: no *.safetensors in it")
    for path in shards:
        part = _SHARD.fullmatch(path.name)
        if part:
            width = len(part[3])
            names = [
                f"{part[1]}-{n:0{width}}-of-{part[3]}.safetensors" for n in range(1, min(int(part[3]), 10_000) + 1)
            ]
            problems += [f"{name}: missing" for name in names if not (folder / name).is_file()]
            break
    found, places = {}, {}
    for path in shards:
        for name, array in _read_file(path).items():
            if name in found:
                problems.append(f"{name!r}: in {places[name]} and in {path.name}")
            found[name], places[name] = array, path.name
    refuse(folder, problems, f"Without a {INDEX} every array must be in one file of the folder, and no shard missing")
    return found


def _write_file(
    handle: IO[bytes], arrays: Mapping[str, Array], texts: Mapping[str, str], report: Callable[[str, int], None]
) -> None:
    # Wider numbers first, so that each array begins at a multiple of its own size.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {**texts, _CRC: "0" * 8 * (len(order) + 1)}}
    at = 0
    for name in order:
        array, length = arrays[name], _stored(arrays[name])
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + length],
        }
        at += length
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MOST_HEADER:
        raise CheckpointError(
            f"{len(order)} arrays make a header of {sized(len(raw))}; write a folder of smaller shards"
        )
    handle.write(len(raw).to_bytes(8, "little") + raw)
    crcs = [zlib.crc32(raw)]
    for name in order:
        data = loaded(name, arrays[name]).reshape(-1).view(np.uint8)
        code = CODES[arrays[name].dtype.name]
        if code in _BITS:
            data = bits.pack(data, _BITS[code])
        handle.write(data.data)
        crcs.append(zlib.crc32(data.data))
        report(name, arrays[name].nbytes)
        del data
    handle.seek(8 + _crc_at(raw))
    handle.write("".join(f"{crc:08x}" for crc in crcs).encode())


def _checksums(path: Path, raw: bytes, text: str | None, names: Sequence[str]) -> dict[str, int]:
    """Compare the header with its checksum, if it has one, and give those of the arrays."""
    if text is None:
        return {}
    at = _crc_at(raw)
    fits = (
        len(text) == 8 * (len(names) + 1)
        and re.fullmatch("[0-9a-f]*", text)
        and raw[at : at + len(text)] == text.encode()
    )
    if not fits or zlib.crc32(raw[:at] + b"0" * len(text) + raw[at + len(text) :]) != int(text[:8], 16):
        raise CheckpointError(f"{path}: the header is damaged, its checksum does not fit. {_CURE}")
    return {name: int(text[8 * n : 8 * n + 8], 16) for n, name in enumerate(names, 1)}


def _crc_at(raw: bytes) -> int:
    key = f'"{_CRC}":"'.encode()
    return raw.find(key) + len(key)


def _split(arrays: Mapping[str, Array], most: int) -> list[list[str]]:
    """Fill shards in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        if shards[-1] and size + _stored(array) > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _stored(array)
    return shards


def _unwritable(name: str, array: Array) -> str | None:
    code = CODES.get(array.dtype.name)
    if name == "__metadata__":
        return "this name has a meaning of its own in the format"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode text"
    if code is None:
        return f"safetensors has no dtype for {array.dtype.name}"
    if math.prod(array.shape) * _bits(code) % 8:
        return f"{code}{list(array.shape)} does not fill whole bytes"
    return None


def _bits(code: str) -> int:
    return _BITS.get(code, 8 * dtype_named(DTYPES[code]).itemsize)


def _stored(array: Array) -> int:
    return math.prod(array.shape) * _bits(CODES[array.dtype.name]) // 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{sorted({name for name in names if names.count(name) > 1})} there more than once")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
