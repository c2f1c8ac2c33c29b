"""The items of a save, copied: what is done before the caller may donate, change or delete its arrays."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import urllib.parse
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from styrax.checkpoint import structure
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import Item, Leaf, leaf_name
from styrax.core import tree

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
ALIGN = 64
# What TensorStore is known to hold; rarer ones (float6, uint4 ...) go into our own file, whatever their size.
_ORBAX_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|complex(64|128)|float8_(e4m3fn|e5m2)")


@dataclass(kw_only=True)
class Snapshot:
    """A copy of the items that nothing outside can change.

    Attributes:
        items: What will stand in the manifest; packed leaves have no checksum yet.
        arrays: Item -> name in Orbax -> array that Orbax writes.
        packed: The bytes of `aux/leaves.bin`.
        documents: Path -> text of each item that is plain JSON.
    """

    items: dict[str, Item] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    packed: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    documents: dict[str, bytes] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """Whether nothing is left to be copied from devices."""
        return all(isinstance(array, np.ndarray) for arrays in self.arrays.values() for array in arrays.values())

    def checksum(self) -> dict[str, Item]:
        """Give the items with a checksum for every packed leaf."""

        def with_crc(leaf: Leaf) -> Leaf:
            if leaf.where != "packed" or leaf.offset is None:
                return leaf
            data = self.packed[leaf.offset : leaf.offset + leaf.nbytes]
            return dataclasses.replace(leaf, crc32=zlib.crc32(data.data))

        return {
            name: dataclasses.replace(item, leaves=tuple(with_crc(leaf) for leaf in item.leaves))
            for name, item in self.items.items()
        }


def take(items: Mapping[str, Any], *, pack_below: int) -> Snapshot:
    """Copy the items.

    Args:
        items: Name -> tree of arrays and scalars, or plain JSON.
        pack_below: Arrays of fewer bytes that are wholly on this host go into one file, the others to Orbax.

    Raises:
        CheckpointError: Names, dictionary keys or leaves that cannot be saved; all are listed by path.
    """
    problems = [
        f"item {name!r}: a name is letters, digits, '_', '.', '-', and starts with none of '.-'"
        for name in items
        if not (isinstance(name, str) and NAME.fullmatch(name))
    ]
    snapshot, small, end = Snapshot(), [], 0
    for name, value in {} if problems else items.items():
        if is_json(value):
            file = f"aux/{name}.json"
            snapshot.items[name] = Item(kind="json", file=file)
            snapshot.documents[file] = json.dumps(value).encode()
            continue
        try:
            leaves, shape = tree.flatten(value), structure.describe(value)
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
            continue
        records = []
        for path, leaf in leaves.items():
            problem = _problem(leaf)
            if problem:
                problems.append(f"{leaf_name(name, path)}: {problem}")
                continue
            record, data = _record(path, leaf, pack_below, end)
            if record.where == "packed":
                small.append((record, data))
                end += -(-record.nbytes // ALIGN) * ALIGN
            elif record.where == "orbax":
                snapshot.arrays.setdefault(name, {})[orbax_name(path)] = data
            records.append(record)
        snapshot.items[name] = Item(kind="tree", leaves=tuple(records), structure=shape)
    if problems:
        raise CheckpointError("\n  ".join(["these cannot be saved:", *problems]))
    snapshot.packed = _pack(small, end)
    _copy(snapshot.arrays)
    return snapshot


def is_json(value: Any) -> bool:
    """Tell whether a value is plain JSON, so that text brings back the very same value.

    Example:
        >>> is_json({"a": [1, 2.5, None]}), is_json({"a": (1, 2)}), is_json({1: "a"})
        (True, False, False)
    """
    kind = type(value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_json, value.values()))
    if kind is list:
        return all(map(is_json, value))
    return value is None or kind in (str, int, float, bool)


def orbax_name(path: str) -> str:
    """Give the one flat name under which Orbax holds a leaf.

    Orbax joins keys by dots, so that `{"a.b": x}` and `{"a": {"b": y}}` would be one entry; here no dot or
    slash is left.

    Example:
        >>> orbax_name("a.b/c")
        'a%2Eb%2Fc'
    """
    return urllib.parse.quote(path, safe="", errors="surrogatepass").replace(".", "%2E") or "%"


def for_orbax(dtype: np.dtype) -> bool:
    """Tell whether Orbax is known to hold a dtype.

    Example:
        >>> for_orbax(np.dtype("float32")), for_orbax(np.dtype("complex256"))
        (True, False)
    """
    return _dtype(dtype)[1]


def inline(value: Any) -> Any:
    """Turn a Python scalar into what JSON holds exactly.

    Example:
        >>> inline(1 + 2j), inline(float("nan")), inline(3)
        ([1.0, 2.0], 'nan', 3)
    """
    if isinstance(value, complex):
        return [inline(value.real), inline(value.imag)]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _problem(leaf: Any) -> str | None:
    import jax
    from jax.core import Tracer

    if isinstance(leaf, Tracer):
        return "is being traced: call save outside of jit and grad"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "is abstract (a ShapeDtypeStruct), there are no values to save"
    if isinstance(leaf, jax.Array):
        return "was deleted or donated before save was called" if leaf.is_deleted() else None
    if isinstance(leaf, (np.ndarray, np.generic)):
        if not leaf.dtype.isnative:
            return f"has dtype {leaf.dtype.str} in foreign byte order; use .astype(dtype.newbyteorder('='))"
        if leaf.dtype.kind in "biufc" or (leaf.dtype.kind == "V" and leaf.dtype.names is None and _named(leaf)):
            return None
        return f"has dtype {leaf.dtype}, which is not a number or truth value"
    if type(leaf) in (bool, int, float, complex, str):
        return None
    return f"is {type(leaf).__name__}, not an array or a Python number, truth value or text"


def _named(leaf: Any) -> bool:
    # The extension dtypes (bfloat16, float8, int4 ...) are known to numpy by name, plain void is not.
    return leaf.dtype.name[:4] != "void"


def _record(path: str, leaf: Any, pack_below: int, end: int) -> tuple[Leaf, Any]:
    import jax
    import jax.numpy as jnp

    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        kind = type(leaf).__name__
        return Leaf(path=path, kind="python", dtype=kind, where="inline", value=inline(leaf)), None
    impl = None
    kind = "scalar" if isinstance(leaf, np.generic) else "array"
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind, impl = "key", str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    remote = kind != "scalar" and not isinstance(leaf, np.ndarray) and _remote(leaf)
    dtype, fits = _dtype(np.dtype(leaf.dtype))
    nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    large = nbytes >= max(pack_below, 1) and fits and kind != "scalar"
    where = "orbax" if large or (remote and nbytes) else "packed"
    offset = end if where == "packed" else None
    record = Leaf(
        path=path, kind=kind, shape=tuple(leaf.shape), dtype=dtype, where=where, nbytes=nbytes, impl=impl, offset=offset
    )
    return record, leaf


@functools.lru_cache(maxsize=256)
def _dtype(dtype: np.dtype) -> tuple[str, bool]:
    return dtype.name, _ORBAX_DTYPES.fullmatch(dtype.name) is not None


def _remote(array: Any) -> bool:
    return not (array.is_fully_addressable or array.is_fully_replicated)


def _pack(small: list[tuple[Leaf, Any]], end: int) -> np.ndarray:
    for _, data in small:
        if hasattr(data, "copy_to_host_async"):
            data.copy_to_host_async()
    packed = np.zeros(end, np.uint8)
    for leaf, data in small:
        if leaf.nbytes and leaf.offset is not None:
            host = np.ascontiguousarray(_host(data)).reshape(-1).view(np.uint8)
            packed[leaf.offset : leaf.offset + leaf.nbytes] = host
    return packed


def _host(data: Any) -> np.ndarray:
    if isinstance(data, (np.ndarray, np.generic)) or data.is_fully_addressable:
        return np.asarray(data)
    return np.asarray(data.addressable_data(0))


def _copy(items: dict[str, dict[str, Any]]) -> None:
    """Replace large arrays by copies, on the host where one device holds the whole of it.

    On a CPU, Orbax would read the array's own buffer while writing. That survives donation, but not a change
    of the numpy array that the `jax.Array` may share its memory with, and it makes donation copy. Shards on
    accelerators are left to Orbax, which copies them before `save` goes on.
    """
    import jax

    flat = [(arrays, path, array) for arrays in items.values() for path, array in arrays.items()]
    for _, _, array in flat:
        if _alone(array):
            array.copy_to_host_async()
    for arrays, path, array in flat:
        if isinstance(array, np.ndarray) or _alone(array):
            host = np.asarray(array)
            shared = isinstance(array, np.ndarray) or _on_cpu(array)
            arrays[path] = np.array(host, order="C") if shared else host
        elif array.is_fully_addressable and _on_cpu(array):
            arrays[path] = jax.device_put(array, array.sharding, may_alias=False)
    jax.block_until_ready(items)  # a copy still to be made would see a later change


def _alone(array: Any) -> bool:
    return not isinstance(array, np.ndarray) and array.is_fully_addressable and len(array.sharding.device_set) == 1


def _on_cpu(array: Any) -> bool:
    return all(device.platform == "cpu" for device in array.sharding.device_set)
