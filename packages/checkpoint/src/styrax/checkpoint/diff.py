"""How two checkpoints differ, by path; from their manifests, as far as these can tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from styrax.checkpoint import leaves
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.locate import find_one
from styrax.checkpoint.manifest import Item, Leaf, Manifest, leaf_name, read_manifest
from styrax.checkpoint.schema import describe
from styrax.core import nearest, tree

if TYPE_CHECKING:
    from styrax.checkpoint.measure import Distance

What = Literal["only in a", "only in b", "kind", "shape", "dtype", "values"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        path: The item and the path in it; of JSON, the path of the value.
        what: In what they differ; of several things the first of kind, shape, dtype.
        a: What the first has, in words; `None` if it has nothing there.
        b: What the second has.
        distance: How far the numbers are apart, if that was asked for and both are arrays of one shape.
    """

    path: str
    what: What
    a: str | None = None
    b: str | None = None
    distance: Distance | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two checkpoints differ.

    Attributes:
        a: The folder of the first.
        b: The folder of the second.
        changes: In the order of the first, then what only the second has, an item after the other.
        equal: The paths that are equal.
    """

    a: Path
    b: Path
    changes: tuple[Change, ...]
    equal: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether both hold the same."""
        return not self.changes


@dataclass(frozen=True, kw_only=True)
class _Side:
    path: Path
    manifest: Manifest


def diff(
    a: str | Path,
    b: str | Path,
    *,
    stats: bool = False,
    only: Iterable[str] = (),
    progress: Callable[[str, int], None] | None = None,
) -> Difference:
    """Compare two checkpoints: items, paths, kinds, shapes, dtypes and, by their digests, values.

    No array is read, unless `stats` is set, or one was saved on other meshes, so that the manifests have digests of
    other parts of it. Then one of each checkpoint is in memory at a time. Neither devices nor jax are needed before.

    Args:
        a: The folder of a checkpoint, or that of a run or of its checkpoints with `@STEP`; without it, the newest.
        b: Another one.
        stats: Read the arrays that differ, and measure how far they are apart.
        only: Patterns over item and path, as in `params/**`; by default everything is compared.
        progress: Called with the path and bytes of each array that was read.

    Raises:
        CheckpointError: One is not there, or what had to be read of it is damaged; or a pattern fits nothing.

    Example:
        >>> import tempfile, numpy as np
        >>> from styrax.checkpoint import Store
        >>> folder = tempfile.mkdtemp()
        >>> with Store(folder) as store:
        ...     for step in (1, 2):
        ...         tree = {"w": np.full(4, step, np.float32), "b": np.zeros(4)}
        ...         ticket = store.save(step, {"params": tree, "run": {"step": step}})
        >>> found = diff(f"{folder}@1", f"{folder}@2", stats=True)
        >>> [(change.path, change.what, change.a, change.b) for change in found.changes]
        [('params/w', 'values', 'float32[4]', 'float32[4]'), ('run/step', 'values', '1', '2')]
        >>> found.changes[0].distance.max_abs, found.equal
        (1.0, ('params/b',))
    """
    sides = [_Side(path=path, manifest=read_manifest(path)) for path in (find_one(a), find_one(b))]
    comparison = _Comparison(sides[0], sides[1], stats, list(only), progress or (lambda path, nbytes: None))
    changes, equal = [], []
    for path, change in comparison.run():
        if change is None:
            equal.append(path)
        else:
            changes.append(change)
    return Difference(a=sides[0].path, b=sides[1].path, changes=tuple(changes), equal=tuple(equal))


class _Comparison:
    def __init__(self, a: _Side, b: _Side, stats: bool, only: list[str], progress: Callable[[str, int], None]) -> None:
        self._a, self._b, self._stats, self._progress = a, b, stats, progress
        self._only = only
        self._seen: list[str] = []

    def run(self) -> Iterator[tuple[str, Change | None]]:
        a, b = self._a.manifest.items, self._b.manifest.items
        for name in dict.fromkeys([*a, *b]):
            yield from self._item(name, a.get(name), b.get(name))
        unused = [pattern for pattern in self._only if not any(tree.match(pattern, path) for path in self._seen)]
        if unused:
            lines = [f"{pattern!r} fits nothing{nearest(pattern, self._seen)}" for pattern in unused]
            raise CheckpointError("\n  ".join([f"of {len(self._seen)} paths in {self._a.path} and the other:", *lines]))

    def _wanted(self, path: str) -> bool:
        self._seen.append(path)
        return not self._only or any(tree.match(pattern, path) for pattern in self._only)

    def _item(self, name: str, a: Item | None, b: Item | None) -> Iterator[tuple[str, Change | None]]:
        if a is not None and b is not None and a.kind != b.kind:
            if self._wanted(name):
                yield name, Change(path=name, what="kind", a=_noun(a), b=_noun(b))
        elif (a or b or Item(kind="tree")).kind == "tree":
            yield from self._leaves(name, a, b)
        else:
            yield from self._documents(name, a, b)

    def _leaves(self, name: str, a: Item | None, b: Item | None) -> Iterator[tuple[str, Change | None]]:
        left = {leaf.path: leaf for leaf in (a.leaves if a else ())}
        right = {leaf.path: leaf for leaf in (b.leaves if b else ())}
        paths = [path for path in dict.fromkeys([*left, *right]) if self._wanted(leaf_name(name, path))]
        pairs = {path: (left[path], right[path]) for path in paths if path in left and path in right}
        known: dict[str, Any] = {path: _compare(*pair) for path, pair in pairs.items()}
        read = [path for path, pair in pairs.items() if self._to_be_read(known[path], *pair)]
        arrays = [
            leaves.arrays(side.path, name, [pairs[path][number] for path in read])
            for number, side in enumerate((self._a, self._b))
        ]
        for path in paths:
            where = leaf_name(name, path)
            if path not in pairs:
                yield where, _alone(where, left.get(path), right.get(path))
                continue
            found, distance = known[path], None
            if path in read:
                x, y = (side.pop(path).load() for side in arrays)
                self._progress(where, x.nbytes + y.nbytes)
                found, distance = self._measure(found, x, y)
                del x, y
            a_text, b_text = map(describe, pairs[path])
            change = Change(path=where, what=found, a=a_text, b=b_text, distance=distance)
            yield where, None if found == "equal" else change

    def _to_be_read(self, found: Any, a: Leaf, b: Leaf) -> bool:
        if found == "unknown":
            return True
        numbers = {a.kind, b.kind} <= {"array", "scalar"}
        return self._stats and numbers and found in ("values", "dtype", "kind") and a.shape == b.shape

    def _measure(self, found: Any, x: Any, y: Any) -> tuple[Any, Distance | None]:
        from styrax.checkpoint import digest
        from styrax.checkpoint.measure import compare

        if found == "unknown":
            found = "values" if digest.of(x) != digest.of(y) else "equal"
        return found, compare(x, y) if found != "equal" and self._stats else None

    def _documents(self, name: str, a: Item | None, b: Item | None) -> Iterator[tuple[str, Change | None]]:
        sides = [(side, item) for side, item in ((self._a, a), (self._b, b)) if item is not None]
        if not any(_within(pattern, name) for pattern in self._only or ["**"]):
            self._seen.append(name)
            return
        values = [dict(_flat(name, leaves.document(side.path, side.manifest, name))) for side, _ in sides]
        left, right = values if len(values) == 2 else ((values[0], {}) if a else ({}, values[0]))
        for path in dict.fromkeys([*left, *right]):
            if not self._wanted(path):
                continue
            x, y = left.get(path), right.get(path)
            what: What = "values"
            if x is None or y is None:
                what = "only in b" if x is None else "only in a"
            yield path, None if x == y else Change(path=path, what=what, a=x, b=y)


def _alone(path: str, a: Leaf | None, b: Leaf | None) -> Change:
    if a is not None:
        return Change(path=path, what="only in a", a=describe(a))
    assert b is not None
    return Change(path=path, what="only in b", b=describe(b))


def _compare(a: Leaf, b: Leaf) -> What | Literal["equal", "unknown"]:
    """Say in what two leaves differ, by their records."""
    if (a.kind, a.impl) != (b.kind, b.impl):
        return "kind"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if a.where == b.where == "inline":
        return "values" if repr(a.value) != repr(b.value) else "equal"
    if not a.nbytes:
        return "equal"
    left, right = _parts(a), _parts(b)
    if left and left.keys() == right.keys():
        return "values" if left != right else "equal"
    return "unknown"


def _parts(leaf: Leaf) -> Mapping[Any, str]:
    if leaf.digest is not None:
        return {((0,) * len(leaf.shape), leaf.shape): leaf.digest}
    return {(shard.start, shard.stop): shard.digest for shard in leaf.shards}


def _noun(item: Item) -> str:
    names = {"json": "JSON", "iterator": "the state of an iterator"}
    return names.get(item.kind, f"a tree of {len(item.leaves)} {'leaf' if len(item.leaves) == 1 else 'leaves'}")


def _within(pattern: str, item: str) -> bool:
    """Tell whether a pattern may fit something in an item."""
    first = pattern.partition("/")[0]
    return first == "**" or tree.match(first, item)


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Give the path and the text of every value in JSON; containers that are empty are values."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flat(f"{path}/{key.replace('%', '%25').replace('/', '%2F')}", child)
    elif isinstance(value, list) and value:
        for number, child in enumerate(value):
            yield from _flat(f"{path}/{number}", child)
    else:
        yield path, json.dumps(value)
