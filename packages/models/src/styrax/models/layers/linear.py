"""A matrix product without bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from styrax.models.layers.fence import fence

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Key

    from styrax.core import Policy


class Linear(nnx.Module):
    r"""$y = x W$, with $W$ of shape `(in, out)` cast to the compute dtype in use.

    Attributes:
        kernel: `[in_dim, out_dim]` in the parameter dtype, drawn from $N(0, \mathrm{std}^2)$.

    Example:
        >>> from styrax.core import Policy
        >>> linear = Linear(4, 3, std=0.02, policy=Policy(), key=jax.random.key(0))
        >>> linear(jax.numpy.ones((2, 4))).shape
        (2, 3)
    """

    def __init__(self, in_dim: int, out_dim: int, *, std: float, policy: Policy, key: Key[Array, ""]):
        self.kernel = nnx.Param(normal(key, (in_dim, out_dim), std, policy))
        self.policy = policy

    def __call__(self, x: Float[Array, "... in_dim"]) -> Float[Array, "... out_dim"]:
        """Multiply.

        Args:
            x: In the compute dtype.
        """
        return fence(x @ self.kernel[...].astype(self.policy.compute_dtype))


def normal(key: Key[Array, ""], shape: tuple[int, ...], std: float, policy: Policy) -> Float[Array, "..."]:
    """Draw an initial parameter, in float32 and then rounded to the parameter dtype.

    Args:
        key: Used up.
        shape: Of the parameter.
        std: Standard deviation.
        policy: Gives the parameter dtype.
    """
    return (std * jax.random.normal(key, shape, "float32")).astype(policy.param_dtype)
