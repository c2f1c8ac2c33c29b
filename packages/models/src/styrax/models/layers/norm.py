"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.fence import fence

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.core import Policy


class RMSNorm(nnx.Module):
    r"""$y = s\, x / \sqrt{\frac{1}{d} \sum_i x_i^2 + \epsilon}$, computed in float32.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), section 3.

    Attributes:
        scale: $s$, `[dim]` in the parameter dtype, initially 1.

    Example:
        >>> from styrax.core import Policy
        >>> norm = RMSNorm(2, eps=0.0, policy=Policy())
        >>> [round(float(y), 3) for y in norm(jnp.array([3.0, 4.0]))]
        [0.849, 1.131]
    """

    def __init__(self, dim: int, *, eps: float, policy: Policy):
        self.scale = nnx.Param(jnp.ones(dim, policy.param_dtype))
        self.eps = eps
        self.policy = policy

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise the last axis.

        Args:
            x: Any floating dtype.

        Returns:
            In the compute dtype.
        """
        wide = x.astype("float32")
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return fence((unit * self.scale[...].astype("float32")).astype(self.policy.compute_dtype))
