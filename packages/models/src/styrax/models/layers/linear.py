"""A matrix product, with or without bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.layers.fence import fence
from styrax.models.layers.product import product

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Key

    from styrax.core import Policy


class Linear(nnx.Module):
    r"""$y = x W + b$, with $W$ of shape `(in, out)` and $b$ cast to the compute dtype in use.

    Attributes:
        kernel: $W$, `[in_dim, out_dim]` in the parameter dtype, drawn from $N(0, \mathrm{std}^2)$.
        bias: $b$, `[out_dim]`, initially 0; only if asked for.

    Example:
        >>> from styrax.core import Policy
        >>> linear = Linear(4, 3, std=0.02, policy=Policy(), key=jax.random.key(0))
        >>> linear(jax.numpy.ones((2, 4))).shape
        (2, 3)
    """

    def __init__(
        self, in_dim: int, out_dim: int, *, std: float, policy: Policy, key: Key[Array, ""], bias: bool = False
    ):
        self.kernel = nnx.Param(normal(key, (in_dim, out_dim), std, policy))
        if bias:
            self.bias = nnx.Param(jnp.zeros(out_dim, policy.param_dtype))
        self.has_bias = bias
        self.policy = policy

    def __call__(self, x: Float[Array, "... in_dim"]) -> Float[Array, "... out_dim"]:
        """Multiply.

        Args:
            x: In the compute dtype.
        """
        out = product(x, self.kernel[...].astype(self.policy.compute_dtype))
        if self.has_bias:
            out = out + self.bias[...].astype(self.policy.compute_dtype)
        return fence(out)


def normal(key: Key[Array, ""], shape: tuple[int, ...], std: float, policy: Policy) -> Float[Array, "..."]:
    """Draw an initial parameter, in float32 and then rounded to the parameter dtype.

    Args:
        key: Used up.
        shape: Of the parameter.
        std: Standard deviation.
        policy: Gives the parameter dtype.
    """
    return (std * jax.random.normal(key, shape, "float32")).astype(policy.param_dtype)
