"""A result whose arrays lie over several processes, as one that a single process can use."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from styrax.train.loop import FitResult


def on_one_host(result: FitResult, mesh: jax.sharding.Mesh | None) -> FitResult:
    """Bring the weights to evaluate to every process, as arrays of its first device.

    All processes call this together. Each of them then needs the memory for all weights, so it is for samples of
    models that fit on one device. With one process nothing is done.

    Args:
        result: From :func:`styrax.train.fit`.
        mesh: The devices of the run.
    """
    if mesh is None or jax.process_count() == 1:
        return result
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    derive = result.eval_params

    def weights(params: Any, opt_state: Any, variables: Any) -> tuple[Any, Any]:
        return params if derive is None else derive(opt_state, params), variables

    with jax.set_mesh(mesh):
        gathered = jax.jit(weights, out_shardings=everywhere)(
            result.state.params, result.state.opt_state, result.state.variables
        )
    params, variables = jax.tree.map(lambda x: x.addressable_data(0), gathered)
    state = result.state._replace(params=params, opt_state=None, variables=variables)
    return dataclasses.replace(result, state=state, eval_params=None)
