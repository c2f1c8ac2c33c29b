"""What leaves are, in words and as one fingerprint, to compare a model with a checkpoint before a pod is rented."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from styrax.checkpoint import digest
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import Leaf, Manifest, leaf_name
from styrax.core import nearest

_LONG = 60
_Row = tuple[str, str, str, list[int], str, str]


def fingerprint(what: Manifest | Mapping[str, Any], *, items: Iterable[str] | None = None) -> str:
    r"""Give the fingerprint of a schema: equal for a checkpoint and for what would be saved as that checkpoint.

    It is the XXH3-128 of one line of JSON for each leaf, `[item, path, kind, shape, dtype, implementation]` without
    spaces, ordered by item and path, each line with `\n` at its end. `kind` is that of `Leaf`; shape and dtype of a
    random key are those of its data, and the implementation of anything else is empty. Items that are plain JSON, or
    an iterator, have no leaves and do not count.

    Args:
        what: A manifest, or item -> tree of arrays, abstract ones included (`jax.ShapeDtypeStruct`).
        items: Only these.

    Returns:
        32 hexadecimal digits.

    Raises:
        CheckpointError: An item is not there, or leaves are no arrays; all are listed by path.

    Example:
        >>> import jax
        >>> fingerprint({"params": {"w": jax.ShapeDtypeStruct((3, 4), "bfloat16")}})
        '8adf25bee7768b9556aa435e30841aa4'
    """
    there = what.items if isinstance(what, Manifest) else what
    wanted = list(there if items is None else items)
    lacking = [f"no item {name!r}{nearest(name, there)}" for name in wanted if name not in there]
    if lacking:
        raise CheckpointError("; ".join(lacking) + f"; there are {', '.join(map(str, there)) or 'none'}")
    if isinstance(what, Manifest):
        rows = [_row(name, leaf) for name in wanted for leaf in what.items[name].leaves]
    else:
        rows = list(_of_trees({name: what[name] for name in wanted}))
    lines = [_line(*row) for row in sorted(rows, key=lambda row: row[:2])]
    return digest.of("".join(lines).encode())


def _line(item: str, path: str, kind: str, shape: Iterable[int], dtype: str, impl: str) -> str:
    """Write one line of JSON; for thousands, faster than an encoder that is set up for each."""
    texts = [quoted(text) for text in (item, path, kind, dtype, impl)]
    return f"[{texts[0]},{texts[1]},{texts[2]},[{','.join(map(str, shape))}],{texts[3]},{texts[4]}]\n"


def describe(leaf: Leaf) -> str:
    """Say what a leaf is.

    Example:
        >>> describe(Leaf(path="w", kind="array", shape=(3, 4), dtype="float32", where="packed"))
        'float32[3, 4]'
        >>> describe(Leaf(path="rate", kind="python", dtype="float", where="inline", value=0.5))
        'float 0.5'
    """
    if leaf.kind == "python":
        text = repr(value_of(leaf))
        return f"{leaf.dtype} {text if len(text) <= _LONG else text[:_LONG] + '...'}"
    return _array(leaf.dtype, leaf.shape) + (f" key of {leaf.impl}" if leaf.kind == "key" else "")


@functools.lru_cache(maxsize=1024)
def _array(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def value_of(leaf: Leaf) -> Any:
    """Give the value of an inline leaf, which stands in the manifest.

    Example:
        >>> value_of(Leaf(path="", kind="python", dtype="complex", where="inline", value=[1.0, "inf"]))
        (1+infj)
    """
    if leaf.dtype == "complex":
        return complex(*map(float, leaf.value))
    if leaf.dtype == "bytes":
        return base64.b64decode(leaf.value)
    return {"bool": bool, "int": int, "float": float, "str": str}[leaf.dtype](leaf.value)


def _row(item: str, leaf: Leaf) -> _Row:
    return item, leaf.path, leaf.kind, list(leaf.shape), leaf.dtype, leaf.impl or ""


def _of_trees(items: Mapping[str, Any]) -> Iterator[_Row]:
    from styrax.checkpoint.items import is_iterator, is_json, state_of
    from styrax.core import tree

    problems = []
    for name, value in items.items():
        if is_json(value) or is_iterator(value):
            continue
        for path, leaf in tree.flatten(state_of(value)).items():
            described = _described(leaf)
            if described is None:
                problems.append(f"{leaf_name(name, path)}: is {type(leaf).__name__}, no array or Python number")
            else:
                yield name, path, *described
    if problems:
        raise CheckpointError("\n  ".join(["these have no shape and dtype:", *problems]))


def _described(leaf: Any) -> tuple[str, list[int], str, str] | None:
    """Give kind, shape, dtype and implementation, as a manifest has them."""
    import jax
    import numpy as np

    if type(leaf) in (bool, int, float, complex, str, bytes):
        return "python", [], type(leaf).__name__, ""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return None
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        names = []

        def data_of(key: Any) -> Any:  # jax answers for arrays only, so an abstract key is made one
            names.append(str(jax.random.key_impl(key)))
            return jax.random.key_data(key)

        data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return "key", list(data.shape), data.dtype.name, names[-1]
    kind = "scalar" if isinstance(leaf, np.generic) else "array"
    return kind, list(leaf.shape), np.dtype(leaf.dtype).name, ""
