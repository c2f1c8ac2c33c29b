"""Plain Orbax checkpoints: of a manager's step (version 0), of version 1, and a tree alone in its folder.

This file and `styrax.checkpoint.arrays` are all that talks to Orbax, by its version 1 free functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.formats.base import Array, problem_of_shape, reading, refuse
from styrax.core import tree

_TOGETHER = 8 * 2**20  # bytes of small arrays read at once: a call of Orbax takes about 15 ms, whatever it reads
_CURE = "copy the folder again; `orbax.checkpoint` itself may say more"


def read(folder: Path) -> tuple[dict[tuple[str, str], Array], dict[tuple[str, str], str], tuple[str, ...]]:
    """Describe the arrays of a checkpoint.

    Returns:
        (Item, tree path) -> array; the same -> why it is there but not given; and the items, none if the checkpoint
        is a tree alone, for which the item is `""`.

    Raises:
        CheckpointError: It is no checkpoint of Orbax, it is damaged, or Orbax has kept two arrays under one name.
    """
    trees, named = _metadata(folder)
    found: dict[tuple[str, str], Array] = {}
    skipped: dict[tuple[str, str], str] = {}
    problems: list[str] = []
    for item, described in trees.items():
        if not isinstance(described, (dict, list, tuple)):
            skipped[item, ""] = "is no tree of arrays"
            continue
        leaves = tree.flatten(described)
        problems += _collisions(leaves)
        reader = Reader(folder, item if named else None, described)
        for path, leaf in leaves.items():
            shape, dtype = _described(leaf)
            problem = None if dtype is None else problem_of_shape(shape, dtype)
            if problem:
                problems.append(f"{path!r}: {problem}")
            elif dtype is None:
                skipped[item, path] = f"is {type(leaf).__name__}, not an array or number"
            else:
                found[item, path] = reader.add(path, shape, dtype)
    refuse(folder, problems, "This checkpoint cannot be read whole; save the tree again with other names")
    return found, skipped, tuple(trees) if named else ()


def _metadata(folder: Path) -> tuple[dict[str, Any], bool]:
    from orbax.checkpoint import v1 as ocp

    where = str(folder.absolute())
    with reading(folder, "the Orbax checkpoint", _CURE):
        try:
            return dict(ocp.checkpointables_metadata(where).metadata), True
        except ocp.errors.InvalidLayoutError:
            return {"": ocp.metadata(where).metadata}, False


def _described(leaf: Any) -> tuple[tuple[int, ...], np.dtype | None]:
    if type(leaf) in (bool, int, float, complex):
        return (), np.asarray(leaf).dtype
    if getattr(leaf, "shape", None) is None or getattr(leaf, "dtype", None) is None:
        return (), None
    try:
        return tuple(leaf.shape), np.dtype(leaf.dtype)
    except TypeError:  # a typed random key
        return (), None


def _collisions(leaves: Mapping[str, Any]) -> list[str]:
    """Find leaves that Orbax joins to the same name by dots: it has kept the data of one of them only."""
    first: dict[str, str] = {}
    problems = []
    for path in leaves:
        name = path.replace("/", ".").replace("%2F", "/").replace("%25", "%")
        if name in first:
            problems.append(f"{first[name]!r} and {path!r} are both {name!r} to Orbax, which has lost one of them")
        first[name] = path
    return problems


class Reader:
    """Reads the arrays of one item, small ones that follow one another together.

    Args:
        folder: The checkpoint.
        item: As Orbax names it, or `None` for a tree alone in its folder.
        described: The tree, of anything: its paths are what counts.
        together: Read small arrays that follow one another at once.
    """

    def __init__(self, folder: Path, item: str | None, described: Any, *, together: bool = True) -> None:
        self._folder, self._item, self._described = folder, item, described
        self._most = _TOGETHER if together else 0
        self._arrays: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._order: list[str] = []
        self._ready: dict[str, np.ndarray] = {}

    def add(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Describe an array of the item."""
        self._arrays[path] = shape, dtype
        number = len(self._order)
        self._order.append(path)
        return Array(shape=shape, dtype=dtype, load=lambda: self._load(number))

    def _load(self, number: int) -> np.ndarray:
        path = self._order[number]
        if path not in self._ready:
            self._ready = {}  # what was not asked for is let go
            wanted, size = [path], self._size(path)
            for other in self._order[number + 1 :]:
                size += self._size(other)
                if size > self._most:
                    break
                wanted.append(other)
            self._ready = self._read(wanted)
        return self._ready.pop(path)

    def _size(self, path: str) -> int:
        shape, dtype = self._arrays[path]
        return int(np.prod(shape, dtype=object)) * dtype.itemsize

    def _read(self, paths: list[str]) -> dict[str, np.ndarray]:
        from orbax.checkpoint import v1 as ocp

        from styrax.checkpoint.arrays import numpy_like

        likes = dict.fromkeys(tree.flatten(self._described), ocp.PLACEHOLDER)
        likes |= {path: numpy_like(*self._arrays[path]) for path in paths}
        wanted = tree.unflatten(self._described, likes)
        where = str(self._folder.absolute())
        with reading(self._folder, f"{paths[0]!r}", _CURE):
            context = ocp.Context()
            context.memory_options.read_concurrent_bytes = 2 * max(_TOGETHER, *map(self._size, paths))
            with context:
                if self._item is None:
                    got = ocp.load(where, wanted)
                else:
                    got = ocp.load_checkpointables(where, {self._item: wanted})[self._item]
            leaves = tree.flatten(got)
            del got
            result = {}
            for path in paths:
                shape, dtype = self._arrays[path]
                data = np.asarray(leaves.pop(path))
                if (data.shape, data.dtype) != (shape, dtype) or data is likes[path]:
                    raise CheckpointError(f"{self._folder}: Orbax did not give {path!r} as it described it")
                result[path] = np.array(data, order="C", copy=not data.flags.owndata or not data.flags.writeable)
        return result
