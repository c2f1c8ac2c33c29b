"""How the containers of a tree nest, as JSON, so that an item comes back without a tree to imitate.

A structure is a leaf's number, `null` for `None`, `{"d": [[key, structure], ...]}` for a dictionary,
`{"l": [...]}` for a list, `{"t": [...]}` for a tuple, and `{"n": class, "d": ...}` for any other node, which
comes back as a dictionary of its fields. Keys are texts, numbers and truth values, `{"t": [...]}` a tuple of
those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from styrax.core.tree import is_variable


def describe(tree: Any) -> Any:
    """Write down how a tree nests.

    Args:
        tree: Any pytree; `nnx` variables count as their value.

    Returns:
        Plain JSON in which the leaves are numbered in jax's order.

    Raises:
        TypeError: A dictionary has a key that is none of the above; the text shows the key.

    Example:
        >>> describe({"b": (1, None), "a": [2.0]})
        {'d': [['b', {'t': [1, None]}], ['a', {'l': [0]}]]}
    """
    return _describe(tree, itertools.count())


def rebuild(structure: Any, leaves: Sequence[Any], *, without: Collection[int] = ()) -> Any:
    """Make the tree of a structure.

    Args:
        structure: From `describe`.
        leaves: In jax's order.
        without: Numbers of leaves that are left out, and dictionaries' entries that hold nothing else with them;
            in a list or tuple `None` stands in their place.

    Example:
        >>> rebuild({"d": [["b", {"t": [1, None]}], ["a", {"l": [0]}]]}, [2.0, 1])
        {'b': (1, None), 'a': [2.0]}
        >>> rebuild({"d": [["b", {"t": [1, None]}], ["a", {"l": [0]}]]}, [2.0, 1], without={0})
        {'b': (1, None)}
    """
    found = _rebuild(structure, leaves, set(without))
    return {} if found is _GONE else found


_GONE = object()


def _rebuild(structure: Any, leaves: Sequence[Any], without: set[int]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, int):
        return _GONE if structure in without else leaves[structure]
    if "d" in structure:
        pairs = [(_key(key), _rebuild(child, leaves, without)) for key, child in structure["d"]]
        left = {key: child for key, child in pairs if child is not _GONE}
        return left if left or not pairs else _GONE
    children = [_rebuild(child, leaves, without) for child in structure["l" if "l" in structure else "t"]]
    if children and all(child is _GONE for child in children):
        return _GONE
    children = [None if child is _GONE else child for child in children]
    return children if "l" in structure else tuple(children)


def _describe(tree: Any, numbers: Iterator[int]) -> Any:
    import jax

    if tree is None:
        return None
    if isinstance(tree, (jax.Array, np.ndarray)):
        return next(numbers)
    if type(tree) is dict and all(type(key) is str for key in tree):  # what most trees are made of
        found = {key: _describe(tree[key], numbers) for key in sorted(tree)}
        return {"d": [[key, found[key]] for key in tree]}
    if jax.tree_util.all_leaves([tree]):
        return next(numbers)
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if is_variable(tree) and len(pairs) == 1:
        return _describe(pairs[0][1], numbers)
    # Children are numbered in jax's order, and written in the dictionary's own.
    children = [(_name(keys), _describe(child, numbers)) for keys, child in pairs]
    if type(tree) is list:
        return {"l": [child for _, child in children]}
    if type(tree) is tuple:
        return {"t": [child for _, child in children]}
    if isinstance(tree, dict):
        found = dict(children)
        return {"d": [[_plain(key), found[key]] for key in tree]}
    return {"n": type(tree).__qualname__, "d": [[str(key), child] for key, child in children]}


def _name(keys: Sequence[Any]) -> Any:
    key = keys[0]
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _plain(key: Any) -> Any:
    if isinstance(key, tuple):
        return {"t": [_plain(part) for part in key]}
    if type(key) in (str, int, bool) or (type(key) is float and math.isfinite(key)):
        return key
    raise TypeError(f"the dictionary key {key!r} is {type(key).__name__}, not text, a number or a tuple of them")


def _key(plain: Any) -> Any:
    return tuple(_key(part) for part in plain["t"]) if isinstance(plain, dict) else plain
