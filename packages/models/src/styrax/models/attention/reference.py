"""Attention by its definition, with all scores at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

    from styrax.models.attention.call import Call
    from styrax.models.layers.mask import Mask


def supports(call: Call) -> list[str]:
    """It can do everything.

    Args:
        call: What is asked for.
    """
    del call
    return []


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

    Args:
        query: And the others: as there.
    """
    out = dense(grouped(query, key), key, value, mask.allowed, scale, softcap, sinks)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def grouped(
    query: Float[Array, "batch seq heads head_dim"], key: Float[Array, "batch kv_heads keys head_dim"]
) -> Float[Array, "batch seq kv_heads group head_dim"]:
    """Put the query heads of one key head together.

    Args:
        query: All heads.
        key: Says how many key heads there are.
    """
    batch, seq, heads, dim = query.shape
    return query.reshape(batch, seq, key.shape[1], heads // key.shape[1], dim)


def dense(
    query: Float[Array, "batch seq kv_heads group head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    allowed: Bool[Array, "batch seq keys"],
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq kv_heads group value_dim"]:
    """Attend with one table of scores, in float32.

    Args:
        query: From `grouped`.
        key: Keys.
        value: Values.
        allowed: The allowed pairs.
        scale: As for `styrax.models.layers.attend.attend`, and so the others.
        softcap: As there.
        sinks: As there.
    """
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
    weights = weights.astype(value.dtype)
    if query.shape[1] > 1:
        return jnp.einsum("bkgts,bksd->btkgd", weights, value)
    # A lone query is several times faster on a CPU in this order, and with float32 sums.
    wide: dict[str, Any] = {"precision": precision, "preferred_element_type": "float32"}
    out = jnp.einsum("bkgts,bksd->bkgtd", weights, value, **wide).astype(value.dtype)
    return out.reshape(*query.shape[:-1], value.shape[-1])
