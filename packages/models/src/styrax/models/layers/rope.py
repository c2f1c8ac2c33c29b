"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles.

    Attributes:
        cos: `[batch or 1, seq, 1, head_dim / 2]` float32.
        sin: The same shape.
    """

    cos: Float[Array, "batch seq 1 half"]
    sin: Float[Array, "batch seq 1 half"]


def rotation(positions: Int[Array, "batch seq"], head_dim: int, theta: float) -> Rotation:
    r"""Make the angles $p\,\theta^{-2i/d}$ of positions $p$, for $i = 0 \dots d/2 - 1$.

    In float32 always: bfloat16 angles are wrong by a radian at position 4096.

    Args:
        positions: $p$; any integers.
        head_dim: $d$, even.
        theta: $\theta$, the base.

    Example:
        >>> turn = rotation(jnp.array([[0, 1]]), 4, 10_000.0)
        >>> turn.cos.shape, float(turn.sin[0, 0, 0, 0])
        ((1, 2, 1, 2), 0.0)
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, :, None, None].astype("float32") * frequencies.astype("float32")
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "batch seq heads head_dim"], by: Rotation) -> Float[Array, "batch seq heads head_dim"]:
    r"""Turn each pair $(x_i, x_{i + d/2})$ by its angle, so that a product of two depends on their distance.

    $(x_i \cos a_i - x_{i+d/2} \sin a_i,\; x_{i+d/2} \cos a_i + x_i \sin a_i)$. The pairs are the halves of a
    head, as in Hugging Face checkpoints, not neighbours.

    Source: Su et al., "RoFormer" (2021), section 3.4.2.

    Args:
        x: Queries or keys.
        by: From `rotation`.

    Returns:
        In the dtype of `x`.

    Example:
        >>> quarter = Rotation(jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)))
        >>> rotate(jnp.array([[[[1.0, 2.0]]]]), quarter).tolist()
        [[[[-2.0, 1.0]]]]
    """
    first, second = jnp.split(x.astype("float32"), 2, axis=-1)
    turned = [first * by.cos - second * by.sin, second * by.cos + first * by.sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
