"""Softmax attention over masked keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from styrax.models.layers.fence import on_cpu

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

    from styrax.models.layers.mask import Mask

_SMALLEST_BLOCK = 64
_MOST_BLOCKS = 8


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    mask: Mask,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    window: int | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    r"""$\mathrm{softmax}(t \tanh(c\, q k^\top / t))\, v$ over the allowed keys, the softmax in float32.

    Query head $h$ uses key and value head $\lfloor h K / H \rfloor$. Keys and values are head-major, as a
    cache keeps them. A padding query gives 0; a key that is not to be read may hold NaN.

    On a CPU a causal product is made in blocks of queries, each with the keys up to its end: that leaves out
    nearly half of the work, and the scores of a block stay in the cache.

    Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1; Ainslie et al., "GQA" (2023); Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks" (2023).

    Args:
        query: $q$.
        key: $k$, with $K$ heads, a divisor of the $H$ query heads.
        value: $v$, whose heads may have another width.
        mask: The allowed pairs.
        causal: Promises that query $t$ is allowed keys up to the $t$-th only.
        scale: $c$; `None` means $1 / \sqrt{d}$ for heads of width $d$.
        softcap: $t$; `None` means no cap, just $c\, q k^\top$.
        sinks: A score per query head that stands beside those of the keys and has no value.
        window: Promises, beside `causal`, that query $t$ is allowed only so many keys, up to the $t$-th.

    Returns:
        In the dtype of `value`.

    Example:
        >>> from styrax.models.layers.mask import document_mask
        >>> key = value = jnp.array([[[[1.0, 0.0], [0.0, 5.0]]]])
        >>> attend(jnp.ones((1, 2, 2, 2)), key, value, document_mask(2))[0, 0].tolist()
        [[1.0, 0.0], [1.0, 0.0]]
    """
    batch, seq, heads, dim = query.shape
    query = query.reshape(batch, seq, key.shape[1], heads // key.shape[1], dim)
    if mask.keys is not None:
        readable = mask.keys[:, None, :, None]
        key, value = jnp.where(readable, key, 0), jnp.where(readable, value, 0)
    factor = dim**-0.5 if scale is None else scale
    blocked = causal and on_cpu()
    size = max(_SMALLEST_BLOCK, -(-seq // _MOST_BLOCKS)) if blocked else seq
    parts = []
    for start in range(0, seq, size):
        stop = min(start + size, seq)
        first = max(0, start + 1 - window) if blocked and window is not None else 0
        keys = slice(first, stop) if causal else slice(None)
        allowed = mask.allowed[:, start:stop, keys]
        part = query[:, start:stop], key[:, :, keys], value[:, :, keys]
        parts.append(_attend(*part, allowed, factor, softcap, sinks))
    out = jnp.concatenate(parts, axis=1).reshape(batch, seq, heads, value.shape[-1])
    return out if mask.queries is None else jnp.where(mask.queries[:, :, None, None], out, 0)


def _attend(
    query: Float[Array, "batch seq kv_heads group head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    allowed: Bool[Array, "batch seq keys"],
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq kv_heads group value_dim"]:
    # Float32 sums of bfloat16 products; without the preset, the backward products would be float32 ones.
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if query.dtype == jnp.bfloat16 else None
    scores = jnp.einsum("btkgd,bksd->bkgts", query, key, precision=precision, preferred_element_type="float32")
    scaled = scores * scale
    if softcap is not None:
        scaled = softcap * jnp.tanh(scaled / softcap)
    scaled = jnp.where(allowed[:, None, None], scaled, jnp.finfo("float32").min)
    if sinks is None:
        weights = jax.nn.softmax(scaled, axis=-1)
    else:
        sink = sinks.astype("float32").reshape(1, *scaled.shape[1:3], 1, 1)
        sink = jnp.broadcast_to(sink, (*scaled.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scaled, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bkgts,bksd->btkgd", weights.astype(value.dtype), value)
