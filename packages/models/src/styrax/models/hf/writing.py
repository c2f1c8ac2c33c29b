"""Writing a Hugging Face folder: safetensors in shards, one tensor in memory at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core import UserError
from styrax.models.hf.mapped import problem_of_shape, refuse
from styrax.models.hf.tensors import DTYPES, INDEX, MOST_HEADER, SINGLE

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import DTypeLike

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PIECE = 2**28
#: Writes bytes at a place of a file.
Put = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class _New:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: str | PathLike[str],
    tensors: Iterable[tuple[str, Sequence[int], DTypeLike, Callable[[], Any]]],
    *,
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a folder as Hugging Face lays it out: `model.safetensors`, or shards with an index.

    Everything is written into a hidden folder beside it, brought to the disk, and renamed. A process that is killed
    leaves that hidden folder, never a folder under the name that is not whole. If it is killed in the instant in
    which a new folder takes the place of an old one, the old one is found beside it, as `.NAME-...-old`.

    Args:
        folder: What to make. An empty one may be there.
        tensors: Name, shape, dtype, and a function that makes the array, of numpy or JAX. The functions are called
            in this order, once each, and what one gives is let go before the next is called.
        shard_bytes: Tensors fill a file up to so many bytes; a larger tensor has a file of its own.
        metadata: Texts for the headers; none means `{"format": "pt"}`, which older readers ask for.
        files: Name -> content of what else belongs there: `config.json`, the tokenizer's files.
        overwrite: Put it in the place of a model's folder that is there, of which nothing stays.

    Raises:
        UserError: A name, shape or dtype has no place in the format (all are listed), a function gives another array
            than was announced, the folder is there, or it cannot be written. What was there is then untouched.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "model"
        >>> ones = [(f"layer.{n}", (2, 3), "float32", lambda: np.ones((2, 3), np.float32)) for n in range(3)]
        >>> write_tensors(folder, ones, shard_bytes=50, files={"config.json": b"{}"})
        >>> print(*sorted(path.name for path in folder.iterdir()), sep=" ")
        config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json
    """
    path = Path(os.path.realpath(folder))
    texts = {"format": "pt"} if metadata is None else dict(metadata)
    extra = dict(files or {})
    new, problems = _checked(tensors)
    shards = _split(new, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in _from_1(shards)]
    problems += [f"file {name!r}: {text}" for name in extra if (text := _problem_of_file(name, names))]
    if shard_bytes < 1:
        problems.append(f"shard_bytes: expected 1 or more, got {shard_bytes}")
    if not all(isinstance(text, str) for pair in texts.items() for text in pair):
        problems.append("metadata: expected texts by name")
    refuse(path, problems, "Leave these out, or change them")
    with _new_folder(path, overwrite) as temporary:
        for name, shard in zip(names, shards):
            with _new_file(temporary / name, path) as put:
                _write_file(put, shard, texts)
        if len(shards) > 1:
            places = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
            record = {"metadata": {"total_size": sum(tensor.nbytes for tensor in new)}, "weight_map": places}
            extra[INDEX] = (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()
        for name, content in extra.items():
            with _new_file(temporary / name, path) as put:
                put(0, memoryview(content))


def _from_1(shards: Sequence[Any]) -> range:
    return range(1, len(shards) + 1)


def _checked(
    tensors: Iterable[tuple[str, Sequence[int], DTypeLike, Callable[[], Any]]],
) -> tuple[list[_New], list[str]]:
    """Give what can be written, and what is wrong with the rest."""
    new, problems = [], []
    seen: set[str] = set()
    for name, shape, dtype, make in tensors:
        dtype = np.dtype(dtype).newbyteorder("=")
        problem = None
        if name in seen:
            problem = "there more than once"
        elif not isinstance(name, str) or name == "__metadata__":
            problem = "expected a text other than '__metadata__' as the name"
        elif dtype not in _CODES:
            problem = f"no dtype {dtype.name} in safetensors; there are {', '.join(d.name for d in _CODES)}"
        else:
            shape = [int(length) for length in shape]
            problem = problem_of_shape(shape, dtype.itemsize)
            try:
                name.encode()
            except UnicodeEncodeError:
                problem = "is no valid Unicode text"
        seen.add(name)
        if problem:
            problems.append(f"{name!r}: {problem}")
        else:
            new.append(_New(name, tuple(shape), dtype, make))
    return new, problems


def _problem_of_file(name: str, models: Sequence[str]) -> str | None:
    if name in (*models, INDEX):
        return "is written from the tensors"
    if name.endswith(".safetensors"):
        return "would be taken for weights of the model"
    if name in ("", ".", "..") or Path(name).name != name:
        return "expected a file name without folders"
    return None


def _split(tensors: Sequence[_New], most: int) -> list[list[_New]]:
    """Fill shards in order."""
    shards: list[list[_New]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_file(put: Put, tensors: Sequence[_New], texts: Mapping[str, str]) -> None:
    # Wider numbers first, so that each tensor begins at a multiple of its own size; they are made in the given order.
    header: dict[str, Any] = {"__metadata__": texts} if texts else {}
    begins, at = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        begins[tensor.name], end = at, at + tensor.nbytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MOST_HEADER:
        raise UserError(f"{len(tensors)} tensors make a header of {len(raw)} bytes; choose a smaller shard_bytes")
    put(0, memoryview(len(raw).to_bytes(8, "little") + raw))
    for tensor in tensors:
        put(8 + len(raw) + begins[tensor.name], _made(tensor))


def _made(tensor: _New) -> memoryview:
    """Make the array and give its bytes in C order."""
    data = np.asarray(tensor.make())
    if data.shape != tensor.shape or data.dtype.newbyteorder("=") != tensor.dtype:
        raise UserError(
            f"{tensor.name!r}: expected {tensor.dtype.name}{list(tensor.shape)} as announced, "
            f"got {data.dtype.name}{list(data.shape)}"
        )
    return np.ascontiguousarray(data, tensor.dtype).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _new_file(path: Path, folder: Path) -> Iterator[Put]:
    """Give a function that writes bytes at a place of a new file, which is synced at the end.

    Without a buffer, so that nothing is left to be written when it is closed. What is raised tells of `folder`.
    """
    with _explained(folder):
        handle = path.open("xb", buffering=0)

    def put(at: int, data: memoryview) -> None:
        with _explained(folder):
            handle.seek(at)
            while data:  # a system call may take less, and at most 2 GB
                data = data[handle.write(data[:_PIECE]) :]

    with handle:
        yield put
        with _explained(folder):
            os.fsync(handle.fileno())


@contextlib.contextmanager
def _new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Make a folder that gets its name when the block ends well, and is gone otherwise."""
    _refuse_existing(path, overwrite)
    token = secrets.token_hex(8)
    temporary, old = path.with_name(f".{path.name[:200]}-{token}"), path.with_name(f".{path.name[:200]}-{token}-old")
    try:
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
        yield temporary
        _refuse_existing(path, overwrite)
        with _explained(path):
            _sync_folder(temporary)
            if path.is_dir() and any(path.iterdir()):
                path.rename(old)
            temporary.replace(path)
            _sync_folder(path.parent)
    finally:
        if old.exists() and not path.exists():  # stopped between the two
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise if something would be lost that the caller did not mean."""
    with _explained(path):
        there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, expected the name of a folder; choose another name")
    if there and not overwrite:
        raise UserError(
            f"{path} is there already; choose another name, or say that it may be replaced (overwrite=True)"
        )
    if there and "config.json" not in there and not any(name.endswith(".safetensors") for name in there):
        raise UserError(
            f"{path} has neither config.json nor safetensors, so it is no model's folder, and is not replaced; "
            "choose another name, or remove it yourself"
        )


def _sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk, where the system has such a thing."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(path.parent).free:,} bytes free"
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}{free}); nothing of it is left, and what was there "
            "is untouched"
        ) from error
