"""Global arrays of a batch, of which every process makes only the rows on its own devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError

if TYPE_CHECKING:
    import jax
    from jaxtyping import Shaped

    from styrax.data.loader import StepSource

DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "loss_mask": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
}


def global_batch(
    read: Callable[[slice], dict[str, np.ndarray]], shape: tuple[int, int], sharding: jax.sharding.Sharding
) -> dict[str, Shaped[jax.Array, "batch seq"]]:
    """Make a batch of global arrays, reading each stretch of rows that this process holds once.

    Args:
        read: Gives rows of the batch as numpy arrays: `lambda rows: data.batch(step, rows)`.
        shape: Rows and columns of the whole batch.
        sharding: How it lies on devices; columns (the sequence) may be sharded too.

    Returns:
        The arrays, by name.
    """
    import jax

    cache: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def part(name: str) -> Callable[[Any], np.ndarray]:
        def callback(index: Any) -> np.ndarray:
            rows, columns = index
            key = rows.indices(shape[0])[:2]
            if key not in cache:
                cache[key] = read(slice(*key))
            return cache[key][name][:, columns]

        return callback

    return {
        name: jax.make_array_from_callback(shape, sharding, part(name), dtype=dtype) for name, dtype in DTYPES.items()
    }


def step_maker(data: StepSource, sharding: jax.sharding.Sharding) -> Callable[[int], dict[str, Any]]:
    """Give the function from a step to its global batch.

    Raises:
        UserError: The sharding does not divide the batch.
    """
    shape = (data.batch_size, data.seq_len)
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise UserError(
            f"a batch of {shape[0]} rows and {shape[1]} columns cannot be sharded as {sharding}: {error}; "
            "choose a batch_size and seq_len that the mesh divides"
        ) from error
    return lambda step: global_batch(lambda rows: data.batch(step, rows), shape, sharding)
