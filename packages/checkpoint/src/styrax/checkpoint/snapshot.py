"""The items of a save, copied: what is done before the caller may donate, change or delete its arrays."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from styrax.checkpoint import digest, structure
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.items import is_iterator, is_json, position_of, state_of
from styrax.checkpoint.manifest import ARRAYS, COMPRESSED, Item, Leaf, Shard, leaf_name
from styrax.checkpoint.naming import orbax_name
from styrax.core import tree

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
ALIGN = 64
# What TensorStore is known to hold; rarer ones (float6, uint4 ...) go into our own file, whatever their size.
_ORBAX_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|complex(64|128)|float8_(e4m3fn|e5m2)")

Part = tuple[tuple[int, ...], tuple[int, ...], np.ndarray]


@dataclass(kw_only=True)
class Snapshot:
    """A copy of the items that nothing outside can change.

    Attributes:
        items: What will stand in the manifest, without digests.
        arrays: Folder of an Orbax checkpoint -> item -> name in Orbax -> array that Orbax writes.
        parts: Item and path of those -> what this process holds of them: start, stop and data.
        packed: The bytes of `aux/leaves.bin`.
        documents: Path -> text of each item that is plain JSON.
        positions: Item -> where this process's iterator is, as JSON.
    """

    items: dict[str, Item] = field(default_factory=dict)
    arrays: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    parts: dict[tuple[str, str], list[Part]] = field(default_factory=dict)
    packed: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    documents: dict[str, bytes] = field(default_factory=dict)
    positions: dict[str, str] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """Whether nothing is left to be copied from devices."""
        return all(
            isinstance(array, np.ndarray)
            for items in self.arrays.values()
            for arrays in items.values()
            for array in arrays.values()
        )

    def digests(self) -> dict[tuple[str, str], list[Shard]]:
        """Give the digest of every part that this process holds, by item and path."""
        return {
            key: [Shard(start=start, stop=stop, digest=digest.of(data)) for start, stop, data in parts]
            for key, parts in self.parts.items()
        }

    def recorded(self, shards: Mapping[tuple[str, str], Collection[Shard]]) -> dict[str, Item]:
        """Give the items with their digests.

        Args:
            shards: From `digests`, of all processes.
        """

        def record(name: str, leaf: Leaf) -> Leaf:
            if leaf.where == "packed" and leaf.offset is not None:
                return dataclasses.replace(leaf, digest=digest.of(self.packed[leaf.offset :][: leaf.nbytes]))
            found = sorted(shards.get((name, leaf.path), ()), key=lambda shard: shard.start)
            if len(found) == 1 and found[0].stop == leaf.shape and not any(found[0].start):
                return dataclasses.replace(leaf, digest=found[0].digest)
            return dataclasses.replace(leaf, shards=tuple(found))

        return {
            name: dataclasses.replace(item, leaves=tuple(record(name, leaf) for leaf in item.leaves))
            for name, item in self.items.items()
        }


def take(
    items: Mapping[str, Any], *, pack_below: int, compress: Collection[str] = (), borrow: bool = False
) -> Snapshot:
    """Copy the items.

    Args:
        items: Name -> tree of arrays and scalars, `nnx` module, iterator, or plain JSON.
        pack_below: Arrays of fewer bytes that are wholly on this host go into one file, the others to Orbax.
        compress: Items whose large arrays are to be compressed.
        borrow: Do not copy numpy arrays, because the caller waits.

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
        file = f"aux/{name}.json"
        try:
            if is_json(value):
                snapshot.items[name] = Item(kind="json", file=file)
                snapshot.documents[file] = json.dumps(value).encode()
                continue
            if is_iterator(value):
                snapshot.items[name] = Item(kind="iterator", file=file)
                snapshot.positions[name] = json.dumps(position_of(value))
                continue
            value = state_of(value)
            leaves, shape = tree.flatten(value), structure.describe(value)
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
            continue
        records, folder = [], COMPRESSED if name in compress else ARRAYS
        for path, leaf in leaves.items():
            problem = _problem(leaf)
            if problem:
                problems.append(f"{leaf_name(name, path)}: {problem}")
                continue
            record, data = _record(path, leaf, pack_below, end, folder)
            if record.where == "packed":
                small.append((record, data))
                end += -(-record.nbytes // ALIGN) * ALIGN
            elif record.in_orbax:
                snapshot.arrays.setdefault(folder, {}).setdefault(name, {})[orbax_name(path)] = data
            records.append(record)
        snapshot.items[name] = Item(kind="tree", leaves=tuple(records), structure=shape)
    if problems:
        raise CheckpointError("\n  ".join(["these cannot be saved:", *problems]))
    snapshot.packed = _pack(small, end)
    _hold(snapshot, borrow)
    return snapshot


def for_orbax(dtype: np.dtype) -> bool:
    """Tell whether Orbax is known to hold a dtype.

    Example:
        >>> for_orbax(np.dtype("float32")), for_orbax(np.dtype("complex256"))
        (True, False)
    """
    return _dtype(dtype)[1]


def inline(value: Any) -> Any:
    """Turn a Python scalar, text or bytes into what JSON holds exactly.

    Example:
        >>> inline(1 + 2j), inline(float("nan")), inline(3)
        ([1.0, 2.0], 'nan', 3)
    """
    if isinstance(value, complex):
        return [inline(value.real), inline(value.imag)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
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
    if type(leaf) in (bool, int, float, complex, str, bytes):
        return None
    return f"is {type(leaf).__name__}, not an array or a Python number, truth value, text or bytes"


def _named(leaf: Any) -> bool:
    # The extension dtypes (bfloat16, float8, int4 ...) are known to numpy by name, plain void is not.
    return leaf.dtype.name[:4] != "void"


def _record(path: str, leaf: Any, pack_below: int, end: int, folder: Any) -> tuple[Leaf, Any]:
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
    where = folder if large or (remote and nbytes) else "packed"
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
    import jax

    arrays = [data for _, data in small if isinstance(data, jax.Array)]  # without any, no device is asked for
    if arrays and jax.default_backend() != "cpu":
        for data in arrays:
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


def _hold(snapshot: Snapshot, borrow: bool) -> None:
    """Replace large arrays by what no one can change, delete or donate, and note the parts that are here.

    On a CPU that costs nothing: a numpy view keeps the buffer of a `jax.Array` alive, whatever becomes of the
    array. What is on accelerators is copied to the host; what is numpy's own is copied unless `borrow`.
    """
    import jax

    flat = [
        (snapshot.arrays[leaf.where][name], orbax_name(leaf.path), (name, leaf.path))
        for name, item in snapshot.items.items()
        for leaf in item.leaves
        if leaf.in_orbax
    ]
    for arrays, entry, _ in flat:
        if not isinstance(arrays[entry], np.ndarray):
            for shard in _own(arrays[entry]):
                shard.data.copy_to_host_async()
    for arrays, entry, key in flat:
        array = arrays[entry]
        if isinstance(array, np.ndarray):
            arrays[entry] = np.asarray(array, order="C") if borrow else np.array(array, order="C")
            snapshot.parts[key] = [((0,) * array.ndim, array.shape, arrays[entry])]
            continue
        own = _own(array)
        snapshot.parts[key] = [(*_box(shard.index, array.shape), np.asarray(shard.data)) for shard in own]
        if len(array.sharding.device_set) == 1:
            arrays[entry] = snapshot.parts[key][0][2]
        elif all(device.platform == "cpu" for device in array.sharding.device_set):
            # Orbax is given an array of its own on the same buffers, for the caller may delete this one.
            arrays[entry] = jax.make_array_from_single_device_arrays(
                array.shape,
                array.sharding,
                [jax.device_put(np.asarray(shard.data), shard.device) for shard in array.addressable_shards],
            )


def _own(array: Any) -> list[Any]:
    """Give the shards that this process has to write: one of each part."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bounds = [part.indices(size) for part, size in zip(index, shape)]
    return tuple(start for start, _, _ in bounds), tuple(stop for _, stop, _ in bounds)
