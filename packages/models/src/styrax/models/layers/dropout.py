"""Dropout whose randomness is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Key


def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    r"""Set elements to 0 with probability $r$ and divide the others by $1 - r$.

    Args:
        x: Activations.
        rate: $r$, in `[0, 1)`.
        key: Decides which; `None` drops nothing.

    Example:
        >>> dropout(jnp.ones(3), 0.5, None).tolist()
        [1.0, 1.0, 1.0]
        >>> sorted(set(dropout(jnp.ones(99), 0.5, jax.random.key(0)).tolist()))
        [0.0, 2.0]
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
