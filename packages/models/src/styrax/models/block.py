"""One layer of a decoder."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.attention import Attention
from styrax.models.layers.delta import GatedDelta
from styrax.models.layers.dropout import dropout, of_layer, two
from styrax.models.layers.fence import fence
from styrax.models.layers.latent import LatentAttention
from styrax.models.layers.mlp import MLP
from styrax.models.layers.moe import Mixture
from styrax.models.layers.norm import Norm
from styrax.models.layers.per_layer import PerLayerGate
from styrax.models.layers.router import Buffer

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models.config import DecoderConfig
    from styrax.models.layers.attention import Scope
    from styrax.models.layout import Kind


class Block(nnx.Module):
    r"""$x \leftarrow x + m\, \mathrm{attn}(\mathrm{norm}(x))$, then $x + m\, \mathrm{mlp}(\mathrm{norm}(x))$.

    $m$ is the config's `scales.residual_mult`, by default 1. What is normalised, `arch.placement` says; a parallel
    block adds both results to the same $x$.

    Attributes:
        attn_norm: Of what enters the attention, unless only results are normalised; `mlp_norm` alike.
        attn: The attention; `delta` in its place, if the layer is a recurrence.
        attn_post_norm: Of the attention's result, if results are normalised; `mlp_post_norm` alike.
        mlp: The MLP; `moe` in its place, or beside it, if the layer has experts.
        moe_norm: Of what enters experts that are beside an MLP; `moe_post_norm` of what leaves them, and
            `dense_post_norm` of what leaves that MLP, before both are added.
        per_layer: Lets an embedding of this layer's own in, if the config asks for it.
        scale: `[1]`, multiplies what leaves the block, if the config asks for it; a `Buffer`, so that it is no
            `nnx.Param`.
    """

    def __init__(self, config: DecoderConfig, kind: Kind, policy: Policy, key: Key[Array, ""]):
        mixer, mlp = jax.random.split(key)
        arch, scales, dim = config.arch, config.scales, config.embed_dim
        hidden, residual = scales.init_std * scales.hidden_init_mult, scales.residual_init_mult
        # What is added to the residual stream 2L times starts smaller, so that the sum does not grow with L.
        writes = hidden / (2 * config.num_layers) ** 0.5 if residual is None else hidden * residual
        common: dict[str, Any] = {"std": hidden, "residual_std": writes, "policy": policy}
        if arch.placement != "post":
            self.attn_norm = Norm(dim, arch.norm, policy=policy)
            if not arch.parallel:
                self.mlp_norm = Norm(dim, arch.norm, policy=policy)
        if arch.placement != "pre":
            self.attn_post_norm = Norm(dim, arch.norm, policy=policy)
            self.mlp_post_norm = Norm(dim, arch.norm, policy=policy)
        part = getattr(arch, kind.mixer)
        if kind.mixer == "delta":
            self.delta = GatedDelta(dim, part, eps=arch.norm.eps, key=mixer, **common)
        elif kind.mixer == "latent":
            shared: dict[str, Any] = {"heads": config.num_heads, "rope": config.rope, "scale": scales.attn_scale}
            self.attn = LatentAttention(dim, part, name=kind.mixer, key=mixer, **shared, **common)
        else:
            self.attn = Attention(
                dim,
                part,
                name=kind.mixer,
                heads=config.num_heads,
                kv_heads=config.kv_heads_of(part),
                head_dim=config.head_width_of(part),
                norm=arch.norm,
                scale=scales.attn_scale,
                shared=kind.role == "shared",
                key=mixer,
                **common,
            )
        self.beside = kind.sparse and arch.moe is not None and arch.moe.beside_mlp
        if kind.sparse and arch.moe is not None:
            self.moe = Mixture(dim, arch.moe, key=mlp, **common)
        if self.beside:
            if arch.placement != "post":
                self.moe_norm = Norm(dim, arch.norm, policy=policy)
            if arch.placement != "pre":
                self.moe_post_norm = Norm(dim, arch.norm, policy=policy)
                self.dense_post_norm = Norm(dim, arch.norm, policy=policy)
        if self.beside or not kind.sparse:
            dense = jax.random.fold_in(mlp, 1) if self.beside else mlp
            self.mlp = MLP(dim, config.mlp_width_of(kind), arch.mlp, key=dense, **common)
        if arch.per_layer is not None:
            gate: dict[str, Any] = {"norm": arch.norm, "activation": arch.mlp.activation, **common}
            self.per_layer = PerLayerGate(dim, arch.per_layer, key=jax.random.fold_in(key, 2), **gate)
        if scales.block_scale:
            self.scale = Buffer(jnp.ones(1, policy.param_dtype))
        self.kind = kind
        self.placement = arch.placement
        self.parallel = arch.parallel
        self.dropout = config.dropout
        self.residual_mult = scales.residual_mult
        self.scaled = scales.block_scale

    def __call__(
        self,
        x: Float[Array, "... embed"],
        cache: Any,
        *,
        scope: Scope,
        layer: int | Int[Array, ""],
        index: int | Int[Array, ""],
        key: Key[Array, ""] | None,
        own: Float[Array, "... per_layer"] | None = None,
    ) -> tuple[Float[Array, "... embed"], Any, Any, dict[str, tuple[Array, Array]]]:
        """Run the block.

        Args:
            x: The residual stream.
            cache: What its stack of layers keeps of earlier calls; `None` without a cache.
            scope: What all blocks share.
            layer: The block's number in the model.
            index: Its number in its stack.
            key: For dropout, one for each row, the same for all blocks; `None` drops nothing.
            own: The embeddings of this layer, if the config asks for such.

        Returns:
            The residual stream, the cache, what the experts' router reports, `None` without experts, and the keys
            and values for layers that have none, by the name of this layer's kind: of a source only.
        """
        attn_key, mlp_key = (None, None) if key is None else two(of_layer(key, layer))
        pre, post = self.placement != "post", self.placement != "pre"
        normed = self.attn_norm(x) if pre else x
        lent: dict[str, tuple[Array, Array]] = {}
        if self.kind.role == "source":
            assert isinstance(self.attn, Attention)
            out, cache, lent[self.kind.mixer] = self.attn.lend(normed, scope, index, cache)
        else:
            out, cache = (self.delta if self.kind.mixer == "delta" else self.attn)(normed, scope, index, cache)
        out = mixer = self.attn_post_norm(out) if post else out
        mixed = fence(x + times(self.residual_mult, dropout(out, self.dropout, attn_key)))
        if not self.parallel:
            normed = self.mlp_norm(mixed) if pre else mixed
        out, report = self._mlp(normed, mixed, scope)
        out = self.mlp_post_norm(out) if post else out
        x = fence(mixed + times(self.residual_mult, dropout(out, self.dropout, mlp_key)))
        if own is not None:
            x = fence(x + times(self.residual_mult, self.per_layer(x, own)))
        x = x * self.scale[...].astype(x.dtype) if self.scaled else x
        if scope.watch is not None:
            report = scope.watch(report, mixer=mixer, mlp=out, residual=x)
        return x, cache, report, lent

    def _mlp(
        self, normed: Float[Array, "... embed"], x: Float[Array, "... embed"], scope: Scope
    ) -> tuple[Float[Array, "... embed"], Any]:
        if not self.kind.sparse:
            return self.mlp(normed), None
        mask = None if scope.real is None else scope.real.reshape(x.shape[:-1])
        given: dict[str, Any] = {"mask": mask, "batch": math.prod(x.shape[:-1]) // scope.place.shape[1]}
        if not self.beside:
            return self.moe(normed, **given)
        pre, post = self.placement != "post", self.placement != "pre"
        routed, report = self.moe(self.moe_norm(x) if pre else x, router_input=x, **given)
        dense = self.mlp(normed)
        return (self.dense_post_norm(dense) + self.moe_post_norm(routed) if post else dense + routed), report


def times(factor: float, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply, unless by 1.

    Args:
        factor: The same for all.
        x: Activations.
    """
    return x if factor == 1 else factor * x
