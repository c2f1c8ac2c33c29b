"""The gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from styrax.models.layers.fence import fence
from styrax.models.layers.linear import Linear

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Key

    from styrax.core import Policy


class SwiGLU(nnx.Module):
    r"""$y = (\mathrm{silu}(x W_g) \odot x W_u)\, W_d$.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6.

    Attributes:
        gate: $W_g$.
        up: $W_u$.
        down: $W_d$.
    """

    def __init__(self, dim: int, hidden: int, *, std: float, residual_std: float, policy: Policy, key: Key[Array, ""]):
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear(dim, hidden, std=std, policy=policy, key=gate)
        self.up = Linear(dim, hidden, std=std, policy=policy, key=up)
        self.down = Linear(hidden, dim, std=residual_std, policy=policy, key=down)

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Transform every position by itself.

        Args:
            x: In the compute dtype.
        """
        return self.down(fence(jax.nn.silu(self.gate(x)) * self.up(x)))
