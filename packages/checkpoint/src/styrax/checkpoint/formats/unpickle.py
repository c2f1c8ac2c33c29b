"""The two pickles of a torch Distributed Checkpoint, read without running anything that they say.

A pickle is a program that may call any function. Here every name but those that torch writes in these two places is
refused, and those stand for plain records that do nothing. Before that the pickle is looked through: only the
operations that torch uses may be in it, and none may ask for more memory than the pickle is long.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
#: torch's name of a dtype -> numpy's.
DTYPES = {
    **{name: name for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")},
    **{name: name for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")},
    **{name: name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")},
    "float8_e8m0fnu": "float8_e8m0fnu",
}
#: Named in a pickle, without one in numpy: what has it is passed over with a reason.
_OTHER_DTYPES = {"complex32", "float4_e2m1fn_x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"}
_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
# fmt: off
_OPERATIONS = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
    "BINPERSID",
))
# fmt: on


class Refused(Exception):
    """A pickle has something that torch does not write there."""


class Record:
    """Stands for an object of torch: the arguments it was made with, and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Give a field, or `None`."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    @property
    def kind(self) -> str:
        """Name of torch's class."""
        return type(self).__name__


def load_metadata(data: bytes) -> Any:
    """Read the pickle `.metadata`.

    Raises:
        Refused: It names or does anything that torch does not put there.
        Exception: Whatever pickle raises over a damaged one.
    """
    known: dict[tuple[str, str], Any] = {(module, name): type(name, (Record,), {}) for module, name in _RECORDS}
    known |= dict.fromkeys(_PATHS, _path)
    known["torch", "Size"] = tuple
    known["torch.serialization", "_get_layout"] = _layout
    return _load(data, known, None)


def load_tensor(data: bytes) -> Record:
    """Read the pickle `data.pkl` of a tensor that torch.save wrote.

    Returns:
        A record `Tensor` with `args`: storage (a record `Storage` of dtype name or `None` for bytes, key and count),
        offset, size, strides in elements, dtype name.
    """
    known: dict[tuple[str, str], Any] = {("torch", name): dtype for name, dtype in _STORAGES.items()}
    known["torch.storage", "UntypedStorage"] = None
    known["torch._utils", "_rebuild_tensor_v2"] = _tensor_2
    known["torch._utils", "_rebuild_tensor_v3"] = _tensor_3
    known["torch._utils", "_rebuild_parameter"] = lambda tensor, *rest: tensor
    found = _load(data, known, _storage)
    if not isinstance(found, _Tensor):
        raise Refused(f"holds {type(found).__name__}, expected a tensor")
    return found


class _Tensor(Record):
    pass


class _Storage(Record):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: dict[tuple[str, str], Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and (name in DTYPES or name in _OTHER_DTYPES):
            return name
        try:
            return self._known[module, name]
        except KeyError:
            raise Refused(
                f"names {module}.{name}, which torch does not put there and which might do anything"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise Refused("refers to data outside of it")
        return self._persistent(pid)


def _load(data: bytes, known: dict[tuple[str, str], Any], persistent: Callable[[Any], Any] | None) -> Any:
    for operation, argument, _ in pickletools.genops(data):
        if operation.name not in _OPERATIONS:
            raise Refused(f"has the operation {operation.name}, which torch does not use there")
        if operation.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise Refused(f"asks for {argument} entries of memory")
    return _Unpickler(data, known, persistent).load()


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _layout(name: Any) -> str:
    return str(name)


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, _, count = pid
    if kind != "storage" or not isinstance(key, str) or type(count) is not int:
        raise Refused("refers to something that is no storage")
    return _Storage(dtype, key, count)


def _tensor_2(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Tensor:
    return _tensor(storage, offset, size, stride, storage.args[0])


def _tensor_3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> _Tensor:
    return _tensor(storage, offset, size, stride, dtype)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> _Tensor:
    numbers = (offset, *size, *stride)
    if not isinstance(storage, _Storage) or any(type(number) is not int or number < 0 for number in numbers):
        raise Refused("describes no tensor")
    return _Tensor(storage, offset, tuple(size), tuple(stride), dtype)
