"""Which token sees which."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pattern:
    r"""What a mask of tokens among themselves allows, in parts: a kernel needs no table of all pairs.

    Token $t$ sees token $s$ of its row if all of this holds. The tokens of a document stand together.

    Attributes:
        segments: `[batch, seq]`, the document of each token, which must be the same, and 0 at padding, which sees
            nothing and is not seen; `None` means one document per row.
        place: `[batch or 1, seq]`, counted from 0 in each document; only of use for chunks.
        causal: $s \le t$.
        window: $W$, if any: $t - s < W$.
        chunk: $C$, if any: $\lfloor t / C \rfloor = \lfloor s / C \rfloor$, counted as `place` does.
    """

    segments: Int[Array, "batch seq"] | None = None
    place: Int[Array, "batch seq"] | None = None
    causal: bool = field(default=True, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    chunk: int | None = field(default=None, metadata={"static": True})

    def groups(self) -> Int[Array, "batch seq"] | None:
        """Number tokens so that those of one document, and of one chunk of it, are equal; 0 is padding.

        Returns:
            `[batch or 1, seq]` int32; `None` if all tokens of a row are equal.

        Example:
            >>> Pattern(segments=jnp.array([[5, 5, 5, 7, 0]]), place=jnp.array([[0, 1, 2, 0, 0]]), chunk=2).groups()
            Array([[1, 1, 2, 3, 0]], dtype=int32)
        """
        segments = None if self.segments is None else self.segments.astype("int32")
        if self.chunk is None or self.place is None:
            return segments
        chunk = self.place // self.chunk
        begins = _begins(chunk) if segments is None else _begins(chunk) | _begins(segments)
        groups = jnp.cumsum(begins, axis=1, dtype="int32")
        return groups if segments is None else jnp.where(segments == 0, 0, groups)


class Mask(NamedTuple):
    """Which query may look at which key.

    Attributes:
        allowed: `[batch or 1, seq, keys]`.
        queries: `[batch, seq]`, false at padding, whose output is 0; `None` when there is none.
        keys: `[batch, keys]`, false where a key is not to be read at all; `None` when all are.
        pattern: The same in parts, if tokens look at one another; what changes `allowed` changes it too. `None` means
            that it has no such parts, as with a cache.
    """

    allowed: Bool[Array, "batch seq keys"]
    queries: Bool[Array, "batch seq"] | None = None
    keys: Bool[Array, "batch keys"] | None = None
    pattern: Pattern | None = None

    def within(
        self,
        queries: Int[Array, "batch seq"],
        keys: Int[Array, "batch keys"],
        *,
        window: int | None = None,
        chunk: int | None = None,
    ) -> Mask:
        r"""Allow key $s$ to query $t$ only if near: $t - s < W$, or $\lfloor t / C \rfloor = \lfloor s / C \rfloor$.

        Args:
            queries: Places $t$; only differences count for the window, for chunks it is positions in the document.
            keys: Places $s$.
            window: $W$, so a query sees itself and $W - 1$ before it; `None` means no window.
            chunk: $C$; `None` means no chunks.

        Example:
            >>> place = jnp.arange(3)[None]
            >>> document_mask(3).within(place, place, window=2).allowed.astype(int).tolist()
            [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
        """
        allowed, query, key, pattern = self.allowed, queries[:, :, None], keys[:, None, :], self.pattern
        if window is not None:
            allowed = allowed & (query - key < window)
            if pattern is not None:
                least = window if pattern.window is None else min(window, pattern.window)
                pattern = replace(pattern, window=least)
        if chunk is not None:
            allowed = allowed & (query // chunk == key // chunk)
            # Chunks of two sizes have no pattern.
            one = pattern is not None and pattern.chunk in (None, chunk)
            pattern = replace(pattern, chunk=chunk, place=queries) if pattern is not None and one else None
        return self._replace(allowed=allowed, pattern=pattern)


def document_mask(seq: int, segment_ids: Int[Array, "batch seq"] | None = None) -> Mask:
    r"""Allow query $t$ to see key $s$ iff $s \le t$ and both have the same segment, which is not 0.

    Args:
        seq: Tokens per row.
        segment_ids: The document of each token, from 1; 0 is padding. `None` means one document per row.

    Example:
        >>> document_mask(3, jnp.array([[1, 2, 0]])).allowed.astype(int).tolist()
        [[[1, 0, 0], [0, 1, 0], [0, 0, 0]]]
    """
    causal = jnp.tril(jnp.ones((1, seq, seq), bool))
    if segment_ids is None:
        return Mask(causal, pattern=Pattern())
    real = segment_ids != 0
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return Mask(causal & same & real[:, :, None], real, real, Pattern(segments=segment_ids))


def document_positions(seq: int, segment_ids: Int[Array, "batch seq"] | None = None) -> Int[Array, "batch seq"]:
    """Count the tokens of each document from 0.

    Args:
        seq: Tokens per row.
        segment_ids: The document of each token; where it changes, one begins. `None` means one document per row.

    Returns:
        `[batch or 1, seq]`.

    Example:
        >>> document_positions(5, jnp.array([[0, 1, 1, 2, 2]])).tolist()
        [[0, 0, 1, 0, 1]]
    """
    place = jnp.arange(seq)[None]
    if segment_ids is None:
        return place
    return place - jax.lax.cummax(jnp.where(_begins(segment_ids), place, 0), axis=1)


def _begins(ids: Int[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    return ids != jnp.pad(ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
