"""Grouped-query attention over the past of the same document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
        lent: Keys and values of earlier layers for those that have none of their own, by the name of their kind.
        attention: Which implementation computes it, or "auto"; see `styrax.models.attention`.
        watch: Is shown each block's activations, and gives what the block then reports; see
            `styrax.models.activations`. `None` costs nothing.
    """

    reach: dict[str, Reach]
    positions: Int[Array, "batch seq"]
    place: Int[Array, "batch seq"]
    real: Bool[Array, "batch seq"] | None = None
    slots: Int[Array, "batch seq"] | None = None
    lent: Mapping[str, tuple[Array, Array]] | None = None
    attention: str = "auto"
    watch: Callable[..., Any] | None = None


class Attention(nnx.Module):
    """Causal self-attention with rotary positions.

    Attributes:
        q: `[dim, heads * head_dim]`.
        k: `[dim, kv_heads * head_dim]`; none, nor `v`, nor `k_norm`, if the keys are those of another layer.
        v: The same shape; none if values are keys.
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
        shared: bool = False,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        keys = jax.random.split(key, 4)
        bias = config.qkv_bias
        self.q = Linear(dim, heads * head_dim, std=std, policy=policy, key=keys[0], bias=bias)
        if not shared:
            self.k = Linear(dim, kv_heads * head_dim, std=std, policy=policy, key=keys[1], bias=bias)
            if not config.tied_values:
                self.v = Linear(dim, kv_heads * head_dim, std=std, policy=policy, key=keys[2], bias=bias)
        self.o = Linear(heads * head_dim, dim, std=residual_std, policy=policy, key=keys[3], bias=config.out_bias)
        if config.gated:
            gate = jax.random.fold_in(key, 4)
            self.gate = Linear(dim, heads * head_dim, std=std, policy=policy, key=gate, bias=bias)
        if config.qk_norm in ("head", "flat"):
            flat = config.qk_norm == "flat"
            self.q_norm = Norm(heads * head_dim if flat else head_dim, norm, policy=policy)
            if not shared:
                self.k_norm = Norm(kv_heads * head_dim if flat else head_dim, norm, policy=policy)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, policy.param_dtype))
        self.config = config
        self.name = name
        self.head_dim = head_dim
        self.scale = scale
        self.shared = shared
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
        return self.lend(x, scope, index, cache)[:2]

    def lend(
        self, x: Float[Array, "... dim"], scope: Scope, index: int | Int[Array, ""], cache: Slots | None
    ) -> tuple[Float[Array, "... dim"], Slots | None, tuple[Array, Array]]:
        """Attend, and give the keys and values too, `[batch, kv_heads, keys, head_dim]`, as they were attended to.

        Args:
            x: And all the others: as for a call.
        """
        config, reach = self.config, scope.reach[self.name]
        query = self._query(x, scope)
        key, value = (None, None) if self.shared else self._key_value(x, scope)
        if key is None or value is None:
            assert scope.lent is not None
            keys, values = scope.lent[self.name]
        elif cache is None or scope.slots is None:
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        else:
            cache, keys, values = cache.extend(index, scope.slots, key, value)
        out = attend(
            query,
            keys,
            values,
            reach.mask,
            scale=self.scale,
            softcap=config.softcap,
            sinks=self.sinks[...] if config.sinks else None,
            implementation=scope.attention,
        )
        out = out.reshape(*x.shape[:-1], -1)
        if config.gated:
            out = out * jax.nn.sigmoid(self.gate(x))
        return self.o(fence(out)), cache, (keys, values)

    def _query(self, x: Float[Array, "... dim"], scope: Scope) -> Float[Array, "batch seq heads head_dim"]:
        query, tuning = self._turned(self.q(x), getattr(self, "q_norm", None), scope), self.config.tuning
        if tuning is None:
            return query
        passed = jnp.floor((scope.positions.astype("float32") + 1) / tuning.floor)
        grown = 1 + tuning.scale * jnp.log1p(passed)
        return (query * grown[:, :, None, None]).astype(query.dtype)

    def _key_value(self, x: Float[Array, "... dim"], scope: Scope) -> tuple[Array, Array]:
        key = self.k(x)
        value = self._heads(key if self.config.tied_values else self.v(x), scope)
        if self.config.v_norm:
            value = unit(value.astype("float32"), self.eps).astype(value.dtype)
        return self._turned(key, getattr(self, "k_norm", None), scope), value

    def _turned(self, x: Array, norm: Norm | None, scope: Scope) -> Float[Array, "batch seq heads head_dim"]:
        """Normalise queries or keys, and rotate them."""
        how = self.config.qk_norm
        x = self._heads(norm(x) if norm is not None and how == "flat" else x, scope)
        x = norm(x) if norm is not None and how == "head" else x
        x = rotate(x, scope.reach[self.name].rotation)
        return unit(x.astype("float32"), self.eps).astype(x.dtype) if how == "l2" else x

    def _heads(self, x: Array, scope: Scope) -> Float[Array, "batch seq heads head_dim"]:
        clip = self.config.clip
        x = x if clip is None else jnp.clip(x, -clip, clip)
        return x.reshape(-1, scope.positions.shape[1], x.shape[-1] // self.head_dim, self.head_dim)
