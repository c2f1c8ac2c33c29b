"""Which token sees which."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Int


class Mask(NamedTuple):
    """Which query may look at which key.

    Attributes:
        allowed: `[batch or 1, seq, keys]`.
        queries: `[batch, seq]`, false at padding, whose output is 0; `None` when there is none.
        keys: `[batch, keys]`, false where a key is not to be read at all; `None` when all are.
    """

    allowed: Bool[Array, "batch seq keys"]
    queries: Bool[Array, "batch seq"] | None = None
    keys: Bool[Array, "batch keys"] | None = None

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
        allowed, query, key = self.allowed, queries[:, :, None], keys[:, None, :]
        if window is not None:
            allowed = allowed & (query - key < window)
        if chunk is not None:
            allowed = allowed & (query // chunk == key // chunk)
        return self._replace(allowed=allowed)


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
        return Mask(causal)
    real = segment_ids != 0
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return Mask(causal & same & real[:, :, None], real)


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
    begins = segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
