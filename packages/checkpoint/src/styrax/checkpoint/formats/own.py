"""Checkpoints of this package as a source for other formats: one leaf at a time, digests compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from styrax.checkpoint import digest, raw
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.formats.base import Array, read_into, reading
from styrax.checkpoint.formats.casting import dtype_named
from styrax.checkpoint.formats.names import tree_path
from styrax.checkpoint.manifest import LEAVES, Leaf, leaf_name, read_manifest
from styrax.checkpoint.naming import item_name, orbax_name
from styrax.checkpoint.verify import verify
from styrax.core import nearest

_TIMEOUT = 1800


def read(checkpoint: Path, items: Iterable[str] | None = None) -> tuple[dict[str, Array], dict[str, str]]:
    """Describe the leaves of one checkpoint, after its files were verified.

    Args:
        checkpoint: The folder of the step.
        items: Which items; all by default. If there is one, its name is left out of the paths.

    Returns:
        Tree path, the name of the item in front -> array (a random key as its data, a number as an array without
        dimensions); and tree path -> why it is there but not given.

    Raises:
        CheckpointError: It is damaged, or lacks an item.
    """
    manifest = read_manifest(checkpoint)
    wanted = list(manifest.items if items is None else items)
    lacking = [name for name in wanted if name not in manifest.items]
    if lacking:
        near = nearest(lacking[0], manifest.items)
        raise CheckpointError(
            f"{checkpoint} has no item {', '.join(map(repr, lacking))}{near}; it has {', '.join(manifest.items)}"
        )
    problems = verify(checkpoint, items=wanted)
    if problems:
        raise CheckpointError("\n  ".join([f"the checkpoint {checkpoint} is damaged:", *problems]))
    found, skipped = {}, {}
    for name in wanted:
        item = manifest.items[name]
        if item.kind != "tree":
            skipped[name] = "is JSON, not a tree of arrays"
        large = stored(checkpoint, name, [leaf for leaf in item.leaves if leaf.in_orbax])
        for leaf in item.leaves:
            path = leaf.path if items is not None and len(wanted) == 1 else leaf_name(name, leaf.path)
            array = large.get(leaf.path) or described(checkpoint, name, leaf)
            if array is None:
                skipped[path] = f"is a Python {leaf.dtype}, not an array or a number that numpy has"
            else:
                found[path] = array
    return found, skipped


def stored(checkpoint: Path, item: str, leaves: Sequence[Leaf], *, one_by_one: bool = False) -> dict[str, Array]:
    """Describe the arrays of an item that Orbax holds.

    Args:
        checkpoint: The folder of the step.
        item: Its name.
        leaves: Of that item, all in Orbax.
        one_by_one: Never read several together, so that damage to one does not keep others from being read.

    Returns:
        Path -> array.
    """
    if not leaves:
        return {}
    from styrax.checkpoint.formats.orbax import Reader

    found: dict[str, Array] = {}
    for leaf in leaves:
        file = raw.whole(checkpoint, item, leaf)
        if file is not None:
            found[leaf.path] = _straight(checkpoint, item, leaf, file)
    leaves = [leaf for leaf in leaves if leaf.path not in found]
    for folder in sorted({leaf.where for leaf in leaves}):
        names = {leaf.path: orbax_name(leaf.path) for leaf in leaves if leaf.where == folder}
        reader = Reader(checkpoint / folder, item_name(item), dict.fromkeys(names.values(), 0), together=not one_by_one)
        for leaf in leaves:
            if leaf.where == folder:
                name = tree_path(names[leaf.path], "")
                found[leaf.path] = reader.add(name, leaf.shape, dtype_named(leaf.dtype))
    return found


def _straight(checkpoint: Path, item: str, leaf: Leaf, file: str) -> Array:
    def load() -> np.ndarray:
        with reading(checkpoint / file, leaf_name(item, leaf.path)):
            return raw.read(checkpoint, {(item, leaf): file}, verify=True)[item, leaf.path]

    return Array(shape=leaf.shape, dtype=dtype_named(leaf.dtype), load=load)


def described(checkpoint: Path, item: str, leaf: Leaf) -> Array | None:
    """Describe a leaf that Orbax does not hold; `None` if numpy has no such thing."""
    if leaf.where == "inline":
        return _number(leaf)
    dtype = dtype_named(leaf.dtype)

    def packed() -> np.ndarray:
        path = checkpoint / LEAVES
        data = np.empty(leaf.nbytes, np.uint8)
        if leaf.nbytes:
            with reading(path, leaf.path), path.open("rb", buffering=0) as handle:
                handle.seek(leaf.offset or 0)
                read_into(handle, data)
            if digest.of(data) != leaf.digest:
                raise CheckpointError(f"{path} is damaged: {leaf_name(item, leaf.path)} is not what was saved")
        return data.view(dtype).reshape(leaf.shape)

    return Array(shape=leaf.shape, dtype=dtype, load=packed)


def _number(leaf: Leaf) -> Array | None:
    if leaf.dtype == "complex":
        return Array.of(np.complex128(complex(*map(float, leaf.value))))
    if leaf.dtype == "float":
        return Array.of(np.float64(leaf.value))
    if leaf.dtype == "bool":
        return Array.of(np.bool_(leaf.value))
    if leaf.dtype == "int" and -(2**63) <= leaf.value < 2**63:
        return Array.of(np.int64(leaf.value))
    return None
