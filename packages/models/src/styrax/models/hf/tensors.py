"""Reading the weights of a Hugging Face folder: safetensors, mapped into memory, each tensor in its own dtype.

A file is the length of a header in 8 bytes, the header as JSON (name -> dtype, shape, begin and end), and the
tensors in C order, without gaps. A folder has `model.safetensors`, or shards and an index that says which tensor
is in which.

Source: https://huggingface.co/docs/safetensors ("Format").
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from styrax.core import UserError
from styrax.models.hf.mapped import COPY_AGAIN, MappedFile, problem_of_shape, refuse

if TYPE_CHECKING:
    from os import PathLike

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: The library's own limit, so that what it would refuse is refused here.
MOST_HEADER = 100_000_000
DTYPES = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "U16": np.dtype("uint16"),
    "I16": np.dtype("int16"),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "C64": np.dtype("complex64"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_BELOW_A_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Tensor:
    """One tensor of a file, not read yet.

    Attributes:
        name: In the file.
        shape: Its shape.
        dtype: Its own dtype, of numpy or `ml_dtypes`; others in the file may have another.
        path: Of the file it is in.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, file: MappedFile, begin: int) -> None:
        self.name, self.shape, self.dtype, self.path = name, shape, dtype, file.path
        self._file, self._begin = file, begin

    @property
    def nbytes(self) -> int:
        """Bytes in the file and in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: Any = ...) -> np.ndarray:
        """Give the tensor, or a part of it, as a read-only view of the file: pages are read when they are touched.

        A tensor that does not begin at a multiple of its element's size, which some writers leave so, is copied,
        only the part that is asked for.

        Args:
            index: What numpy takes between brackets; slices and integers give views.

        Returns:
            In the tensor's dtype. It stays good after the file is closed.

        Raises:
            UserError: The file is closed or was cut, or a truth value is neither 0 nor 1.
        """
        data = self._file.array(self._begin, self.nbytes)
        if self.dtype == bool and (data.reshape(self.shape)[index] > 1).any():
            raise UserError(
                f"{self.path}: {self.name!r} has truth values other than 0 and 1, it is damaged. {COPY_AGAIN}"
            )
        part = data.view(self.dtype).reshape(self.shape)[index]
        if isinstance(part, np.ndarray) and part.flags.aligned:
            return part
        return np.array(part)

    def drop(self) -> None:
        """Give the memory of what was read back to the system; call it once a tensor is where it belongs.

        Arrays from `read` stay good: what is touched again is read again.
        """
        self._file.drop(self._begin, self.nbytes)

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype.name}{list(self.shape)}, {self.path.name})"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, in the order of the index or file. Close it, or use it in a `with` block.

    Attributes:
        folder: Where they are.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], files: contextlib.ExitStack) -> None:
        self.folder = folder
        self._tensors, self._files = dict(tensors), files

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tensors(folder: str | PathLike[str]) -> Tensors:
    """Open the weights of a Hugging Face folder, without reading them.

    Args:
        folder: With `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Returns:
        Name -> tensor. Each file is opened once and mapped, until the result is closed.

    Raises:
        UserError: There are no safetensors, a header is damaged, or the shards are not those of the index; all
            problems of one kind are listed at once.

    Example:
        >>> import tempfile
        >>> from styrax.models.hf import write_tensors
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> write_tensors(folder, [("norm.weight", (3,), "bfloat16", lambda: np.ones(3, ml_dtypes.bfloat16))])
        >>> with open_tensors(folder) as tensors:
        ...     print(tensors["norm.weight"], tensors["norm.weight"].read((slice(1, 3),)))
        Tensor('norm.weight', bfloat16[3], model.safetensors) [1 1]
    """
    folder = Path(folder)
    places = _places(folder)
    with contextlib.ExitStack() as files:
        if places is None:
            found = _open(folder / SINGLE, files)
        else:
            shards = {name: _open(folder / name, files) for name in sorted(set(places.values()))}
            refuse(
                folder / INDEX,
                _misplaced(places, shards),
                "The shards are not those of this index: copy all files again from one place",
            )
            found = {name: shards[shard][name] for name, shard in places.items()}
        return Tensors(folder, found, files.pop_all())


def _places(folder: Path) -> dict[str, str] | None:
    """Give tensor -> shard, or `None` if there is one file and no index; neither is an error."""
    if not _there(folder.is_dir):
        what = "is a file" if _there(folder.is_file) else "is not there, or may not be read"
        raise UserError(f"{folder}: {what}, expected a folder with {SINGLE}, or with {INDEX} and its shards")
    single, index = folder / SINGLE, folder / INDEX
    if not _there(index.is_file):
        if not _there(single.is_file):
            raise UserError(_nothing_to_read(folder))
        return None
    try:
        record = _json(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{index}: cannot be read ({_short(error)}). {COPY_AGAIN}") from error
    places = record.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UserError(f"{index}: has no weight_map with a file for each name. {COPY_AGAIN}")
    shards = sorted(set(places.values()))
    outside = [shard for shard in shards if Path(shard).name != shard or shard == ".."]
    refuse(index, [f"{shard!r}: is outside of the folder" for shard in outside], "Shards lie beside their index")
    missing = {shard for shard in shards if not _there((folder / shard).is_file)}
    refuse(index, [_missing(shard, places) for shard in sorted(missing)], "Copy the missing shards too")
    if _there(single.is_file) and SINGLE not in shards:
        raise UserError(
            f"{folder}: has {SINGLE} and {INDEX}, which tells of {', '.join(shards[:3])}{', ...' * (len(shards) > 3)}. "
            f"They may be of two models: remove one"
        )
    return places


def _there(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # no right to look, or a name that is too long
        return False


def _missing(shard: str, places: Mapping[str, str]) -> str:
    names = [repr(name) for name, place in places.items() if place == shard]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shard}: missing, with {', '.join(names[:3])}{rest}"


def _nothing_to_read(folder: Path) -> str:
    """Say what to do with a folder that has neither of the two."""
    expected = f"{folder}: expected {SINGLE}, or {INDEX} and its shards"
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{expected}; got {', '.join(shards[:5])} without an index. Copy {INDEX} too, or rename a single file"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{expected}; got {', '.join(pickles[:5])}. These are pickles, which can run any code when they are "
            "loaded, and are not read here. If you trust them, convert them where torch is installed: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"{expected}; got {', '.join(ggufs[:5])}, which styrax.models.hf.open_gguf opens"
    return f"{expected}; got neither. Is it the right folder?"


def _misplaced(places: Mapping[str, str], shards: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    problems = [
        f"{name!r}: not in {shard}, the index says it is" for name, shard in places.items() if name not in shards[shard]
    ]
    for shard, tensors in shards.items():
        problems += [
            f"{name!r}: in {shard}, the index says {places.get(name, 'nothing of it')}"
            for name in tensors
            if places.get(name) != shard
        ]
    return problems


def _open(path: Path, files: contextlib.ExitStack) -> dict[str, Tensor]:
    """Map a file and take its header apart."""
    file = files.enter_context(contextlib.closing(MappedFile(path)))
    length = int.from_bytes(file.bytes(0, 8), "little")
    if file.size < 8 or length > file.size - 8:
        raise UserError(
            f"{path}: is cut short or no safetensors file: expected a header of {length} bytes, the file has "
            f"{file.size}. {COPY_AGAIN}"
        )
    if length > MOST_HEADER:
        raise UserError(f"{path}: has a header of {length} bytes, at most {MOST_HEADER} may be. {COPY_AGAIN}")
    try:
        header = _json(file.bytes(8, 8 + length))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: the header cannot be read ({_short(error)}). {COPY_AGAIN}") from error
    texts = header.pop("__metadata__", {})
    problems = []
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        problems.append("__metadata__: expected texts by name")
    problems += [f"{name!r}: {problem}" for name, entry in header.items() if (problem := _problem(entry))]
    start = 8 + length
    if not problems:
        problems = _gaps({name: entry["data_offsets"] for name, entry in header.items()}, file.size - start)
    refuse(path, problems, COPY_AGAIN)
    return {
        name: Tensor(name, tuple(entry["shape"]), DTYPES[entry["dtype"]], file, start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _problem(entry: Any) -> str | None:
    """Say what is wrong with one entry of a header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "expected dtype, shape and data_offsets"
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if isinstance(code, str) and code in _BELOW_A_BYTE:
        return f"dtype {code} has less than a byte for an element, which is not read here; convert it to another"
    if not isinstance(code, str) or code not in DTYPES:
        return f"dtype {str(code)[:40]!r} is none of {', '.join(DTYPES)}"
    itemsize = DTYPES[code].itemsize
    if problem := problem_of_shape(shape, itemsize):
        return problem
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(at) is not int or at < 0 for at in offsets):
        return f"data_offsets {str(offsets)[:60]} are not two integers, 0 or more"
    if math.prod(shape) * itemsize != offsets[1] - offsets[0]:
        return f"{code}{shape} takes {math.prod(shape) * itemsize} bytes, its data_offsets are {str(offsets)[:60]}"
    return None


def _gaps(places: Mapping[str, list[int]], size: int) -> list[str]:
    """Say where tensors overlap, leave bytes out, or end elsewhere than the file."""
    problems, last, at = [], "the header", 0
    for name, (begin, end) in sorted(places.items(), key=lambda place: place[1]):
        if begin != at:
            what = "overlaps" if begin < at else f"leaves {begin - at} bytes after"
            problems.append(f"{name!r}: {what} {last}: begins at {begin}, expected {at}")
        if end > size:
            problems.append(f"{name!r}: ends at {end}, the file has {size} bytes after the header: it is cut short")
        last, at = repr(name), max(at, end)
    if at < size:
        problems.append(f"goes on after the last tensor: {size} bytes after the header, expected {at}")
    return problems


def _json(raw: bytes) -> dict[str, Any]:
    """Parse JSON as the format wants it: an object, UTF-8, each key once, no NaN.

    Raises:
        ValueError: It is not so.
        RecursionError: It is nested too deeply.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})
            raise ValueError(f"{', '.join(map(repr, twice[:3]))} there more than once")
        return found

    def no_constant(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    if not raw.startswith(b"{"):
        raise ValueError(f"expected {{ at its beginning, got {raw[:10]!r}")
    return json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_constant=no_constant)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
