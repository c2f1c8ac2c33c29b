"""Leaves of a pytree by path: `layers/attn/q/kernel`, with patterns over such paths.

A path is the keys from the root joined by `/`: dictionary keys, attribute and namedtuple field names,
sequence indices as digits. Inside a key `%` is written `%25` and `/` is written `%2F`. The wrapper that
`flax.nnx` puts around an array (a `Variable`) adds nothing to the path, so a module, its state and the
pure dictionary of it have the same paths. flax itself is never imported: variables are recognised by their
methods.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from styrax.core.errors import nearest

T = TypeVar("T")


_NOTHING = object()


def path_str(key_path: Sequence[Any]) -> str:
    """Write one of jax's key paths as text.

    A last attribute named `value` or `raw_value` is dropped, for that is how an `nnx.Variable` shows in
    a key path. `flatten` looks at the objects instead and keeps such a field of any other class.

    Args:
        key_path: From `jax.tree_util.tree_flatten_with_path` or `tree_map_with_path`.

    Example:
        >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
        >>> path_str((DictKey("layers"), SequenceKey(0), GetAttrKey("kernel"), GetAttrKey("value")))
        'layers/0/kernel'
        >>> path_str((DictKey("a/b"),))
        'a%2Fb'
    """
    if key_path and getattr(key_path[-1], "name", None) in ("value", "raw_value"):
        key_path = key_path[:-1]
    return _join(key_path)


def flatten(tree: Any) -> dict[str, Any]:
    """Map each leaf's path to the leaf, in jax's order, with `nnx` states, variables and modules unwrapped.

    Args:
        tree: Any pytree; `None` has no leaves.

    Returns:
        Path -> leaf. A tree that is itself a leaf has the path `""`.

    Raises:
        ValueError: Two leaves have the same path.

    Example:
        >>> flatten({"b": [1, 2], "a": {"x": 3}})
        {'a/x': 3, 'b/0': 1, 'b/1': 2}
    """
    import jax

    flat = {}
    for prefix, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        if is_variable(node):
            inner = jax.tree_util.tree_flatten_with_path(node)[0]
            found = [(_join((*prefix, *keys[1:])), leaf) for keys, leaf in inner]
        else:
            found = [(_join(prefix), node)]
        for path, leaf in found:
            if path in flat:
                raise ValueError(f"two leaves of the tree have the path {path!r}; rename one of their keys")
            flat[path] = leaf
    return flat


def unflatten(like: Any, flat: Mapping[str, Any]) -> Any:
    """Put leaves by path into the structure of another tree; the inverse of `flatten`.

    Args:
        like: A tree with the wanted structure (its leaves are not looked at).
        flat: Path -> new leaf, exactly the paths of `like`.

    Returns:
        A tree of the same type as `like`, `nnx` wrappers included.

    Raises:
        ValueError: Paths are missing from `flat` or not in `like`; all are listed.

    Example:
        >>> unflatten({"a": 0, "b": (0, 0)}, {"a": 1, "b/0": 2, "b/1": 3})
        {'a': 1, 'b': (2, 3)}
    """
    import jax

    paths = list(flatten(like))
    missing = [path for path in paths if path not in flat]
    known = set(paths)
    extra = [path for path in flat if path not in known]
    if missing or extra:
        lines = [f"the leaves do not fit the tree: {len(missing)} missing, {len(extra)} too many"]
        lines += [f"  missing: {path!r}{nearest(path, extra)}" for path in missing]
        lines += [f"  not in the tree: {path!r}" for path in extra]
        raise ValueError("\n".join(lines))
    return jax.tree.unflatten(jax.tree.structure(like), [flat[path] for path in paths])


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `f(path, leaf, *leaves of rest)` to every leaf.

    Args:
        f: Takes the path and one leaf of each tree.
        tree: Gives the structure.
        rest: Trees with the same paths, whatever their container types.

    Returns:
        A tree with the structure of `tree`.

    Raises:
        ValueError: A tree of `rest` has other paths.

    Example:
        >>> map_with_path(lambda path, x, y: f"{path}:{x + y}", {"a": 1}, {"a": 2})
        {'a': 'a:3'}
    """
    flat = flatten(tree)
    others = []
    for number, other in enumerate(rest, 1):
        leaves = flatten(other)
        different = sorted(flat.keys() ^ leaves.keys())
        if different:
            raise ValueError("\n  ".join([f"tree {number + 1} has other leaves than tree 1:", *different]))
        others.append(leaves)
    return unflatten(tree, {path: f(path, leaf, *(o[path] for o in others)) for path, leaf in flat.items()})


def match(pattern: str, path: str) -> bool:
    """Tell whether a whole path fits a pattern.

    Args:
        pattern: `*` stands for any characters within one segment, the segment `**` for any number of
            segments, none included; everything else for itself.
        path: As `flatten` gives it.

    Example:
        >>> match("layers/*/kernel", "layers/0/kernel"), match("**/kernel", "kernel")
        (True, True)
        >>> match("layers/*", "layers/0/kernel"), match("layers/**", "layers/0/kernel")
        (False, True)
    """
    return _regex(pattern).fullmatch(path + "/") is not None


def first_match(rules: Mapping[str, T], path: str, default: Any = None) -> T | Any:
    """Give the value of the first rule whose pattern fits `path`, in the mapping's order.

    Example:
        >>> first_match({"**/bias": 1, "**": 2}, "layers/0/bias")
        1
    """
    return next((value for pattern, value in rules.items() if match(pattern, path)), default)


def label(tree: Any, rules: Mapping[str, T], what: str = "parameter") -> dict[str, T]:
    """Give every leaf of a tree the value of the first rule that fits its path.

    Args:
        tree: Any pytree.
        rules: Pattern -> value; earlier rules win.
        what: What the leaves are, for the error text.

    Returns:
        Path -> value, for every path of `tree`.

    Raises:
        ValueError: Some paths fit no rule or some rules fit no path; all are listed.

    Example:
        >>> label({"w": {"kernel": 1, "bias": 2}}, {"**/bias": "plain", "**": "decayed"})
        {'w/bias': 'plain', 'w/kernel': 'decayed'}
    """
    paths = list(flatten(tree))
    unmatched = [path for path in paths if not any(match(pattern, path) for pattern in rules)]
    unused = [pattern for pattern in rules if not any(match(pattern, path) for path in paths)]
    if unmatched or unused:
        lines = [f"{len(unmatched)} {what}(s) fit no rule, {len(unused)} rule(s) fit no {what}:"]
        lines += [f"  no rule for {path!r}" for path in unmatched]
        lines += [f"  rule {pattern!r} fits nothing{nearest(pattern, paths)}" for pattern in unused]
        raise ValueError("\n".join(lines))
    return {path: first_match(rules, path) for path in paths}


def is_variable(node: Any) -> bool:
    """Tell whether a node is a `flax.nnx` variable, by its methods.

    Example:
        >>> is_variable({"value": 1})
        False
    """
    return _is_variable_type(type(node))


@functools.lru_cache(maxsize=1024)
def _is_variable_type(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("get_value", "set_value", "get_raw_value"))


def _join(key_path: Sequence[Any]) -> str:
    return "/".join([_segment(key) for key in key_path])


def _segment(key: Any) -> str:
    text = key
    for attribute in ("key", "idx", "name"):
        if (found := getattr(key, attribute, _NOTHING)) is not _NOTHING:
            text = found
            break
    text = str(text)
    return text.replace("%", "%25").replace("/", "%2F") if "%" in text or "/" in text else text


@functools.lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    # Every segment ends with a slash, in the path too, so that `**` needs no special case at either end.
    parts = []
    for segment in pattern.split("/"):
        if segment == "**":
            parts.append("(?:[^/]*/)*")
        else:
            parts.append("[^/]*".join(re.escape(piece) for piece in segment.split("*")) + "/")
    return re.compile("".join(parts), re.DOTALL)
