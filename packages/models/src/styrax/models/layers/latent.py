"""Attention over latents: keys and values of all heads from one narrow vector per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models import arch
from styrax.models.layers.attend import attend
from styrax.models.layers.attention import Scope
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear
from styrax.models.layers.norm import Norm
from styrax.models.layers.rope import rope_scale, rotate

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models.cache import Latents
    from styrax.models.layers.mask import Mask
    from styrax.models.rope_config import Rope


class LatentAttention(nnx.Module):
    r"""Multi-head latent attention.

    With $c = \mathrm{norm}(x W_a)$, head $h$ has the key $[c\, W_{k,h}; \mathrm{rotate}(x W_r)]$ and the value
    $c\, W_{v,h}$; the part $x W_r$ is shared by the heads. The cache keeps $c$ and that part only.

    Few queries over many cached latents $c_s$ make neither keys nor values, since
    $q \cdot c_s W_{k,h} = q W_{k,h}^\top \cdot c_s$ and $\sum_s p_s c_s W_{v,h} = (\sum_s p_s c_s) W_{v,h}$.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), equations 9 to 19, and the remark after equation 15.

    Attributes:
        q: `[dim, heads * (nope + rope)]`; or `q_a`, `q_norm` and `q_b` with a latent of width `q_rank` between.
        kv_a: $W_a$, `[dim, kv_rank]`.
        kv_norm: Of the latent.
        k_rope: $W_r$, `[dim, rope]`.
        k_b: $W_k$, `[kv_rank, heads * nope]`.
        v_b: $W_v$, `[kv_rank, heads * v]`.
        o: `[heads * v, dim]`.
    """

    def __init__(
        self,
        dim: int,
        config: arch.Latent,
        *,
        name: str,
        heads: int,
        rope: Rope,
        scale: float | None = None,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        keys = jax.random.split(key, 7)
        norm = arch.Norm(eps=config.norm_eps, late_cast=False)
        width = heads * (config.nope_dim + config.rope_dim)

        def linear(inner: int, outer: int, number: int, *, bias: bool = False, std: float = std) -> Linear:
            return Linear(inner, outer, std=std, policy=policy, key=keys[number], bias=bias)

        if config.q_rank is None:
            self.q = linear(dim, width, 0)
        else:
            self.q_a = linear(dim, config.q_rank, 0, bias=config.bias)
            self.q_norm = Norm(config.q_rank, norm, policy=policy)
            self.q_b = linear(config.q_rank, width, 1)
        self.kv_a = linear(dim, config.kv_rank, 2, bias=config.bias)
        self.k_rope = linear(dim, config.rope_dim, 3, bias=config.bias)
        self.kv_norm = Norm(config.kv_rank, norm, policy=policy)
        self.k_b = linear(config.kv_rank, heads * config.nope_dim, 4)
        self.v_b = linear(config.kv_rank, heads * config.v_dim, 5)
        self.o = linear(heads * config.v_dim, dim, 6, bias=config.bias, std=residual_std)
        self.config = config
        self.name = name
        self.heads = heads
        self.scale = scale or (config.nope_dim + config.rope_dim) ** -0.5 * rope_scale(rope)

    def __call__(
        self, x: Float[Array, "... dim"], scope: Scope, index: int | Int[Array, ""], cache: Latents | None
    ) -> tuple[Float[Array, "... dim"], Latents | None]:
        """Attend.

        Args:
            x: `[batch, seq, dim]` or `[batch * seq, dim]`, normalised.
            scope: Angles, masks and cache slots.
            index: Which part of the cache is this layer's.
            cache: Latents of earlier calls.

        Returns:
            The result in the shape of `x`, and the cache with this call's latents.
        """
        config, heads, reach = self.config, self.heads, scope.reach[self.name]
        seq = scope.positions.shape[1]
        query = self.q(x) if config.q_rank is None else self.q_b(self.q_norm(self.q_a(x)))
        query = query.reshape(-1, seq, heads, config.nope_dim + config.rope_dim)
        plain, turned = jnp.split(query, [config.nope_dim], axis=-1)
        turned = rotate(turned, reach.rotation)
        latent = self.kv_norm(self.kv_a(x)).reshape(-1, seq, config.kv_rank)
        shared = rotate(self.k_rope(x).reshape(-1, seq, 1, config.rope_dim), reach.rotation)[:, :, 0]
        if cache is not None and scope.slots is not None:
            cache, latent, shared = cache.extend(index, scope.slots, latent, shared)
            if self._absorbing_is_less(seq, latent.shape[1]):
                out = self._absorbed(plain, turned, latent, shared, reach.mask)
                return self.o(fence(out.reshape(*x.shape[:-1], -1))), cache
        batch, places = latent.shape[:2]
        query = jnp.concatenate([plain, turned], axis=-1)
        keys = self.k_b(latent).reshape(batch, places, heads, config.nope_dim).swapaxes(1, 2)
        values = self.v_b(latent).reshape(batch, places, heads, config.v_dim).swapaxes(1, 2)
        shared = jnp.broadcast_to(shared[:, None], (batch, heads, places, config.rope_dim))
        keys = jnp.concatenate([keys, shared], axis=-1)
        out = attend(query, keys, values, reach.mask, scale=self.scale, implementation=scope.attention)
        return self.o(fence(out.reshape(*x.shape[:-1], -1))), cache

    def _absorbing_is_less(self, seq: int, places: int) -> bool:
        """Compare what both ways multiply, for each head: to make keys and values, and to attend."""
        made = self.config.kv_rank * (self.config.nope_dim + self.config.v_dim)
        with_keys = places * made + seq * places * (self.config.nope_dim + self.config.v_dim)
        return seq * made + seq * places * 2 * self.config.kv_rank < with_keys

    def _absorbed(
        self,
        plain: Float[Array, "batch seq heads nope"],
        turned: Float[Array, "batch seq heads rope"],
        latent: Float[Array, "batch slots kv_rank"],
        shared: Float[Array, "batch slots rope"],
        mask: Mask,
    ) -> Float[Array, "batch seq heads v"]:
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if plain.dtype == jnp.bfloat16 else None
        made: dict[str, Any] = {"precision": precision, "preferred_element_type": "float32"}
        key_kernel, value_kernel = (
            each.kernel[...].astype(plain.dtype).reshape(self.config.kv_rank, self.heads, -1)
            for each in (self.k_b, self.v_b)
        )
        query = jnp.einsum("bthn,rhn->bthr", plain, key_kernel)
        scores = jnp.einsum("bthr,bsr->bhts", query, latent, **made)
        scores = (scores + jnp.einsum("bthr,bsr->bhts", turned, shared, **made)) * self.scale
        scores = jnp.where(mask.allowed[:, None], scores, jnp.finfo("float32").min)
        weights = jax.nn.softmax(scores, axis=-1).astype(latent.dtype)
        seen = jnp.einsum("bhts,bsr->bhtr", weights, latent, **made).swapaxes(1, 2).astype(latent.dtype)
        out = jnp.einsum("bthr,rhv->bthv", seen, value_kernel)
        return out if mask.queries is None else jnp.where(mask.queries[:, :, None, None], out, 0)
