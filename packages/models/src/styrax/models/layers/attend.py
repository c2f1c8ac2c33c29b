"""Softmax attention over masked keys, by the implementation that a config names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from styrax.models.attention import AUTO, Call, choose, get
from styrax.models.layers.fence import platform
from styrax.models.layers.meshes import mesh_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

    from styrax.models.layers.mask import Mask


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str = AUTO,
) -> Float[Array, "batch seq heads value_dim"]:
    r"""$\mathrm{softmax}(t \tanh(c\, q k^\top / t))\, v$ over the allowed keys, the softmax in float32.

    Query head $h$ uses key and value head $\lfloor h K / H \rfloor$. Keys and values are head-major, as a
    cache keeps them. A query that sees nothing gives 0, with or without sinks. What stands at a key or a value that no
    query may read, or at a query that sees nothing, reaches no output and no gradient, even NaN.

    Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1; Ainslie et al., "GQA" (2023); Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks" (2023).

    Args:
        query: $q$.
        key: $k$, with $K$ heads, a divisor of the $H$ query heads.
        value: $v$, whose heads may have another width.
        mask: The allowed pairs.
        scale: $c$; `None` means $1 / \sqrt{d}$ for heads of width $d$.
        softcap: $t$; `None` means no cap, just $c\, q k^\top$.
        sinks: A score per query head that stands beside those of the keys and has no value.
        implementation: One of `styrax.models.attention.names`, or "auto", which takes the fastest one that can do it
            on the platform that this is compiled for.

    Returns:
        In the dtype of `value`.

    Raises:
        UserError: The named implementation cannot do it; all reasons are listed.

    Example:
        >>> from styrax.models.layers.mask import document_mask
        >>> key = value = jnp.array([[[[1.0, 0.0], [0.0, 5.0]]]])
        >>> attend(jnp.ones((1, 2, 2, 2)), key, value, document_mask(2))[0, 0].tolist()
        [[1.0, 0.0], [1.0, 0.0]]
    """
    queries, keys = _readable(mask)
    if queries is not None:
        query = jnp.where(queries[:, :, None, None], query, 0)
    if keys is not None:
        readable = keys[:, None, :, None]
        key, value = jnp.where(readable, key, 0), jnp.where(readable, value, 0)
    call = _call(query, key, value, mask, softcap, sinks)
    implemented = get(choose(implementation, call)).attend
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    out = implemented(query, key, value, mask, scale=factor, softcap=softcap, sinks=sinks)
    return out if queries is None else jnp.where(queries[:, :, None, None], out, 0)


def _readable(mask: Mask) -> tuple[Bool[Array, "batch seq"] | None, Bool[Array, "batch keys"] | None]:
    """Give the queries that see something and the keys that are seen; a table of pairs may not have said which."""
    if mask.pattern is not None:
        return mask.queries, mask.keys
    queries = mask.allowed.any(axis=2) if mask.queries is None else mask.queries
    return queries, mask.allowed.any(axis=1) if mask.keys is None else mask.keys


def _call(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Call:
    pattern, here = mask.pattern, mesh_of(query)
    return Call(
        platform=platform(query, key),
        dtype=jnp.result_type(query, key, value).name,
        seq=query.shape[1],
        keys=key.shape[2],
        heads=query.shape[2],
        kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        patterned=pattern is not None,
        causal=pattern is not None and pattern.causal,
        window=None if pattern is None else pattern.window,
        chunk=None if pattern is None else pattern.chunk,
        segments=pattern is not None and pattern.segments is not None,
        context=here.ways(here.named("batch", "seq")[1]),
        softcap=softcap,
        sinks=sinks is not None,
    )
