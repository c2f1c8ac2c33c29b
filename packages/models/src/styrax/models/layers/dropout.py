"""Dropout whose randomness is an argument: one key for all, or one for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key


def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, "*rows"] | None) -> Float[Array, "..."]:
    r"""Set elements to 0 with probability $r$ and divide the others by $1 - r$.

    Args:
        x: Activations; with a key for each row `[rows, ...]`, or `[rows * seq, ...]`.
        rate: $r$, in `[0, 1)`.
        key: Decides which; one for all, or one for each row, which then loses the same whatever rows are beside it;
            `None` drops nothing.

    Example:
        >>> dropout(jnp.ones(3), 0.5, None).tolist()
        [1.0, 1.0, 1.0]
        >>> sorted(set(dropout(jnp.ones(99), 0.5, jax.random.key(0)).tolist()))
        [0.0, 2.0]
    """
    if key is None or rate == 0.0:
        return x
    if key.ndim:
        cut = x.reshape(len(key), -1, *x.shape[x.ndim - 1 :])
        keep = jax.vmap(lambda each: jax.random.bernoulli(each, 1.0 - rate, cut.shape[1:]))(key).reshape(x.shape)
    else:
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def of_rows(key: Key[Array, ""], row_ids: Int[Array, " rows"]) -> Key[Array, " rows"]:
    """Give every row a key of its own.

    Args:
        key: Of the step.
        row_ids: Numbers of the rows in the whole batch.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)


def of_layer(key: Key[Array, "*rows"], layer: int | Int[Array, ""]) -> Key[Array, "*rows"]:
    """Give a layer keys of its own.

    Args:
        key: One, or one for each row.
        layer: Its number.
    """
    fold = jax.random.fold_in if key.ndim == 0 else jax.vmap(jax.random.fold_in, (0, None))
    return fold(key, layer)


def two(key: Key[Array, "*rows"]) -> tuple[Key[Array, "*rows"], Key[Array, "*rows"]]:
    """Make two keys of one, or two for each row.

    Args:
        key: Used up.
    """
    found = jax.random.split(key) if key.ndim == 0 else jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
    return found[0], found[1]
