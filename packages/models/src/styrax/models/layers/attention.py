"""Grouped-query attention over the past of the same document."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models import arch
from styrax.models.layers.attend import attend
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear
from styrax.models.layers.norm import Norm, unit
from styrax.models.layers.rope import rotate

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key

    from styrax.core import Policy
    from styrax.models.cache import Slots
    from styrax.models.layers.mask import Mask
    from styrax.models.layers.rope import Rotation


class Reach(NamedTuple):
    """What all layers of one kind share in one call.

    Attributes:
        mask: Which keys this call's queries see.
        rotation: The angles of this call's positions.
    """

    mask: Mask
    rotation: Rotation


class Scope(NamedTuple):
    """What all blocks share in one call.

    Attributes:
        reach: For each kind of attention layer, by its name in the config.
        positions: `[batch or 1, seq]`, as the caller counts them.
        place: `[batch or 1, seq]`, counted from 0 in each document.
        real: `[batch, seq]`, false at padding; `None` when there is none.
        slots: Where in the cache this call's keys go, -1 for nowhere; `None` without a cache.
    """

    reach: dict[str, Reach]
    positions: Int[Array, "batch seq"]
    place: Int[Array, "batch seq"]
    real: Bool[Array, "batch seq"] | None = None
    slots: Int[Array, "batch seq"] | None = None


class Attention(nnx.Module):
    """Causal self-attention with rotary positions.

    Attributes:
        q: `[dim, heads * head_dim]`.
        k: `[dim, kv_heads * head_dim]`.
        v: The same shape.
        o: `[heads * head_dim, dim]`.
        gate: `[dim, heads * head_dim]`, if the config asks for it.
        q_norm: Over a head or over all, as the config says, if it asks for it; and `k_norm`.
        sinks: `[heads]`, initially 0, if the config asks for it.
    """

    def __init__(
        self,
        dim: int,
        config: arch.Attn,
        *,
        name: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm: arch.Norm,
        scale: float | None = None,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        keys = jax.random.split(key, 4)
        bias = config.qkv_bias
        self.q = Linear(dim, heads * head_dim, std=std, policy=policy, key=keys[0], bias=bias)
        self.k = Linear(dim, kv_heads * head_dim, std=std, policy=policy, key=keys[1], bias=bias)
        self.v = Linear(dim, kv_heads * head_dim, std=std, policy=policy, key=keys[2], bias=bias)
        self.o = Linear(heads * head_dim, dim, std=residual_std, policy=policy, key=keys[3], bias=config.out_bias)
        if config.gated:
            gate = jax.random.fold_in(key, 4)
            self.gate = Linear(dim, heads * head_dim, std=std, policy=policy, key=gate, bias=bias)
        if config.qk_norm in ("head", "flat"):
            flat = config.qk_norm == "flat"
            self.q_norm = Norm(heads * head_dim if flat else head_dim, norm, policy=policy)
            self.k_norm = Norm(kv_heads * head_dim if flat else head_dim, norm, policy=policy)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, policy.param_dtype))
        self.config = config
        self.name = name
        self.head_dim = head_dim
        self.scale = scale
        self.eps = norm.eps

    def __call__(
        self, x: Float[Array, "... dim"], scope: Scope, index: int | Int[Array, ""], cache: Slots | None
    ) -> tuple[Float[Array, "... dim"], Slots | None]:
        """Attend.

        Args:
            x: `[batch, seq, dim]` or `[batch * seq, dim]`, normalised.
            scope: Angles, masks and cache slots.
            index: Which part of the cache is this layer's.
            cache: Keys and values of earlier calls.

        Returns:
            The result in the shape of `x`, and the cache with this call's keys and values.
        """
        config, reach = self.config, scope.reach[self.name]
        query, key, value = self._projected(x, scope)
        if cache is None or scope.slots is None:
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        else:
            cache = cache.write(index, scope.slots, key, value)
            keys, values = cache.keys[index], cache.values[index]
        out = attend(
            query,
            keys,
            values,
            reach.mask,
            causal=cache is None,
            scale=self.scale,
            softcap=config.softcap,
            sinks=self.sinks[...] if config.sinks else None,
            window=config.window,
        )
        out = out.reshape(*x.shape[:-1], -1)
        if config.gated:
            out = out * jax.nn.sigmoid(self.gate(x))
        return self.o(fence(out)), cache

    def _projected(self, x: Float[Array, "... dim"], scope: Scope) -> tuple[Array, Array, Array]:
        config, rotation = self.config, scope.reach[self.name].rotation
        query, key, value = self.q(x), self.k(x), self.v(x)
        if config.qk_norm == "flat":
            query, key = self.q_norm(query), self.k_norm(key)
        if config.clip is not None:
            query, key, value = (jnp.clip(each, -config.clip, config.clip) for each in (query, key, value))
        shape = (-1, scope.positions.shape[1])
        query, key, value = (
            each.reshape(*shape, each.shape[-1] // self.head_dim, self.head_dim) for each in (query, key, value)
        )
        if config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        if config.v_norm:
            value = unit(value.astype("float32"), self.eps).astype(value.dtype)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if config.qk_norm == "l2":
            query, key = (unit(each.astype("float32"), self.eps).astype(each.dtype) for each in (query, key))
        if config.tuning_scale is not None:
            passed = jnp.floor((scope.positions.astype("float32") + 1) / config.tuning_floor)
            grown = 1 + config.tuning_scale * jnp.log1p(passed)
            query = (query * grown[:, :, None, None]).astype(query.dtype)
        return query, key, value
