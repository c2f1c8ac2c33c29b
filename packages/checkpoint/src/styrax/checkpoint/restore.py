"""Reading what a plan says, with every leaf's bytes compared with their digest."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from styrax.checkpoint import digest, raw, structure
from styrax.checkpoint.errors import Damaged
from styrax.checkpoint.items import is_iterator, is_module, mine, state_of, with_state
from styrax.checkpoint.manifest import LEAVES, Leaf, leaf_name
from styrax.checkpoint.naming import orbax_name
from styrax.checkpoint.plan import Entry, Plan, Wanted
from styrax.checkpoint.policy import convert


def read(checkpoint: Path, plan: Plan, *, timeout: int, verify: bool, index: int = 0, count: int = 1) -> dict[str, Any]:
    """Read what a plan says; nothing that was handed over is changed.

    Args:
        checkpoint: The folder of the step.
        plan: From `plan`.
        timeout: Seconds for Orbax's waits.
        verify: Compare the arrays that Orbax read with their digests, as far as they are on this host.
        index: Number of this process, for the position of an iterator.
        count: How many processes there are.

    Returns:
        Item -> value; of an iterator, what its `set_state` takes; of a module, the tree of its variables.

    Raises:
        Damaged: Bytes are not those that were saved.
    """
    import jax

    wanted = plan.leaves()
    straight = _straight(plan)
    found: dict[tuple[str, str], Any] = dict(raw.read(checkpoint, straight, verify=verify)) if straight else {}
    done = set(found)
    engine = {
        name: [(leaf, want) for leaf, want in leaves if leaf.in_orbax and (name, leaf.path) not in done]
        for name, leaves in wanted.items()
    }
    for folder in sorted({leaf.where for leaves in engine.values() for leaf, _ in leaves}):
        from styrax.checkpoint import arrays

        likes = {
            name: {orbax_name(leaf.path): _for_orbax(leaf, want) for leaf, want in leaves if leaf.where == folder}
            for name, leaves in engine.items()
        }
        got = arrays.read(checkpoint / folder, {name: each for name, each in likes.items() if each}, timeout=timeout)
        for name, leaves in engine.items():
            found |= {
                (name, leaf.path): got[name].pop(orbax_name(leaf.path)) for leaf, _ in leaves if leaf.where == folder
            }
    if verify:
        bad = [
            leaf_name(name, leaf.path)
            for name, leaves in engine.items()
            for leaf, _ in leaves
            if not right(leaf, found[name, leaf.path])
        ]
        if bad:
            raise Damaged(f"these leaves are not what was saved: {', '.join(bad)}")
    result = {}
    for name, value in plan.like.items():
        if name not in plan.trees:
            item = plan.manifest.items[name]
            text = (checkpoint / str(item.file)).read_bytes()
            result[name] = mine(text, index=index, count=count) if item.kind == "iterator" else json.loads(text)
            continue
        found |= {(name, path): data for path, data in _packed(checkpoint, name, wanted[name]).items()}
        entries = [
            (entry, None if entry.leaf is None else found.pop((name, entry.leaf.path), None))
            for entry in plan.trees[name]
        ]
        values = _place(entries)
        if value is None:
            gone = {number for number, entry in enumerate(plan.trees[name]) if entry.leaf is None}
            result[name] = structure.rebuild(plan.manifest.items[name].structure, values, without=gone)
        elif is_iterator(value):
            result[name] = value.get_state()  # it is not in the checkpoint and stays where it is
        else:
            result[name] = jax.tree.unflatten(jax.tree.structure(state_of(value)), values)
    return result


def settle(result: dict[str, Any], like: Mapping[str, Any], *, in_place: bool) -> dict[str, Any]:
    """Put positions into iterators and variables into modules, when everything has been read.

    Args:
        result: From `read`.
        like: What was asked for.
        in_place: Change the modules of `like` themselves.
    """
    for name, value in like.items():
        if is_iterator(value):
            value.set_state(result[name])
            result[name] = value
    for name, value in like.items():
        if is_module(value):
            result[name] = with_state(value, result[name], in_place=in_place)
    return result


def _straight(plan: Plan) -> dict[tuple[str, Leaf], str]:
    """Choose the arrays that are read without Orbax: whole ones that stay on this host."""
    found = {}
    for name, leaves in plan.leaves().items():
        for leaf, want in leaves:
            file = raw.readable(plan.manifest, name, leaf) if leaf.in_orbax and _here(want) else None
            if file is not None:
                found[name, leaf] = file
    return found


def _here(want: Wanted) -> bool:
    if want.form != "jax":
        return True
    devices = (want.sharding or default_sharding()).device_set
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def digests_suffice(plan: Plan) -> bool:
    """Tell whether every array that Orbax will read can be compared with its digest where it comes to lie."""
    return all(_checkable(leaf, want) for leaves in plan.leaves().values() for leaf, want in leaves if leaf.in_orbax)


def _checkable(leaf: Leaf, want: Wanted) -> bool:
    if want.form != "jax":
        return bool(leaf.digest or leaf.shards)
    sharding = want.sharding or default_sharding()
    if not all(device.platform == "cpu" for device in sharding.device_set):
        return False
    boxes = {_box(index, leaf.shape) for index in sharding.addressable_devices_indices_map(leaf.shape).values()}
    return boxes <= _saved(leaf).keys()


def _saved(leaf: Leaf) -> dict[Any, str]:
    """Give the parts whose digests are known."""
    found = {(shard.start, shard.stop): shard.digest for shard in leaf.shards}
    if leaf.digest:
        found[(0,) * len(leaf.shape), leaf.shape] = leaf.digest
    return found


def right(leaf: Leaf, data: Any) -> bool:
    """Compare what is on this host with its digests, as far as parts are alike."""
    saved = _saved(leaf)
    if isinstance(data, np.ndarray):
        return all(
            digest.of(data[tuple(slice(*bounds) for bounds in zip(start, stop))]) == text
            for (start, stop), text in saved.items()
        )
    for shard in data.addressable_shards:
        text = saved.get(_box(shard.index, leaf.shape))
        on_cpu = shard.device.platform == "cpu"
        if text is not None and on_cpu and shard.replica_id == 0 and digest.of(np.asarray(shard.data)) != text:
            return False
    return True


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bounds = [part.indices(size) for part, size in zip(index, shape)]
    return tuple(start for start, _, _ in bounds), tuple(stop for _, stop, _ in bounds)


def _for_orbax(leaf: Leaf, want: Wanted) -> Any:
    import jax

    from styrax.checkpoint import arrays

    dtype = np.dtype(leaf.dtype)
    if want.form == "jax" and jax.dtypes.canonicalize_dtype(dtype) == dtype:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=want.sharding or default_sharding())
    return arrays.numpy_like(leaf.shape, dtype)  # also what jax would cast: it is cast by us, if at all


def _packed(checkpoint: Path, name: str, leaves: Collection[tuple[Leaf, Wanted]]) -> dict[str, Any]:
    """Read the small arrays of an item: most of them at once, or a few one by one."""
    packed = [(leaf, want) for leaf, want in leaves if leaf.where == "packed"]
    full = [leaf for leaf, _ in packed if leaf.nbytes]
    found, bad = {}, []
    file = checkpoint / LEAVES
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(file.open("rb", buffering=0)) if full else None
        begin = min((leaf.offset or 0 for leaf in full), default=0)
        end = max(((leaf.offset or 0) + leaf.nbytes for leaf in full), default=0)
        together = None
        if handle is not None and 2 * sum(leaf.nbytes for leaf in full) > end - begin:
            together = raw.memory(end - begin)  # offsets are aligned in the file, so they are here
            handle.seek(begin)
            if _fill(handle, together) < end - begin:
                raise Damaged(f"{file} is shorter than it was")
        for leaf, want in packed:
            at = (leaf.offset or 0) - begin
            if together is None:
                data = raw.memory(leaf.nbytes)
                if handle is not None and leaf.nbytes:
                    handle.seek(leaf.offset or 0)
                    _fill(handle, data)
            else:
                data = together[at : at + leaf.nbytes] if leaf.nbytes else raw.memory(0)
            if leaf.nbytes and digest.of(data.data) != leaf.digest:
                bad.append(leaf_name(name, leaf.path))
            if together is not None and want.form != "jax":
                data = data.copy()  # whoever keeps one array does not keep all
            found[leaf.path] = data.view(_dtype(leaf.dtype)).reshape(leaf.shape)
    if bad:
        raise Damaged(f"{file} is damaged, these leaves are not what was saved: {', '.join(bad)}")
    return found


def _fill(handle: Any, data: np.ndarray) -> int:
    at = 0
    while at < data.nbytes and (count := handle.readinto(data.data[at:])):
        at += count
    return at


@functools.lru_cache(maxsize=256)
def _dtype(name: str) -> np.dtype:
    return np.dtype(name)


def _place(leaves: list[tuple[Entry, Any]]) -> list[Any]:
    """Turn what was read into what was asked for; all that goes to this host's devices in one transfer."""
    import jax

    default = None
    values, placed = [], {}
    for number, (entry, data) in enumerate(leaves):
        leaf, want = entry.leaf, entry.want
        if leaf is None:
            values.append(entry.value)
            continue
        if leaf.kind == "python":
            values.append(_scalar(leaf))
            continue
        assert isinstance(data, (jax.Array, np.ndarray)), f"{leaf.path}: nothing was read"
        right = data.shape == leaf.shape and data.dtype == _dtype(leaf.dtype)
        assert right, f"{leaf.path}: got {data.dtype}{data.shape}"
        if want.form == "jax" and want.sharding is None and default is None:
            default = default_sharding()  # not before it is needed: this starts jax's devices
        sharding = (want.sharding or default) if want.form == "jax" else None
        if want.dtype is not None and leaf.kind != "key" and want.dtype != leaf.dtype:
            data = convert(data, np.dtype(want.dtype))
        here = sharding is not None and sharding.is_fully_addressable
        if sharding is not None and not here and isinstance(data, np.ndarray):
            data = jax.make_array_from_callback(data.shape, sharding, functools.partial(_part, data))
        if leaf.kind == "key":
            data = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=leaf.impl)
        elif want.form == "scalar" or (want.form == "saved" and leaf.kind == "scalar"):
            data = data[()]
        if here:
            placed[number] = sharding
        values.append(data)
    # Where nothing is said, jax decides; and it is sooner done with one device for all than with a layout for each.
    groups: dict[Any, list[int]] = {}
    for number, sharding in placed.items():
        groups.setdefault(None if sharding is default else _one_device(sharding), []).append(number)
    for device, numbers in groups.items():
        where = [placed[number] for number in numbers] if device is _SEVERAL else device
        for number, value in zip(numbers, jax.device_put([values[number] for number in numbers], where), strict=True):
            values[number] = value
    return values


_SEVERAL = object()


@functools.lru_cache(maxsize=256)
def _one_device(sharding: Any) -> Any:
    """Give the device of a layout on one, in its usual memory; else `_SEVERAL`."""
    import jax

    if not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return _SEVERAL
    (device,) = sharding.device_set
    return device if sharding == jax.sharding.SingleDeviceSharding(device) else _SEVERAL


def _part(data: np.ndarray, index: Any) -> np.ndarray:
    return data[index]


def default_sharding() -> Any:
    """Give the layout of an array that nothing is said about: one device."""
    import jax

    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(device, jax.Device):
        device = jax.local_devices(backend=device)[0]
    return jax.sharding.SingleDeviceSharding(device)


def _scalar(leaf: Leaf) -> Any:
    kinds = {"bool": bool, "int": int, "float": float, "str": str, "bytes": base64.b64decode}
    if leaf.dtype == "complex":
        real, imaginary = leaf.value
        return complex(float(real), float(imaginary))
    return kinds[leaf.dtype](leaf.value)
