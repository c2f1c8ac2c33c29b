"""Grouped-query attention over the past of the same document."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.fence import fence, on_cpu
from styrax.models.layers.linear import Linear
from styrax.models.layers.rope import Rotation, rotate

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key

    from styrax.core import Policy
    from styrax.models.cache import KVCache


_SMALLEST_BLOCK = 64
_MOST_BLOCKS = 8


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


class Scope(NamedTuple):
    """What all blocks share in one call.

    Attributes:
        rotation: The angles of this call's positions.
        mask: For this call's queries.
        slots: Where in the cache this call's keys go; `None` without a cache.
    """

    rotation: Rotation
    mask: Mask
    slots: Int[Array, "batch seq"] | None = None


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


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    mask: Mask,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    r"""$\mathrm{softmax}(c\, q k^\top)\, v$ over the allowed keys, the softmax in float32.

    Query head $h$ uses key and value head $\lfloor h K / H \rfloor$. Keys and values are head-major, as a
    cache keeps them. A padding query gives 0; a key that is not to be read may hold NaN.

    On a CPU a causal product is made in blocks of queries, each with the keys up to its end: that leaves out
    nearly half of the work, and the scores of a block stay in the cache.

    Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1; Ainslie et al., "GQA" (2023).

    Args:
        query: $q$.
        key: $k$, with $K$ heads, a divisor of the $H$ query heads.
        value: $v$.
        mask: The allowed pairs.
        causal: Promises that query $t$ is allowed keys up to the $t$-th only.
        scale: $c$; `None` means $1 / \sqrt{d}$ for heads of width $d$.

    Returns:
        In the dtype of `value`.

    Example:
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
    size = max(_SMALLEST_BLOCK, -(-seq // _MOST_BLOCKS)) if causal and on_cpu() else seq
    parts = []
    for start in range(0, seq, size):
        stop = min(start + size, seq)
        keys = slice(stop if causal else None)
        allowed = mask.allowed[:, start:stop, keys]
        parts.append(_attend(query[:, start:stop], key[:, :, keys], value[:, :, keys], allowed, factor))
    out = jnp.concatenate(parts, axis=1).reshape(batch, seq, heads, dim)
    return out if mask.queries is None else jnp.where(mask.queries[:, :, None, None], out, 0)


def _attend(
    query: Float[Array, "batch seq kv_heads group head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    allowed: Bool[Array, "batch seq keys"],
    scale: float,
) -> Float[Array, "batch seq kv_heads group head_dim"]:
    # Float32 sums of bfloat16 products; without the preset, the backward products would be float32 ones.
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if query.dtype == jnp.bfloat16 else None
    scores = jnp.einsum("btkgd,bksd->bkgts", query, key, precision=precision, preferred_element_type="float32")
    scaled = scores * scale
    scaled = jnp.where(allowed[:, None, None], scaled, jnp.finfo("float32").min)
    weights = jax.nn.softmax(scaled, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bksd->btkgd", weights, value)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions.

    Attributes:
        q: `[dim, heads * head_dim]`.
        k: `[dim, kv_heads * head_dim]`.
        v: The same shape.
        o: `[heads * head_dim, dim]`.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        q, k, v, o = jax.random.split(key, 4)
        self.q = Linear(dim, heads * head_dim, std=std, policy=policy, key=q)
        self.k = Linear(dim, kv_heads * head_dim, std=std, policy=policy, key=k)
        self.v = Linear(dim, kv_heads * head_dim, std=std, policy=policy, key=v)
        self.o = Linear(heads * head_dim, dim, std=residual_std, policy=policy, key=o)
        self.head_dim = head_dim
        self.scale = scale

    def __call__(
        self, x: Float[Array, "... dim"], scope: Scope, layer: int | Int[Array, ""], cache: KVCache | None
    ) -> tuple[Float[Array, "... dim"], KVCache | None]:
        """Attend.

        Args:
            x: `[batch, seq, dim]` or `[batch * seq, dim]`, normalised.
            scope: Angles, mask and cache slots.
            layer: Which part of the cache is this layer's.
            cache: Keys and values of earlier calls.

        Returns:
            The result in the shape of `x`, and the cache with this call's keys and values.
        """
        seq = scope.rotation.cos.shape[1]
        query, key, value = (
            linear(x).reshape(-1, seq, linear.kernel.shape[-1] // self.head_dim, self.head_dim)
            for linear in (self.q, self.k, self.v)
        )
        query, key = rotate(query, scope.rotation), rotate(key, scope.rotation)
        if cache is None or scope.slots is None:
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        else:
            cache = cache.write(layer, scope.slots, key, value)
            keys, values = cache.keys[layer], cache.values[layer]
        out = attend(query, keys, values, scope.mask, causal=cache is None, scale=self.scale)
        return self.o(fence(out.reshape(*x.shape[:-1], -1))), cache
