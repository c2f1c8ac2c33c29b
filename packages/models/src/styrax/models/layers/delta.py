"""The gated delta rule: a recurrent layer whose state is one matrix per head, whatever the number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.delta_rule import delta_rule
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear, normal
from styrax.models.layers.norm import unit

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models import arch
    from styrax.models.cache import States
    from styrax.models.layers.attention import Scope

_NORM_EPS = 1e-6


class GatedDelta(nnx.Module):
    r"""A gated delta rule behind a short causal convolution, its result normalised and gated.

    $\alpha = \exp(-e^{A}\, \mathrm{softplus}(x W_a + b))$ and $\beta = \sigma(x W_b)$.

    Documents do not mix: the state and the convolution begin anew where the position in the document is 0.

    Source: Yang et al., "Gated Delta Networks" (2024), section 3.4.

    Attributes:
        q: `[dim, k_heads * k_dim]`, and `k` alike.
        v: `[dim, v_heads * v_dim]`, and `z`, the gate, alike.
        a: $W_a$, `[dim, v_heads]`.
        b: $W_b$, `[dim, v_heads]`.
        conv: `[conv, 2 * k_heads * k_dim + v_heads * v_dim]`: of queries, keys and values; the last tap is the
            token itself.
        log_decay: $A$, `[v_heads]`.
        decay_bias: $b$, `[v_heads]`.
        norm_scale: `[v_dim]`.
        o: `[v_heads * v_dim, dim]`.
    """

    def __init__(
        self,
        dim: int,
        config: arch.Delta,
        *,
        eps: float,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        keys = jax.random.split(key, 9)
        narrow, wide = config.num_k_heads * config.k_dim, config.num_v_heads * config.v_dim

        def linear(width: int, number: int) -> Linear:
            return Linear(dim, width, std=std, policy=policy, key=keys[number])

        self.q, self.k = linear(narrow, 0), linear(narrow, 1)
        self.v, self.z = linear(wide, 2), linear(wide, 3)
        self.a, self.b = linear(config.num_v_heads, 4), linear(config.num_v_heads, 5)
        self.conv = nnx.Param(normal(keys[6], (config.conv, 2 * narrow + wide), config.conv**-0.5, policy))
        begin = jax.random.uniform(keys[7], (config.num_v_heads,), minval=0.01, maxval=16.0)
        self.log_decay = nnx.Param(jnp.log(begin).astype(policy.param_dtype))
        self.decay_bias = nnx.Param(jnp.ones(config.num_v_heads, policy.param_dtype))
        self.norm_scale = nnx.Param(jnp.ones(config.v_dim, policy.param_dtype))
        self.o = Linear(wide, dim, std=residual_std, policy=policy, key=keys[8])
        self.config = config
        self.eps = eps
        self.policy = policy

    def __call__(
        self, x: Float[Array, "... dim"], scope: Scope, index: int | Int[Array, ""], cache: States | None
    ) -> tuple[Float[Array, "... dim"], States | None]:
        """Mix each token with those before it.

        Args:
            x: `[batch, seq, dim]` or `[batch * seq, dim]`, normalised.
            scope: Positions and padding.
            index: Which part of the cache is this layer's.
            cache: States after earlier calls.

        Returns:
            The result in the shape of `x`, and the cache with the state after this call.
        """
        config, seq = self.config, scope.place.shape[1]
        flat = x.reshape(-1, seq, x.shape[-1])
        place = jnp.broadcast_to(scope.place, flat.shape[:2])
        real = jnp.ones_like(place, bool) if scope.real is None else jnp.broadcast_to(scope.real, place.shape)
        order = None if scope.real is None else jnp.argsort(~real, axis=1, stable=True)
        if order is not None:  # real tokens first, so that the one before is the one before
            flat, place, real = (_take(each, order) for each in (flat, place, real))
        mixed = jnp.concatenate([self.q(flat), self.k(flat), self.v(flat)], axis=-1)
        recent = jnp.zeros_like(mixed, shape=(len(mixed), config.conv - 1, mixed.shape[-1]))
        memory = jnp.zeros((len(mixed), config.num_v_heads, config.k_dim, config.v_dim), "float32")
        if cache is not None:
            begun = (place[:, :1] > 0)[..., None]  # what a row held before its first token does not matter
            recent = jnp.where(begun, cache.recent[index], 0)
            memory = jnp.where(begun[..., None], cache.memory[index], 0)
        inputs = jnp.concatenate([recent, mixed], axis=1)
        query, key, value = self._heads(self._convolved(inputs, place))
        rate = jnp.where(real[..., None], jax.nn.sigmoid(self.b(flat).astype("float32")), 0)
        fading = jnp.exp(self.log_decay[...].astype("float32"))
        step = jax.nn.softplus(self.a(flat).astype("float32") + self.decay_bias[...].astype("float32"))
        keep = jnp.where(real[..., None], -fading * step, 0.0)
        fresh = real & (place == 0)
        out, memory = delta_rule(query, key, value, keep, rate, memory, fresh=fresh)
        if cache is not None:
            last = real.sum(1)[:, None] + jnp.arange(config.conv - 1)
            cache = cache.write(index, _take(inputs, last), memory)
        out = self._gated(out, self.z(flat))
        if order is not None:
            out = _take(out, jnp.argsort(order, axis=1))
        return self.o(fence(out.reshape(*x.shape[:-1], -1))), cache

    def _convolved(self, inputs: Array, place: Int[Array, "batch seq"]) -> Float[Array, "batch seq channels"]:
        taps, seq = self.config.conv, place.shape[1]
        kernel, out = self.conv[...].astype(inputs.dtype), 0
        for number in range(taps):
            back = taps - 1 - number
            tap = inputs[:, number : number + seq] * kernel[number]
            out = out + (jnp.where(place[..., None] >= back, tap, 0) if back else tap)
        return jax.nn.silu(out)

    def _heads(self, mixed: Float[Array, "batch seq channels"]) -> list[Float[Array, "batch seq heads dim"]]:
        config = self.config
        narrow = config.num_k_heads * config.k_dim
        query, key, value = jnp.split(mixed.astype("float32"), [narrow, 2 * narrow], axis=-1)
        query, key = (each.reshape(*mixed.shape[:2], config.num_k_heads, config.k_dim) for each in (query, key))
        query, key = _length_one(query) * config.k_dim**-0.5, _length_one(key)
        repeats = config.num_v_heads // config.num_k_heads
        value = value.reshape(*mixed.shape[:2], config.num_v_heads, config.v_dim)
        return [jnp.repeat(query, repeats, axis=2), jnp.repeat(key, repeats, axis=2), value]

    def _gated(self, out: Float[Array, "batch seq heads v_dim"], gate: Array) -> Float[Array, "batch seq wide"]:
        normed = unit(out, self.eps) * self.norm_scale[...].astype("float32")
        gate = jax.nn.silu(gate.astype("float32")).reshape(out.shape)
        return (normed * gate).astype(self.policy.compute_dtype).reshape(*out.shape[:2], -1)


def _length_one(x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def _take(x: Array, order: Int[Array, "batch seq"]) -> Array:
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)
