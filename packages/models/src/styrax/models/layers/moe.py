"""A mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.core import UserError
from styrax.models.layers import dispatch, exchange
from styrax.models.layers.activation import activate
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear, normal
from styrax.models.layers.router import Choice, Router, RouterStats
from styrax.models.moe_config import MoE

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key

    from styrax.core import Policy

    Multiply = Callable[[Float[Array, "rows inner"], Float[Array, "experts inner outer"]], Float[Array, "rows outer"]]


class Mixture(nnx.Module):
    r"""$y = \sum_e w_e\, (a(x W_{g,e}) \odot x W_{u,e})\, W_{d,e}$, plus a shared MLP if there is one.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2; what else, the config says.

    Attributes:
        router: Chooses experts and their weights.
        experts: Their kernels.
        shared: The MLP for every token.
        shared_gate: `[dim, 1]`, whose sigmoid multiplies its answer.

    Example:
        >>> from styrax.core import Policy
        >>> config = MoE(num_experts=4, experts_per_token=2, expert_dim=8)
        >>> layer = Mixture(6, config, std=0.02, residual_std=0.02, policy=Policy(), key=jax.random.key(0))
        >>> y, stats = layer(jnp.ones((2, 5, 6)))
        >>> y.shape, float(stats.tokens), float(stats.load.sum())
        ((2, 5, 6), 10.0, 20.0)
    """

    def __init__(self, dim: int, config: MoE, *, std: float, residual_std: float, policy: Policy, key: Key[Array, ""]):
        router, experts, shared, gate = jax.random.split(key, 4)
        both = {"std": std, "residual_std": residual_std}
        self.router = Router(dim, config, std=std, policy=policy, key=router)
        self.experts = Experts(dim, config, policy=policy, key=experts, **both)
        if config.shared is not None:
            self.shared = SharedMLP(dim, config.shared.dim, config, policy=policy, key=shared, **both)
            if config.shared.gated:
                self.shared_gate = Linear(dim, 1, std=std, policy=policy, key=gate)
        self.config = config
        self.policy = policy

    def __call__(
        self,
        x: Float[Array, "... dim"],
        *,
        mask: Bool[Array, "..."] | None = None,
        router_input: Float[Array, "... dim"] | None = None,
        batch: int | None = None,
    ) -> tuple[Float[Array, "... dim"], RouterStats]:
        """Send every token through its experts.

        Args:
            x: `[tokens, dim]` or `[batch, seq, dim]`, in the compute dtype.
            mask: One value for each token, false at padding: it counts nowhere, takes no place, and gives 0.
            router_input: What the router reads, in the shape of `x`; `None` means `x`.
            batch: Give the statistics of so many rows of tokens, a leading axis; `None` gives those of all.

        Returns:
            The result in the shape of `x`, and the router's statistics.

        Raises:
            UserError: Shapes do not fit; all problems are listed.
        """
        dim = x.shape[-1]
        _check_shapes(x, mask, router_input)
        rows, seen = x.reshape(-1, dim), (x if router_input is None else router_input).reshape(-1, dim)
        real = None if mask is None else mask.reshape(-1)
        if real is not None:  # whatever stands at padding, even NaN, reaches nobody
            rows, seen = jnp.where(real[:, None], rows, 0), jnp.where(real[:, None], seen, 0)
        choice, stats = self.router(seen, real, batch)
        out, dropped = self._routed(rows, choice, batch or (1 if x.ndim == 2 else len(x)))
        out = out.astype(self.policy.compute_dtype)
        if self.config.shared is not None:
            answer = self.shared(rows)
            out = out + (jax.nn.sigmoid(self.shared_gate(rows)) * answer if self.config.shared.gated else answer)
        if real is not None:
            out = jnp.where(real[:, None], out, 0)
        return fence(out.reshape(x.shape)), stats._replace(dropped=dropped)

    def _routed(
        self, x: Float[Array, "tokens dim"], choice: Choice, batch: int
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, ""]]:
        if self.config.dispatch == "dense":
            return self._dense(x, choice), jnp.zeros((), "float32")

        def compute(experts: Experts, rows: Array, layout: dispatch.Layout) -> Array:
            return experts(fence(rows), layout.multiply, layout.expert)

        rows, chosen, weights = (
            each.reshape(batch, -1, each.shape[-1]) for each in (x, choice.experts, choice.weights)
        )
        out, dropped = exchange.routed(self.experts, compute, rows, chosen, weights, self.config)
        return out.reshape(x.shape), dropped

    def _dense(self, x: Float[Array, "tokens dim"], choice: Choice) -> Float[Array, "tokens dim"]:
        count, (tokens, dim) = self.config.num_experts, x.shape
        chosen = (choice.experts[:, :, None] == jnp.arange(count)).astype("float32")
        weights = jnp.einsum("nke,nk->en", chosen, choice.weights)
        copies = jnp.broadcast_to(x, (count, tokens, dim))
        if self.config.input_scaled:
            copies, weights = exchange.weigh(copies, weights, x.dtype), chosen.sum(1).T
        expert = jnp.repeat(jnp.arange(count), tokens)
        answers = self.experts(copies.reshape(-1, dim), dispatch.grid_product, expert)
        return exchange.weigh(answers.reshape(count, tokens, dim), weights, "float32").sum(0)


class Experts(nnx.Module):
    """The gated MLPs of all experts.

    Attributes:
        gate: Its kernel is `[experts, dim, expert_dim]`.
        up: The same.
        down: Its kernel is `[experts, expert_dim, dim]`.
    """

    def __init__(self, dim: int, config: MoE, *, std: float, residual_std: float, policy: Policy, key: Key[Array, ""]):
        gate, up, down = jax.random.split(key, 3)
        hidden = config.expert_dim
        self.gate = Kernels(dim, hidden, config, std=std, policy=policy, key=gate)
        self.up = Kernels(dim, hidden, config, std=std, policy=policy, key=up)
        self.down = Kernels(hidden, dim, config, std=residual_std, policy=policy, key=down)
        self.config = config

    def __call__(
        self, x: Float[Array, "rows dim"], multiply: Multiply, expert: Int[Array, " rows"]
    ) -> Float[Array, "rows dim"]:
        """Transform every row by its expert.

        Args:
            x: In the compute dtype.
            multiply: Multiplies each row by its expert's kernel.
            expert: The expert of each row.
        """
        gate, up = self.gate(x, multiply, expert), self.up(x, multiply, expert)
        return self.down(fence(gated(gate, up, self.config)), multiply, expert)


class Kernels(nnx.Module):
    """A matrix, and a bias if asked for, for each expert.

    Attributes:
        kernel: `[experts, in_dim, out_dim]` in the parameter dtype.
        bias: `[experts, out_dim]`, initially 0.
    """

    def __init__(self, in_dim: int, out_dim: int, config: MoE, *, std: float, policy: Policy, key: Key[Array, ""]):
        self.kernel = nnx.Param(normal(key, (config.num_experts, in_dim, out_dim), std, policy))
        if config.expert_bias:
            self.bias = nnx.Param(jnp.zeros((config.num_experts, out_dim), policy.param_dtype))
        self.has_bias = config.expert_bias
        self.policy = policy

    def __call__(
        self, x: Float[Array, "rows inner"], multiply: Multiply, expert: Int[Array, " rows"]
    ) -> Float[Array, "rows outer"]:
        """Multiply; the arguments are those of `Experts`."""
        out = multiply(x, self.kernel[...].astype(self.policy.compute_dtype))
        if self.has_bias:
            out = out + self.bias[...].astype(self.policy.compute_dtype)[expert]
        return fence(out)


class SharedMLP(nnx.Module):
    """A gated MLP with the experts' activation.

    Attributes:
        gate: `[dim, hidden]`.
        up: The same.
        down: `[hidden, dim]`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        config: MoE,
        *,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear(dim, hidden, std=std, policy=policy, key=gate)
        self.up = Linear(dim, hidden, std=std, policy=policy, key=up)
        self.down = Linear(hidden, dim, std=residual_std, policy=policy, key=down)
        self.config = config

    def __call__(self, x: Float[Array, "tokens dim"]) -> Float[Array, "tokens dim"]:
        """Transform every token by itself.

        Args:
            x: In the compute dtype.
        """
        return self.down(fence(gated(self.gate(x), self.up(x), self.config)))


def gated(gate: Float[Array, "..."], up: Float[Array, "..."], config: MoE) -> Float[Array, "..."]:
    r"""Give $a(g) \odot u$, or what stands in for it.

    Args:
        gate: $g$.
        up: $u$.
        config: Says which.

    Example:
        >>> float(gated(jnp.float32(2.0), jnp.float32(3.0), MoE(activation="relu")))
        6.0
    """
    clamped = config.clamped
    if clamped is None:
        return activate(config.activation, gate) * up
    gate, up = jnp.minimum(gate, clamped.limit), jnp.clip(up, -clamped.limit, clamped.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamped.slope * gate)


def _check_shapes(
    x: Float[Array, "... dim"], mask: Bool[Array, "..."] | None, router_input: Float[Array, "... dim"] | None
) -> None:
    problems = []
    if x.ndim not in (2, 3) or not x.size:
        problems.append(f"x: expected [tokens, dim] or [batch, seq, dim], none of them 0, got {list(x.shape)}")
    count = x.size // max(x.shape[-1], 1) if x.ndim else 0
    if mask is not None and (mask.dtype != bool or mask.size != count):
        problems.append(f"mask: expected {count} bool values, one for each token, got {mask.dtype}{list(mask.shape)}")
    if router_input is not None and router_input.shape != x.shape:
        problems.append(f"router_input: expected the shape of x, {list(x.shape)}, got {list(router_input.shape)}")
    if problems:
        raise UserError("\n".join(problems))
