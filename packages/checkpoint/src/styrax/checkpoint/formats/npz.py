"""The `.npz` format: a zip archive of `.npy` files, one an array, without pickles.

The `.npy` format has no dtype for bfloat16, float8 and the like. Such arrays are written as unsigned integers of
the same width, and the member `styrax.json` says what they are.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.formats import files
from styrax.checkpoint.formats.base import Array, loaded, problem_of_shape, read_into, reading, refuse
from styrax.checkpoint.formats.casting import dtype_named

_NOTE = "styrax.json"
_MOST_NOTE = 100_000_000
_MOST_INFLATION = 1100  # deflate cannot do better than 1032
_CURE = "Copy it again from where it came from, or have it written again"
_PLAIN = "biufc"


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Describe the arrays of an archive.

    Returns:
        Name -> array, and name -> why it is there but not given.

    Raises:
        CheckpointError: It is damaged, a name is there twice, or it claims more than it has.
    """
    with reading(path, "the archive", _CURE):
        archive = zipfile.ZipFile(path)  # stays open for the arrays: it takes a while to list thousands of members
        members = archive.infolist()
        counts = Counter(member.filename for member in members)
        problems = [f"{name!r}: there {count} times" for name, count in counts.items() if count > 1]
        size = path.stat().st_size
        problems += [f"{member.filename!r}: claims more than the file has" for member in members if _bomb(member, size)]
        refuse(path, problems, _CURE)
        dtypes = _note(archive) if _NOTE in counts else {}
        found, skipped = {}, {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if member.filename == _NOTE:
                continue
            if name == member.filename:
                archive.open(member).close()  # damaged names differ in the two places that a zip has them in
                skipped[name] = "is no .npy member"
                continue
            array, problem = _member(path, archive, member, dtypes.pop(name, None))
            if array is None:
                skipped[name] = problem
            else:
                found[name] = array
    refuse(path, [f"{name!r}: missing, {_NOTE} names it" for name in dtypes], _CURE)
    return found, skipped


def write(
    path: Path,
    arrays: Mapping[str, Array],
    *,
    overwrite: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write an archive without compression, one array in memory at a time.

    Args:
        path: The file to make.
        arrays: Name -> array.
        overwrite: Replace what is there.
        progress: Called with the name and bytes of each array when it is written.

    Raises:
        CheckpointError: A name cannot be that of a member (all are listed), or it cannot be written.
    """
    problems = [f"{name!r}: {text}" for name in arrays if (text := _unwritable(name))]
    refuse(path, problems, "Rename these, leave them out, or choose another format")
    dtypes = {name: array.dtype.name for name, array in arrays.items() if array.dtype.type.__module__ != "numpy"}
    with files.new_file(path, overwrite=overwrite) as handle, zipfile.ZipFile(handle, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            data = loaded(name, array)
            if name in dtypes:
                data = data.view(f"u{array.dtype.itemsize}")
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, data, allow_pickle=False)
            if progress:
                progress(name, array.nbytes)
            del data
        if dtypes:
            archive.writestr(zipfile.ZipInfo(_NOTE), json.dumps({"format": "styrax.npz", "dtypes": dtypes}))


def _member(
    path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, known: str | None
) -> tuple[Array | None, str]:
    with reading(path, repr(member.filename), _CURE), archive.open(member) as handle:
        shape, fortran, dtype = _header(handle)
        begin = handle.tell()
    if dtype.hasobject or dtype.kind not in _PLAIN:
        hint = ", perhaps bfloat16 without its name" if dtype.kind == "V" else ""
        return None, f"has dtype {dtype}{hint}, which is not a number or truth value"
    problem = problem_of_shape(shape, dtype)
    length = math.prod(shape) * dtype.itemsize
    if not problem and member.file_size != begin + length:
        problem = f"{member.file_size - begin} bytes of data, {dtype}{list(shape)} takes {length}"
    final = dtype.newbyteorder("=")
    if known is not None and not problem:
        try:
            final = dtype_named(known)
        except ValueError as error:
            problem = str(error)
        if final.itemsize != dtype.itemsize or dtype.kind != "u":
            problem = f"{dtype} cannot hold {known}"
    refuse(path, [f"{member.filename!r}: {problem}"] if problem else [], _CURE)

    def load() -> np.ndarray:
        with reading(path, repr(member.filename), _CURE):
            data = np.empty(length, np.uint8)
            with archive.open(member) as handle:
                if _header(handle) != (shape, fortran, dtype):
                    raise CheckpointError(f"{path}: {member.filename!r} has changed while it was read; read it again")
                read_into(handle, data)
                if handle.read(1):  # also lets zipfile compare the checksum
                    raise EOFError("there are more bytes than announced")
        if dtype.kind == "b" and data.size and data.max() > 1:
            raise CheckpointError(f"{path}: {member.filename!r} has truth values other than 0 and 1. {_CURE}")
        array = data.view(dtype)
        array = array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
        array = np.ascontiguousarray(array).reshape(shape)
        if known is not None:
            return array.astype(array.dtype.newbyteorder("="), copy=False).view(final)
        return array.astype(final, copy=False)

    return Array(shape=shape, dtype=final, load=load), ""


def _header(handle: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(handle)
    readers: dict[Any, Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f".npy version {version}, expected 1.0 or 2.0")
    return readers[version](handle)


def _note(archive: zipfile.ZipFile) -> dict[str, str]:
    member = archive.getinfo(_NOTE)
    if member.file_size > _MOST_NOTE:
        raise ValueError(f"{_NOTE} of {member.file_size} bytes")
    record = json.loads(archive.read(member))
    dtypes = record["dtypes"]
    if record["format"] != "styrax.npz" or not all(isinstance(name, str) for name in dtypes.values()):
        raise ValueError(f"{_NOTE} is not ours")
    return dict(dtypes)


def _bomb(member: zipfile.ZipInfo, size: int) -> bool:
    return member.compress_size > size or member.file_size > _MOST_INFLATION * (member.compress_size + 1)


def _unwritable(name: str) -> str | None:
    if f"{name}.npy" == _NOTE or "\0" in name or len(name.encode(errors="surrogatepass")) > 60_000:
        return "cannot be the name of a member"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode text"
    return None
