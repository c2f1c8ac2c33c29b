"""Embeddings of its own for each layer, and the gate through which they enter the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from styrax.models.layers.activation import activate
from styrax.models.layers.embed import Embed
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear
from styrax.models.layers.norm import Norm

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models import arch


class PerLayerEmbed(nnx.Module):
    r"""$p_l = (\sqrt{d}\, E_l[t] + \mathrm{norm}(x W_l / \sqrt{D})) / \sqrt{2}$ for a token $t$ and all layers $l$.

    $x$ is the token's embedding of width $D$, and $d$ the width of $p_l$.

    Source: the published code of Gemma 3n and Gemma 4 (2025, 2026).

    Attributes:
        embed: $E$ of all layers side by side, `[vocab, layers * d]`.
        proj: $W$ of all layers side by side, `[D, layers * d]`.
        norm: Over $d$.

    Example:
        >>> import jax.numpy as jnp
        >>> from styrax.core import Policy
        >>> from styrax.models import arch
        >>> both = {"norm": arch.Norm(), "init_std": 0.02, "std": 0.02, "policy": Policy(), "key": jax.random.key(0)}
        >>> per_layer = PerLayerEmbed(8, 3, arch.PerLayer(dim=4), vocab_size=9, **both)
        >>> per_layer(jnp.zeros((1, 2), int), jnp.ones((1, 2, 8))).shape
        (1, 2, 3, 4)
    """

    def __init__(
        self,
        dim: int,
        layers: int,
        config: arch.PerLayer,
        *,
        vocab_size: int,
        norm: arch.Norm,
        init_std: float,
        std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        embed, proj = jax.random.split(key)
        width, rows = layers * config.dim, config.vocab_size or vocab_size
        self.embed = Embed(rows, width, std=init_std, policy=policy, key=embed)
        self.proj = Linear(dim, width, std=std, policy=policy, key=proj)
        self.norm = Norm(config.dim, norm, policy=policy)
        self.dim = config.dim

    def __call__(
        self, tokens: Int[Array, "batch seq"], x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq layers dim"]:
        """Make what all layers get.

        Args:
            tokens: An id outside of the table gives a row of NaN.
            x: Their embeddings, as they enter the first block.
        """
        said = self.dim**0.5 * self.embed(tokens)
        seen = self.proj(x) * x.shape[-1] ** -0.5
        said, seen = (each.reshape(*tokens.shape, -1, self.dim) for each in (said, seen))
        return (self.norm(seen) + said) * 0.5**0.5


class PerLayerGate(nnx.Module):
    r"""$\mathrm{norm}((a(x W_g) \odot p_l)\, W)$, what a layer adds to its residual stream $x$.

    Attributes:
        gate: $W_g$, `[D, d]`.
        proj: $W$, `[d, D]`.
        norm: Over $D$.
    """

    def __init__(
        self,
        dim: int,
        config: arch.PerLayer,
        *,
        norm: arch.Norm,
        activation: arch.Activation,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        gate, proj = jax.random.split(key)
        self.gate = Linear(dim, config.dim, std=std, policy=policy, key=gate)
        self.proj = Linear(config.dim, dim, std=residual_std, policy=policy, key=proj)
        self.norm = Norm(dim, norm, policy=policy)
        self.activation: arch.Activation = activation

    def __call__(self, x: Float[Array, "... embed"], own: Float[Array, "... dim"]) -> Float[Array, "... embed"]:
        """Let through of `own` what the stream asks for.

        Args:
            x: The residual stream.
            own: $p_l$ of this layer.
        """
        return self.norm(self.proj(fence(activate(self.activation, self.gate(x)) * own)))
