"""Normalisation of the last axis."""

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
    from styrax.models import arch


class Norm(nnx.Module):
    r"""$y = s\,(x - \mu) / \sqrt{\overline{(x - \mu)^2} + \epsilon} + b$ over the last axis, in float32.

    With the kind "rms", $\mu = 0$, with "layer" it is the mean. Which of $s$ and $b$ there are, the config says.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), section 3; Ba et al., "Layer
    Normalization" (2016), equation 4.

    Attributes:
        scale: $s$, or $s - 1$ if the config's `offset` is set; `[dim]` in the parameter dtype. Initially $s = 1$.
        bias: $b$, `[dim]`, initially 0.

    Example:
        >>> from styrax.core import Policy
        >>> from styrax.models import arch
        >>> norm = Norm(2, arch.Norm(eps=1e-12), policy=Policy())
        >>> [round(float(y), 3) for y in norm(jnp.array([3.0, 4.0]))]
        [0.849, 1.131]
    """

    def __init__(self, dim: int, config: arch.Norm, *, policy: Policy):
        if config.scale:
            self.scale = nnx.Param((jnp.zeros if config.offset else jnp.ones)(dim, policy.param_dtype))
        if config.bias:
            self.bias = nnx.Param(jnp.zeros(dim, policy.param_dtype))
        self.config = config
        self.policy = policy

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise.

        Args:
            x: Any floating dtype.

        Returns:
            In the compute dtype.
        """
        config, compute = self.config, self.policy.compute_dtype
        wide = x.astype("float32")
        if config.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        out = unit(wide, config.eps)
        if config.scale:
            scale = self.scale[...].astype("float32")
            out = out if config.late_cast else out.astype(compute)
            out = out * (scale + 1 if config.offset else scale).astype(out.dtype)
        if config.bias:
            out = out + self.bias[...].astype(out.dtype)
        return fence(out.astype(compute))


def unit(x: Float[Array, "... dim"], eps: float) -> Float[Array, "... dim"]:
    r"""Divide by the root mean square: $x / \sqrt{\overline{x^2} + \epsilon}$.

    Args:
        x: In float32.
        eps: $\epsilon$.

    Example:
        >>> unit(jnp.array([3.0, -3.0]), 0.0).tolist()
        [1.0, -1.0]
    """
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
