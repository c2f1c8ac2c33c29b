"""One layer of an encoder, and the mask that lets tokens look both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.activation import activate
from styrax.models.layers.attend import attend
from styrax.models.layers.dropout import dropout
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear
from styrax.models.layers.mask import Mask, Pattern
from styrax.models.layers.norm import Norm

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models.encoder_config import Activation, EncoderConfig

INIT_STD = 0.02


def segment_mask(seq: int, segment_ids: Int[Array, "batch seq"] | None = None) -> Mask:
    """Allow a query to see every key of its own segment, which is not 0.

    Args:
        seq: Tokens per row.
        segment_ids: The document of each token, from 1; 0 is padding. `None` means one document per row.

    Example:
        >>> segment_mask(3, jnp.array([[1, 1, 0]])).allowed.astype(int).tolist()
        [[[1, 1, 0], [1, 1, 0], [0, 0, 0]]]
    """
    if segment_ids is None:
        return Mask(jnp.ones((1, seq, seq), bool), pattern=Pattern(causal=False))
    real = segment_ids != 0
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return Mask(same & real[:, :, None], real, real, Pattern(segments=segment_ids, causal=False))


class Attention(nnx.Module):
    """Attention of some tokens to others, or to themselves, with biases and without positions.

    Attributes:
        q: `[dim, dim]`; and `k`, `v` and `o` alike.
    """

    def __init__(
        self, dim: int, heads: int, *, qkv_bias: bool, residual_std: float, policy: Policy, key: Key[Array, ""]
    ):
        keys = jax.random.split(key, 4)
        self.q = Linear(dim, dim, std=INIT_STD, policy=policy, key=keys[0], bias=qkv_bias)
        self.k = Linear(dim, dim, std=INIT_STD, policy=policy, key=keys[1], bias=qkv_bias)
        self.v = Linear(dim, dim, std=INIT_STD, policy=policy, key=keys[2], bias=qkv_bias)
        self.o = Linear(dim, dim, std=residual_std, policy=policy, key=keys[3], bias=True)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "... dim"], context: Float[Array, "... dim"], mask: Mask, batch: int
    ) -> Float[Array, "... dim"]:
        """Attend.

        Args:
            x: `[batch, seq, dim]` or `[batch * seq, dim]`, what queries are made from.
            context: What keys and values are made from, alike.
            mask: Which query sees which key.
            batch: Rows.

        Returns:
            In the shape of `x`.
        """
        shape = (batch, -1, self.heads, x.shape[-1] // self.heads)
        query = self.q(x).reshape(shape)
        key, value = (each(context).reshape(shape).swapaxes(1, 2) for each in (self.k, self.v))
        return self.o(fence(attend(query, key, value, mask).reshape(x.shape)))


class FeedForward(nnx.Module):
    r"""$y = a(x W_u + b_u)\, W_d + b_d$.

    Attributes:
        up: $W_u$ and $b_u$.
        down: $W_d$ and $b_d$.
    """

    def __init__(
        self, dim: int, hidden: int, activation: Activation, *, residual_std: float, policy: Policy, key: Key[Array, ""]
    ):
        up, down = jax.random.split(key)
        self.up = Linear(dim, hidden, std=INIT_STD, policy=policy, key=up, bias=True)
        self.down = Linear(hidden, dim, std=residual_std, policy=policy, key=down, bias=True)
        self.activation: Activation = activation

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Transform every position by itself.

        Args:
            x: In the compute dtype.
        """
        return self.down(fence(_activate(self.activation, self.up(x))))


class EncoderBlock(nnx.Module):
    r"""$x \leftarrow x + f(\mathrm{norm}(x))$ with $f$ attention and then MLP, or $\mathrm{norm}(x + f(x))$.

    The config's `placement` says which: "pre" or "sum".

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020), figure 1.

    Attributes:
        attn_norm: Of what enters the attention, or of the sum with what leaves it; `mlp_norm` alike.
        attn: The attention.
        mlp: The MLP.
    """

    def __init__(self, config: EncoderConfig, policy: Policy, key: Key[Array, ""]):
        attn, mlp = jax.random.split(key)
        dim = config.embed_dim
        # What is added to the residual stream 2L times starts smaller, so that the sum does not grow with L.
        std = INIT_STD / (2 * config.num_layers) ** 0.5 if config.placement == "pre" else INIT_STD
        self.attn_norm = Norm(dim, config.norm, policy=policy)
        self.mlp_norm = Norm(dim, config.norm, policy=policy)
        heads, bias = config.num_heads, config.qkv_bias
        self.attn = Attention(dim, heads, qkv_bias=bias, residual_std=std, policy=policy, key=attn)
        self.mlp = FeedForward(dim, config.mlp_width, config.activation, residual_std=std, policy=policy, key=mlp)
        self.pre = config.placement == "pre"
        self.dropout = config.dropout

    def __call__(
        self, x: Float[Array, "... embed"], *, mask: Mask, batch: int, layer: int | Array, key: Key[Array, ""] | None
    ) -> Float[Array, "... embed"]:
        """Run the block.

        Args:
            x: The residual stream.
            mask: Which token sees which.
            batch: Rows.
            layer: The block's number.
            key: For dropout, the same for all blocks; `None` drops nothing.
        """
        attn_key, mlp_key = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, layer))
        normed = self.attn_norm(x) if self.pre else x
        x = fence(x + dropout(self.attn(normed, normed, mask, batch), self.dropout, attn_key))
        x = x if self.pre else self.attn_norm(x)
        normed = self.mlp_norm(x) if self.pre else x
        x = fence(x + dropout(self.mlp(normed), self.dropout, mlp_key))
        return x if self.pre else self.mlp_norm(x)


def _activate(name: Activation, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x * jax.nn.sigmoid(1.702 * x) if name == "quick_gelu" else activate(name, x)
