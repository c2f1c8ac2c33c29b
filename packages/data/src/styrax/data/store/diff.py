"""In what two token stores differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.data.hashing import hash64
from styrax.data.store.tokens import TokenStore

if TYPE_CHECKING:
    from jaxtyping import Bool, Int64, UInt64

    from styrax.data.store.megatron import MegatronStore

LISTED = 20
BLOCK_TOKENS = 1 << 20


def diff_stores(
    a: TokenStore | MegatronStore, b: TokenStore | MegatronStore, *, listed: int = LISTED
) -> dict[str, Any]:
    """Compare two stores, document by document.

    Documents are matched by id and compared token by token (and by the mask of the tokens that carry loss).
    Stores of one fingerprint hold the same and are not read.

    Args:
        a: A store.
        b: Another one.
        listed: At most so many documents are named in each list, and items of a long setting shown; counts are of all.

    Returns:
        JSON:

        - `same`: whether the fingerprints are equal;
        - `a`, `b`: path, fingerprint, and how many documents, tokens and bytes;
        - `tokenizer`, `settings`: by name, what differs in the tokenizer and in how the stores were built, as
          `{"a": ..., "b": ...}`, without the side that has no such setting;
        - `only_in_a`, `only_in_b`: `count` and `ids`;
        - `changed`: documents in both whose tokens differ: `count`, and `documents` with `id`, `tokens` of both and
          `first`, the first token that differs;
        - `masks`: documents with equal tokens whose masks differ: `count` and `ids`;
        - `moved`: whether documents in both come in another order.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> folder, texts = tempfile.mkdtemp(), {"a": {"x": "Hi", "y": "one"}, "b": {"y": "once", "z": "Hi"}}
        >>> a, b = (write_store(f"{folder}/{name}", texts[name], ByteTokenizer()) for name in "ab")
        >>> found = diff_stores(a, b)
        >>> found["only_in_a"], found["changed"]["documents"]
        ({'count': 1, 'ids': ['x']}, [{'id': 'y', 'tokens': {'a': 4, 'b': 5}, 'first': 2}])
    """
    same = a.fingerprint == b.fingerprint
    none = np.zeros(0, np.int64)
    only_a, only_b, both_a, both_b = (none,) * 4 if same else _match(_names(a), _names(b))
    changed, masks = _compare(a, b, both_a, both_b)
    return {
        "same": same,
        "a": _about(a),
        "b": _about(b),
        "tokenizer": _settings(a.meta["tokenizer"], b.meta["tokenizer"], listed),
        "settings": _settings(a.meta.get("build") or {}, b.meta.get("build") or {}, listed),
        "only_in_a": _ids(a, only_a, listed),
        "only_in_b": _ids(b, only_b, listed),
        "changed": {
            "count": int(np.count_nonzero(changed)),
            "documents": [
                _change(a, b, int(i), int(j))
                for i, j in zip(both_a[changed][:listed], both_b[changed][:listed], strict=True)
            ],
        },
        "masks": _ids(a, both_a[masks], listed),
        "moved": bool((np.diff(both_b) < 0).any()),
    }


def _about(store: TokenStore | MegatronStore) -> dict[str, Any]:
    return {
        "path": str(store.path),
        "fingerprint": store.fingerprint,
        "documents": len(store),
        "tokens": store.num_tokens,
        "bytes": store.meta["num_bytes"],
    }


def _names(store: TokenStore | MegatronStore) -> UInt64[np.ndarray, " docs"]:
    """Hash the ids; a token store holds the hashes."""
    if isinstance(store, TokenStore):
        return store.docs["id_hash"]
    return np.fromiter((hash64("split", name) for name in store.ids), np.uint64, len(store))


def _match(
    a: UInt64[np.ndarray, " docs"], b: UInt64[np.ndarray, " docs"]
) -> tuple[Int64[np.ndarray, " only_a"], Int64[np.ndarray, " only_b"], np.ndarray, np.ndarray]:
    """Say which documents are in one store alone, and which pairs are in both, all in the order of their stores."""
    _, both_a, both_b = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    order = np.argsort(both_a)
    only_a = np.setdiff1d(np.arange(len(a)), both_a, assume_unique=True)
    only_b = np.setdiff1d(np.arange(len(b)), both_b, assume_unique=True)
    return only_a, only_b, both_a[order], both_b[order]


def _compare(
    a: TokenStore | MegatronStore, b: TokenStore | MegatronStore, in_a: np.ndarray, in_b: np.ndarray
) -> tuple[Bool[np.ndarray, " both"], Bool[np.ndarray, " both"]]:
    """Say of which pairs the tokens differ, and of which of the others the masks do."""
    lengths = a.docs["tokens"][in_a]
    changed = lengths != b.docs["tokens"][in_b]
    masks = np.zeros(len(in_a), bool)
    equal = np.flatnonzero(~changed)
    ends = np.cumsum(lengths[equal])
    first = 0
    while first < len(equal):
        # As many whole documents as fit, and one at least.
        start = ends[first] - lengths[equal[first]]
        last = max(first + 1, int(np.searchsorted(ends, start + BLOCK_TOKENS, "right")))
        pairs = equal[first:last]
        begins = ends[first:last] - lengths[pairs] - start
        where_a, where_b = (
            np.repeat(store.docs["start"][docs[pairs]] - begins, lengths[pairs]) + np.arange(ends[last - 1] - start)
            for store, docs in ((a, in_a), (b, in_b))
        )
        changed[pairs] = np.logical_or.reduceat(a.tokens[where_a] != b.tokens[where_b], begins)
        if a.mask is not None or b.mask is not None:
            one, other = (1 if m is None else m[where] for m, where in ((a.mask, where_a), (b.mask, where_b)))
            masks[pairs] = np.logical_or.reduceat(one != other, begins)
        first = last
    return changed, masks & ~changed


def _change(a: TokenStore | MegatronStore, b: TokenStore | MegatronStore, i: int, j: int) -> dict[str, Any]:
    one, other = a[i], b[j]
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    first = int(differ[0]) if len(differ) else shorter
    return {"id": a.ids[i], "tokens": {"a": len(one), "b": len(other)}, "first": first}


def _ids(store: TokenStore | MegatronStore, docs: np.ndarray, listed: int) -> dict[str, Any]:
    return {"count": len(docs), "ids": [store.ids[i] for i in docs[:listed].tolist()]}


def _settings(a: Mapping[str, Any], b: Mapping[str, Any], listed: int, prefix: str = "") -> dict[str, Any]:
    """Give what differs, by dotted name."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys([*a, *b]):
        sides = {side: settings[name] for side, settings in (("a", a), ("b", b)) if name in settings}
        values = list(sides.values())
        if len(values) == 2 and all(isinstance(value, Mapping) for value in values):
            found |= _settings(values[0], values[1], listed, f"{prefix}{name}.")
        elif len(values) == 1 or values[0] != values[1]:
            found[f"{prefix}{name}"] = {side: _short(value, listed) for side, value in sides.items()}
    return found


def _short(value: Any, listed: int) -> Any:
    if isinstance(value, list) and len(value) > listed:
        return {"count": len(value), "first": value[:listed]}
    return value
