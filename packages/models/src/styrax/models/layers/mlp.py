"""The MLP of a dense block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from styrax.models.layers.activation import activate
from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Key

    from styrax.core import Policy
    from styrax.models import arch


class MLP(nnx.Module):
    r"""$y = (a(x W_g) \odot x W_u)\, W_d$, or $a(x W_u)\, W_d$ if the config has no gate.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equations 2 and 6.

    Attributes:
        gate: $W_g$.
        up: $W_u$.
        down: $W_d$.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        config: arch.MLP,
        *,
        std: float,
        residual_std: float,
        policy: Policy,
        key: Key[Array, ""],
    ):
        gate, up, down = jax.random.split(key, 3)
        if config.gated:
            self.gate = Linear(dim, hidden, std=std, policy=policy, key=gate, bias=config.bias)
        self.up = Linear(dim, hidden, std=std, policy=policy, key=up, bias=config.bias)
        self.down = Linear(hidden, dim, std=residual_std, policy=policy, key=down, bias=config.bias)
        self.config = config

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Transform every position by itself.

        Args:
            x: In the compute dtype.
        """
        name = self.config.activation
        hidden = activate(name, self.gate(x)) * self.up(x) if self.config.gated else activate(name, self.up(x))
        return self.down(fence(hidden))
