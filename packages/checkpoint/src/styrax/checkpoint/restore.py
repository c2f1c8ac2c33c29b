"""From a manifest and what the caller wants to the caller's tree, exactly or not at all."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from styrax.checkpoint import structure
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import ARRAYS, LEAVES, File, Item, Leaf, Manifest, leaf_name
from styrax.checkpoint.snapshot import is_json, orbax_name
from styrax.core import nearest, tree

_EMPTY = [File(size=len(text), crc32=zlib.crc32(text)) for text in (b"{}", b"[]", b"null")]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a leaf is to be restored as.

    Attributes:
        form: `jax` array, `numpy` array, numpy `scalar`, `python` scalar, or `saved`: as it was saved, on the host.
        shape: Or `None` if not said.
        dtype: Its name (that of a key's own type, such as `key<fry>`), or `None` if not said.
        sharding: Of a jax array, or `None` for the default device.
    """

    form: Literal["jax", "numpy", "scalar", "python", "saved"]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sharding: Any = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a restore will read, already checked against the manifest."""

    manifest: Manifest
    like: Mapping[str, Any]
    trees: Mapping[str, tuple[tuple[Leaf, Wanted], ...]]


def plan(manifest: Manifest, like: Mapping[str, Any], directory: Path) -> Plan:
    """Fit what is wanted to what there is.

    Args:
        manifest: Of the checkpoint.
        like: Item -> tree of abstract leaves, or `None`.
        directory: Of the checkpoints, for the error text.

    Raises:
        CheckpointError: An item or leaf is missing or too many, or a shape, dtype or kind differs; all are
            listed by path.
    """
    problems: list[str] = []
    trees: dict[str, tuple[tuple[Leaf, Wanted], ...]] = {}
    for name, value in like.items():
        item = manifest.items.get(name)
        if item is None:
            near = nearest(str(name), manifest.items)
            problems.append(f"item {name!r}: not in the checkpoint{near or ', it has ' + _names(manifest)}")
        elif item.kind == "tree":
            trees[name] = tuple(_fit(name, item, value, problems))
        elif not (value is None or is_json(value)):
            # An empty container of another kind than dict and list is wanted, and {} was saved: they agree.
            if manifest.files[str(item.file)] not in _EMPTY or tree.flatten(value):
                problems.append(f"item {name!r}: is plain JSON in the checkpoint; ask for it with None")
            trees[name] = ()
    if problems:
        head = f"step {manifest.step} in {directory} is not what was asked for, {len(problems)} difference(s):"
        tail = "Nothing is cast, filled in or left out: ask for what was saved (None gives an item as it is)"
        raise CheckpointError("\n  ".join([head, *problems]) + f"\n{tail}")
    return Plan(manifest=manifest, like=like, trees=trees)


def read(checkpoint: Path, plan: Plan, *, timeout: int) -> dict[str, Any]:
    """Read what a plan says.

    Args:
        checkpoint: The folder of the step, its files verified as far as wanted.
        plan: From `plan`.
        timeout: Seconds for Orbax's waits.

    Raises:
        CheckpointError: A leaf's bytes are not those that were saved.
    """
    import jax

    large = {
        name: {orbax_name(leaf.path): _for_orbax(leaf, want) for leaf, want in leaves if leaf.where == "orbax"}
        for name, leaves in plan.trees.items()
    }
    large = {name: leaves for name, leaves in large.items() if leaves}
    found: dict[str, dict[str, Any]] = {}
    if large:
        from styrax.checkpoint import arrays

        found = arrays.read(checkpoint / ARRAYS, large, timeout=timeout)
    result = {}
    for name, value in plan.like.items():
        item = plan.manifest.items[name]
        if item.kind == "json" and name not in plan.trees:
            result[name] = json.loads((checkpoint / str(item.file)).read_bytes())
            continue
        data = _packed(checkpoint, name, plan.trees[name])
        for leaf, _ in plan.trees[name]:
            if leaf.where == "orbax":
                data[leaf.path] = found[name].pop(orbax_name(leaf.path))
        values = _place([(leaf, want, data.get(leaf.path)) for leaf, want in plan.trees[name]])
        if value is None:
            result[name] = structure.rebuild(item.structure, values)
        else:
            result[name] = jax.tree.unflatten(jax.tree.structure(value), values)
    return result


def _fit(name: str, item: Item, like: Any, problems: list[str]) -> list[tuple[Leaf, Wanted]]:
    if like is None:
        return [(leaf, Wanted(form="saved")) for leaf in item.leaves]
    saved = {leaf.path: leaf for leaf in item.leaves}
    try:
        asked = tree.flatten(like)
    except ValueError as error:
        problems.append(f"{name}: {error}")
        return []
    extra = [path for path in saved if path not in asked]
    pairs = []
    for path, value in asked.items():
        want = _want(value)
        if path not in saved:
            problems.append(f"{leaf_name(name, path)}: missing from the checkpoint{nearest(path, extra)}")
        elif want is None:
            problems.append(f"{leaf_name(name, path)}: {type(value).__name__} does not say what to restore it as")
        else:
            problems += [f"{leaf_name(name, path)}: {text}" for text in _differences(saved[path], want)]
            pairs.append((saved[path], want))
    problems += [f"{leaf_name(name, path)}: in the checkpoint, not asked for" for path in extra]
    return pairs


def _want(leaf: Any) -> Wanted | None:
    if isinstance(leaf, (np.ndarray, np.generic)):
        form = "scalar" if isinstance(leaf, np.generic) else "numpy"
        return Wanted(form=form, shape=leaf.shape, dtype=leaf.dtype.name)
    if type(leaf) in (bool, int, float, complex, str):
        return Wanted(form="python", dtype=type(leaf).__name__)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        sharding = getattr(leaf, "sharding", None)
        return Wanted(form="jax", shape=tuple(leaf.shape), dtype=_dtype_name(leaf.dtype), sharding=sharding)
    return None


def _differences(leaf: Leaf, want: Wanted) -> list[str]:
    if (leaf.kind == "python") != (want.form == "python"):
        there = f"a Python {leaf.dtype}" if leaf.kind == "python" else f"{leaf.dtype}{list(leaf.shape)}"
        asked = f"a Python {want.dtype}" if want.form == "python" else f"{want.dtype}{list(want.shape or ())}"
        return [f"{there} in the checkpoint, {asked} asked for"]
    import jax

    texts = []
    shape, dtype = leaf.shape, leaf.dtype
    if leaf.kind == "key":
        wrap = functools.partial(jax.random.wrap_key_data, impl=leaf.impl)
        keys = jax.eval_shape(wrap, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        shape, dtype = keys.shape, str(keys.dtype)
    if want.form != "python" and shape != want.shape:
        texts.append(f"shape {list(shape)} in the checkpoint, {list(want.shape or ())} asked for")
    if dtype != want.dtype:
        texts.append(f"dtype {dtype} in the checkpoint, {want.dtype} asked for")
    elif want.form == "jax" and jax.dtypes.canonicalize_dtype(np.dtype(leaf.dtype)) != np.dtype(leaf.dtype):
        texts.append(f"jax would cast {dtype}: set jax_enable_x64, or ask for a numpy array")
    if not texts and want.sharding is not None:
        try:
            want.sharding.shard_shape(shape)
        except ValueError as error:
            texts.append(f"shape {list(shape)} cannot be laid out as asked: {error}")
    return texts


def _for_orbax(leaf: Leaf, want: Wanted) -> Any:
    import jax

    from styrax.checkpoint import arrays

    if want.form == "jax":
        sharding = want.sharding or _default_sharding()
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=sharding)
    return arrays.numpy_like(leaf.shape, np.dtype(leaf.dtype))


def _packed(checkpoint: Path, name: str, leaves: tuple[tuple[Leaf, Wanted], ...]) -> dict[str, Any]:
    found, bad = {}, []
    file = checkpoint / LEAVES
    with contextlib.ExitStack() as stack:
        handle = None
        for leaf in (leaf for leaf, _ in leaves if leaf.where == "packed"):
            data = np.empty(leaf.nbytes, np.uint8)
            if leaf.nbytes:
                handle = handle or stack.enter_context(file.open("rb"))
                handle.seek(leaf.offset or 0)
                if handle.readinto(data.data) != leaf.nbytes or zlib.crc32(data.data) != leaf.crc32:
                    bad.append(leaf_name(name, leaf.path))
            found[leaf.path] = data.view(np.dtype(leaf.dtype)).reshape(leaf.shape)
    if bad:
        raise CheckpointError(f"{file} is damaged, these leaves are not what was saved: {', '.join(bad)}")
    return found


def _place(leaves: list[tuple[Leaf, Wanted, Any]]) -> list[Any]:
    """Turn what was read into what was asked for; all that goes to this host's devices in one transfer."""
    import jax

    default = None
    values, placed = [], {}
    for number, (leaf, want, data) in enumerate(leaves):
        if leaf.kind == "python":
            values.append(_scalar(leaf))
            continue
        assert isinstance(data, (jax.Array, np.ndarray)), f"{leaf.path}: nothing was read"
        assert (data.shape, data.dtype.name) == (leaf.shape, leaf.dtype), f"{leaf.path}: got {data.dtype}{data.shape}"
        if want.form == "jax" and want.sharding is None and default is None:
            default = _default_sharding()  # not before it is needed: this starts jax's devices
        sharding = (want.sharding or default) if want.form == "jax" else None
        if sharding is not None and isinstance(data, np.ndarray) and not sharding.is_fully_addressable:
            data = jax.make_array_from_callback(data.shape, sharding, functools.partial(_part, data))
        if leaf.kind == "key":
            data = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=leaf.impl)
        elif want.form == "scalar" or (want.form == "saved" and leaf.kind == "scalar"):
            data = data[()]
        if sharding is not None and sharding.is_fully_addressable:
            placed[number] = sharding
        values.append(data)
    if placed:
        moved = jax.device_put([values[number] for number in placed], list(placed.values()))
        for number, value in zip(placed, moved):
            values[number] = value
    return values


def _part(data: np.ndarray, index: Any) -> np.ndarray:
    return data[index]


def _default_sharding() -> Any:
    import jax

    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(device, jax.Device):
        device = jax.local_devices(backend=device)[0]
    return jax.sharding.SingleDeviceSharding(device)


def _scalar(leaf: Leaf) -> Any:
    kinds = {"bool": bool, "int": int, "float": float, "str": str}
    if leaf.dtype == "complex":
        real, imaginary = leaf.value
        return complex(float(real), float(imaginary))
    return kinds[leaf.dtype](leaf.value)


def _dtype_name(dtype: Any) -> str:
    # A typed key's dtype is no numpy dtype, and its text names the implementation.
    return np.dtype(dtype).name if isinstance(dtype, (np.dtype, type, str)) else str(dtype)


def _names(manifest: Manifest) -> str:
    return ", ".join(map(repr, manifest.items)) or "none"
