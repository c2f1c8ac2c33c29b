"""From the tokens of a document or picture to one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.encoder_block import INIT_STD, Attention, FeedForward
from styrax.models.layers.fence import rows
from styrax.models.layers.linear import Linear, normal
from styrax.models.layers.mask import Mask
from styrax.models.layers.norm import Norm

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Key

    from styrax.core import Policy
    from styrax.models.encoder_config import EncoderConfig


class Pooling(nnx.Module):
    r"""One vector for each group of tokens, as the config's `pool` says.

    "map" is $a + \mathrm{mlp}(\mathrm{norm}(a))$ with $a$ the attention of a learned query to the group's tokens.

    Source: Zhai et al., "Scaling Vision Transformers" (2022), section 3.1, for "map".

    Attributes:
        probe: The learned query, `[dim]`, and `attn`, `norm` and `mlp`; only for "map".
        dense: The projection, if there is one.
    """

    def __init__(self, config: EncoderConfig, *, policy: Policy, key: Key[Array, ""]):
        pool, dim = config.pool, config.embed_dim
        keys = jax.random.split(key, 4)
        if pool.by == "map":
            heads, width = config.num_heads, config.mlp_width
            shared = {"residual_std": INIT_STD, "policy": policy}
            self.probe = nnx.Param(normal(keys[0], (dim,), INIT_STD, policy))
            self.attn = Attention(dim, heads, qkv_bias=True, key=keys[1], **shared)
            self.norm = Norm(dim, config.norm, policy=policy)
            self.mlp = FeedForward(dim, width, config.activation, key=keys[2], **shared)
        if pool.dense != "none":
            self.dense = Linear(dim, pool.dim or dim, std=INIT_STD, policy=policy, key=keys[3], bias=True)
        self.config = pool
        self.policy = policy

    def __call__(
        self, x: Float[Array, "batch seq dim"], members: Bool[Array, "batch groups seq"]
    ) -> Float[Array, "batch groups width"]:
        """Pool.

        Args:
            x: The last tokens, finite everywhere.
            members: Which tokens a group has. A vector of a group without any means nothing, but is finite.

        Returns:
            In the compute dtype; normalised, float32.
        """
        match self.config.by:
            case "map":
                out = self._attended(x, members)
            case "mean":
                total = jnp.einsum("bgs,bsd->bgd", members.astype("float32"), x.astype("float32"))
                out = (total / jnp.maximum(members.sum(-1, keepdims=True), 1)).astype(x.dtype)
            case by:
                first = jnp.argmax(members, axis=-1)
                last = members.shape[-1] - 1 - jnp.argmax(members[..., ::-1], axis=-1)
                out = jnp.take_along_axis(x, (first if by == "cls" else last)[..., None], axis=1)
        if self.config.dense != "none":
            out = self.dense(out)
            out = jnp.tanh(out) if self.config.dense == "tanh" else out
        return normalise(out.astype("float32")) if self.config.normalise else out

    def _attended(
        self, x: Float[Array, "batch seq dim"], members: Bool[Array, "batch groups seq"]
    ) -> Float[Array, "batch groups dim"]:
        shape = (*members.shape[:2], x.shape[-1])
        query = jnp.broadcast_to(self.probe[...].astype(x.dtype), shape)
        out = self.attn(rows(query), rows(x), Mask(members), len(x))
        return (out + self.mlp(self.norm(out))).reshape(shape)


def normalise(x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
    r"""Divide by the length: $x / \max(\lVert x \rVert, 10^{-12})$.

    Args:
        x: In float32. At 0 the gradient is finite.

    Example:
        >>> [round(float(y), 3) for y in normalise(jnp.array([3.0, 4.0]))]
        [0.6, 0.8]
    """
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))
