"""Fitting what is wanted to what there is, before anything is read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from styrax.checkpoint import digest
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.items import is_iterator, is_json, state_of
from styrax.checkpoint.manifest import Item, Leaf, Manifest, leaf_name
from styrax.checkpoint.policy import Cast, Policy, castable, check_cast, check_patterns
from styrax.core import nearest, tree

_EMPTY = [digest.of(text) for text in (b"{}", b"[]", b"null")]


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One leaf of the result: read from the checkpoint, or given.

    Attributes:
        leaf: Where it is read from; `None` if it is not.
        want: What it is to be.
        value: What it is where it is not read.
    """

    leaf: Leaf | None
    want: Wanted
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a restore will read, already checked against the manifest.

    Attributes:
        manifest: Of the checkpoint.
        like: What was asked for.
        trees: Item -> its leaves, in the order of `like`, or of the checkpoint where that is `None`. An item that
            is not here is one document.
        left: Item and path of the leaves that are in the checkpoint and stay there.
        kept: Those that are not in it, or were not to be read, and are what `like` or a function says.
    """

    manifest: Manifest
    like: Mapping[str, Any]
    trees: Mapping[str, tuple[Entry, ...]]
    left: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def leaves(self) -> dict[str, list[tuple[Leaf, Wanted]]]:
        """Give what is to be read of each tree."""
        return {
            name: [(entry.leaf, entry.want) for entry in entries if entry.leaf is not None]
            for name, entries in self.trees.items()
        }


class _Fit:
    """Collects what differs while items are fitted."""

    def __init__(self, only: Any, on_missing: Any, on_extra: Any, cast: Cast) -> None:
        check_cast(cast)
        self._cast: Cast = cast
        self._only = [only] if isinstance(only, str) else only
        if self._only is not None:
            check_patterns(self._only, "only")
            self._only = list(self._only)
        self._missing = Policy(on_missing, "on_missing", ("keep",), functions=True)
        self._extra = Policy(on_extra, "on_extra", ("drop",))
        self._paths: list[str] = []  # asked whether they are chosen
        self.problems: list[str] = []
        self.left: list[str] = []
        self.kept: list[str] = []

    def item(self, name: str, item: Item | None, like: Any, known: Mapping[str, Item]) -> tuple[Entry, ...] | None:
        """Fit one item; gives `None` if it is one document."""
        if item is None:
            return self._absent(name, like, known)
        if item.kind == "tree":
            return tuple(self._tree(name, item, like))
        self._paths.append(name)
        return None

    def _absent(self, name: str, like: Any, known: Mapping[str, Item]) -> tuple[Entry, ...]:
        leaves = {} if like is None or is_iterator(like) else tree.flatten(state_of(like))
        answers = [self._missing(leaf_name(name, path)) for path in leaves] or [self._missing(name)]
        if "error" in answers or (not leaves and like is None):
            near = nearest(str(name), known)
            has = ", ".join(map(repr, known)) or "none"
            self.problems.append(f"item {name!r}: not in the checkpoint{near or f', it has {has}'}")
            return ()
        self.kept += [] if leaves else [name]
        return tuple(self._given(name, path, leaf) for path, leaf in leaves.items())

    def _tree(self, name: str, item: Item, like: Any) -> list[Entry]:
        if like is None:
            chosen = [leaf for leaf in item.leaves if self._chosen(leaf_name(name, leaf.path))]
            taken = {leaf.path for leaf in chosen}
            self.left += [leaf_name(name, leaf.path) for leaf in item.leaves if leaf.path not in taken]
            return [Entry(leaf=leaf if leaf.path in taken else None, want=Wanted(form="saved")) for leaf in item.leaves]
        saved = {leaf.path: leaf for leaf in item.leaves}
        try:
            asked = tree.flatten(state_of(like))
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            return []
        extra = [path for path in saved if path not in asked]
        entries = []
        for path, value in asked.items():
            leaf, want = saved.get(path), _want(value)
            if leaf is not None and want is not None and self._only is None:
                for text in _differences(leaf, want, self._cast):
                    self.problems.append(f"{leaf_name(name, path)}: {text}")
                entries.append(Entry(leaf=leaf, want=want))
                continue
            full = leaf_name(name, path)
            if not self._chosen(full) or (path not in saved and self._missing(full) != "error"):
                entries.append(self._given(name, path, value))
                self.left += [full] if path in saved else []
                continue
            if path not in saved:
                self.problems.append(f"{full}: missing from the checkpoint{nearest(path, extra)}")
            elif want is None:
                self.problems.append(f"{full}: {type(value).__name__} does not say what to restore it as")
            else:
                self.problems += [f"{full}: {text}" for text in _differences(saved[path], want, self._cast)]
                entries.append(Entry(leaf=saved[path], want=want))
        for path in extra:
            full = leaf_name(name, path)
            if self._extra(full) == "error" and self._chosen(full):
                self.problems.append(f"{full}: in the checkpoint, not asked for")
            else:
                self.left.append(full)
        return entries

    def _chosen(self, path: str) -> bool:
        if self._only is None:
            return True
        self._paths.append(path)
        return any(tree.match(pattern, path) for pattern in self._only)

    def unused(self) -> None:
        """Note the patterns of `only` that fit nothing that was asked for: they are mistyped."""
        for pattern in self._only or ():
            if not any(tree.match(pattern, path) for path in self._paths):
                self.problems.append(f"only: {pattern!r} fits nothing{nearest(pattern, self._paths)}")

    def _given(self, name: str, path: str, like: Any) -> Entry:
        """Take a leaf that is not read: its value in `like`, or what a function gives."""
        import jax

        full = leaf_name(name, path)
        answer = self._missing(full) if self._chosen(full) else "keep"
        value: Any = answer(full, like) if callable(answer) else like
        want = _want(like) or Wanted(form="saved")
        if isinstance(value, jax.ShapeDtypeStruct):
            self.problems.append(
                f"{full}: is not read from the checkpoint and has no value, only a shape; give an array, or for "
                "on_missing a function that makes one"
            )
        elif callable(answer) and hasattr(like, "shape") and _kind(value) != _kind(like):
            self.problems.append(f"{full}: the function of on_missing gave {_kind(value)}, expected {_kind(like)}")
        self.kept.append(full)
        return Entry(leaf=None, want=want, value=value)


def plan(
    manifest: Manifest,
    like: Mapping[str, Any],
    directory: Path,
    *,
    only: Any = None,
    on_missing: Any = "error",
    on_extra: Any = "error",
    cast: Cast = "exact",
) -> Plan:
    """Fit what is wanted to what there is.

    Args:
        manifest: Of the checkpoint.
        like: Item -> tree of leaves, module, iterator, or `None`.
        directory: Of the checkpoints, for the error text.
        only: Patterns; what fits none of them is not read.
        on_missing: See `Store.restore`.
        on_extra: See `Store.restore`.
        cast: See `Store.restore`.

    Raises:
        CheckpointError: An item or leaf is missing or too many, or a shape, dtype or kind differs, and nothing
            allows it; all are listed by path.
    """
    fit = _Fit(only, on_missing, on_extra, cast)
    if not isinstance(like, Mapping) or not all(isinstance(name, str) for name in like):
        raise CheckpointError(f"expected item -> what to restore it as, such as {{'params': None}}, got {like!r:.200}")
    trees: dict[str, tuple[Entry, ...]] = {}
    for name, value in like.items():
        item = manifest.items.get(name)
        entries = fit.item(name, item, value, manifest.items)
        if entries is not None:
            trees[name] = entries
        elif item is not None and not (value is None or is_json(value) or is_iterator(value)):
            # An empty container of another kind than dict and list is wanted, and {} was saved: they agree.
            if manifest.files[str(item.file)].digest not in _EMPTY or tree.flatten(value):
                fit.problems.append(f"item {name!r}: is plain JSON in the checkpoint; ask for it with None")
            trees[name] = ()
        elif item is not None and item.kind == "json" and is_iterator(value):
            fit.problems.append(f"item {name!r}: is plain JSON in the checkpoint, not the position of an iterator")
    fit.unused()
    if fit.problems:
        head = f"step {manifest.step} in {directory} is not what was asked for, {len(fit.problems)} difference(s):"
        tail = (
            "Nothing is cast, filled in or left out unless cast, on_missing and on_extra say so; None gives an item as "
            "it was saved"
        )
        raise CheckpointError("\n  ".join([head, *fit.problems]) + f"\n{tail}")
    return Plan(manifest=manifest, like=like, trees=trees, left=tuple(fit.left), kept=tuple(fit.kept))


def _kind(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{_dtype_name(value.dtype)}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def _want(leaf: Any) -> Wanted | None:
    if isinstance(leaf, (np.ndarray, np.generic)):
        form = "scalar" if isinstance(leaf, np.generic) else "numpy"
        return Wanted(form=form, shape=leaf.shape, dtype=_dtype_name(leaf.dtype))
    if type(leaf) in (bool, int, float, complex, str, bytes):
        return Wanted(form="python", dtype=type(leaf).__name__)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return _array(tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None))
    return None


@functools.lru_cache(maxsize=1024)
def _array(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Wanted:
    return Wanted(form="jax", shape=shape, dtype=_dtype_name(dtype), sharding=sharding)


@functools.lru_cache(maxsize=1024)
def _fits_any(sharding: Any) -> bool:
    import jax

    return sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding)


def _differences(leaf: Leaf, want: Wanted, cast: Cast) -> list[str]:
    if (leaf.kind == "python") != (want.form == "python"):
        there = f"a Python {leaf.dtype}" if leaf.kind == "python" else f"{leaf.dtype}{list(leaf.shape)}"
        asked = f"a Python {want.dtype}" if want.form == "python" else f"{want.dtype}{list(want.shape or ())}"
        return [f"{there} in the checkpoint, {asked} asked for"]
    shape, dtype = leaf.shape, leaf.dtype
    same = (shape, dtype) == (want.shape, want.dtype) and leaf.kind != "key"
    if same and _fits_any(want.sharding) and (want.form != "jax" or _keeps(dtype)):
        return []  # of thousands, nearly all
    texts = []
    if leaf.kind == "key":
        import jax

        wrap = functools.partial(jax.random.wrap_key_data, impl=leaf.impl)
        keys = jax.eval_shape(wrap, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        shape, dtype = keys.shape, str(keys.dtype)
    if want.form != "python" and shape != want.shape:
        texts.append(f"shape {list(shape)} in the checkpoint, {list(want.shape or ())} asked for")
    if dtype != want.dtype:
        if not _may_cast(leaf, want, cast):
            more = f" and cast={cast!r} does not allow it" if cast != "exact" else ""
            texts.append(f"dtype {dtype} in the checkpoint, {want.dtype} asked for{more}")
    elif want.form == "jax" and not _keeps(leaf.dtype):
        texts.append(f"jax would cast {dtype}: set jax_enable_x64, or ask for a numpy array")
    if not texts and want.sharding is not None:
        try:
            want.sharding.shard_shape(shape)
        except ValueError as error:
            texts.append(f"shape {list(shape)} cannot be laid out as asked: {error}")
    return texts


def _may_cast(leaf: Leaf, want: Wanted, cast: Cast) -> bool:
    if leaf.kind in ("python", "key") or str(want.dtype).startswith("key<"):
        return False
    return castable(np.dtype(leaf.dtype), np.dtype(str(want.dtype)), cast)


def _keeps(dtype: str) -> bool:
    """Tell whether jax has the dtype, or casts it to a narrower one."""
    if dtype.startswith("key<") or np.dtype(dtype).itemsize < 8:
        return True
    import jax

    return jax.dtypes.canonicalize_dtype(np.dtype(dtype)) == np.dtype(dtype)


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    # A typed key's dtype is no numpy dtype, and its text names the implementation.
    return np.dtype(dtype).name if isinstance(dtype, (np.dtype, type, str)) else str(dtype)
