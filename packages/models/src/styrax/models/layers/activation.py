"""Activations by name, so that a config can say which."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.arch import Activation

_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activate(name: Activation, x: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""Apply $x\,\sigma(x)$ "silu", $x\,\Phi(x)$ "gelu", its tanh form "gelu_tanh", "relu" or its square "relu2".

    Args:
        name: Which.
        x: Any floating dtype.

    Example:
        >>> activate("relu2", jnp.array([-1.0, 3.0])).tolist()
        [0.0, 9.0]
    """
    return _FUNCTIONS[name](x)
