"""Global arrays of a batch, of which every process makes only the rows on its own devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError

if TYPE_CHECKING:
    import jax
    from jaxtyping import Shaped

    from styrax.data.loader import StepSource

#: Name -> shape of the whole array and its dtype.
Spec = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def global_batch(
    read: Callable[[slice], dict[str, np.ndarray]], spec: Spec, sharding: jax.sharding.Sharding
) -> dict[str, Shaped[jax.Array, "batch ..."]]:
    """Make a batch of global arrays, reading each stretch of rows that this process holds once.

    Args:
        read: Gives rows of the batch as numpy arrays: `lambda rows: data.batch(step, rows)`.
        spec: Shape and dtype of each array of the whole batch, rows first: `data.spec(step)`.
        sharding: How arrays lie on devices; columns (the sequence) may be sharded too.

    Returns:
        The arrays, by name.
    """
    import jax

    cache: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def part(name: str, rows_in_all: int) -> Callable[[Any], np.ndarray]:
        def callback(index: Any) -> np.ndarray:
            key = index[0].indices(rows_in_all)[:2]
            if key not in cache:
                cache[key] = read(slice(*key))
            return cache[key][name][:, *index[1:]]

        return callback

    return {
        name: jax.make_array_from_callback(
            shape, sharding, part(name, shape[0]), dtype=jax.dtypes.canonicalize_dtype(dtype)
        )
        for name, (shape, dtype) in spec.items()
    }


def step_maker(data: StepSource, sharding: jax.sharding.Sharding) -> Callable[[int], dict[str, Any]]:
    """Give the function from a step to its global batch.

    Raises:
        UserError: The sharding does not divide the batch of some step.
    """
    shapes = dict.fromkeys(shape for spec in data.specs for shape, _ in spec.values())
    problems = []
    for shape in shapes:
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            size = " x ".join(map(str, shape))
            problems.append(f"a batch of {size} cannot be sharded as {sharding}: {error}")
    if problems:
        raise UserError("\n".join([*problems, "choose a batch_size and seq_len that the mesh divides"]))
    return lambda step: global_batch(lambda rows: data.batch(step, rows), data.spec(step), sharding)
