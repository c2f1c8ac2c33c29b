"""Where each array of the training state lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from styrax.core.mesh import DEFAULT_RULES, follow, shardings, spec
from styrax.train.step import TrainState


def state_shardings(
    abstract: TrainState,
    mesh: Mesh,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None,
    rules: Mapping[str, tuple[str, ...]] = DEFAULT_RULES,
) -> TrainState:
    """Shardings of a whole state from the logical axes of its parameters.

    Args:
        abstract: The state as ``jax.ShapeDtypeStruct`` leaves.
        mesh: The device mesh.
        logical_axes: Path pattern to logical axis names, one a dimension; None replicates every parameter.
        rules: Logical axis to mesh axes.

    Returns:
        The same tree with a ``NamedSharding`` a leaf. An optimizer's array lies as the parameter whose path ends
        its own, on the axes that it has of it (see ``styrax.core.mesh.follow``); all else is replicated.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    if logical_axes is None:
        return jax.tree.map(lambda _: everywhere, abstract)
    params = shardings(abstract.params, logical_axes, rules, mesh)
    opt_state = follow(abstract.opt_state, abstract.params, params, everywhere)
    variables = jax.tree.map(lambda _: everywhere, abstract.variables)
    return TrainState(params, opt_state, variables, step=cast(Any, everywhere), key=everywhere)


def batch_sharding(mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = DEFAULT_RULES) -> NamedSharding:
    """How a ``[batch, sequence]`` array of a batch lies on the mesh."""
    return NamedSharding(mesh, spec(("batch", "seq"), rules, mesh))


def batch_shards(mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = DEFAULT_RULES) -> int:
    """Number of pieces that the mesh cuts the batch axis into."""
    axes = spec(("batch",), rules, mesh)[0] if len(spec(("batch",), rules, mesh)) else None
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size
