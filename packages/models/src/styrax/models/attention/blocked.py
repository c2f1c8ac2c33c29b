"""Attention in blocks of queries, for a CPU: the scores of a block stay in its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from styrax.models.attention.reference import dense, grouped, supports

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.layers.mask import Mask

__all__ = ["attend", "supports"]

_SMALLEST_BLOCK = 64
_MOST_BLOCKS = 8


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    mask: Mask,
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attend; see `styrax.models.layers.attend.attend`.

    Each block of a causal product has the keys up to its end, and of a window no earlier ones than its first query
    sees: that leaves out nearly half of the work, or more. Anything else is one block.

    Args:
        query: And the others: as there.
    """
    seq, pattern = query.shape[1], mask.pattern
    causal = pattern is not None and pattern.causal
    window = pattern.window if pattern is not None else None
    size = max(_SMALLEST_BLOCK, -(-seq // _MOST_BLOCKS)) if causal else seq
    parts, groups = [], grouped(query, key)
    for start in range(0, seq, size):
        stop = min(start + size, seq)
        first = max(0, start + 1 - window) if causal and window is not None else 0
        keys = slice(first, stop) if causal else slice(None)
        part = groups[:, start:stop], key[:, :, keys], value[:, :, keys]
        parts.append(dense(*part, mask.allowed[:, start:stop, keys], scale, softcap, sinks))
    return jnp.concatenate(parts, axis=1).reshape(*query.shape[:-1], value.shape[-1])
