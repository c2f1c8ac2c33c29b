"""Factors of stacked matrices, one matrix at a time where LAPACK makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def eigh(x: Float[Array, "n side side"]) -> tuple[Float[Array, "n side"], Float[Array, "n side side"]]:
    """Give the eigenvalues, least first, and the eigenvectors of symmetric matrices.

    Example:
        >>> eigh(jnp.array([[[2.0, 0.0], [0.0, 1.0]]]))[0].tolist()
        [[1.0, 2.0]]
    """
    return _each(lambda a: tuple(jnp.linalg.eigh(a)), x)


def orthogonal(x: Float[Array, "n side side"]) -> Float[Array, "n side side"]:
    """Give the orthogonal factor `Q` of `x = Q R`.

    Example:
        >>> jnp.abs(orthogonal(jnp.array([[[2.0, 0.0], [0.0, 1.0]]]))).tolist()
        [[[1.0, 0.0], [0.0, 1.0]]]
    """
    return _each(lambda a: jnp.linalg.qr(a)[0], x)


def _each(f: Callable[[Any], Any], x: Any) -> Any:
    # On a CPU, jaxlib's factorisations of a batch run on a thread of XLA's pool, hand their matrices to that same pool
    # and wait for them. As many of them at once as there are threads, from two on, wait for ever (seen with jaxlib
    # 0.10.2: all threads in `ParallelBatchMap`). One matrix is factorised where it is. A loop over an axis that is
    # split over devices gathers it: where stacks are spread, call this on each device's part, in `jax.shard_map`.
    return jax.lax.platform_dependent(x, cpu=lambda x: jax.lax.map(f, x), default=f)
