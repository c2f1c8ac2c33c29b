"""Where each array of the training state lives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from styrax.core import UserError, rules_in_force, tree
from styrax.core.mesh import shardings, spec
from styrax.core.placing import follow
from styrax.core.random import stream
from styrax.train.step import TrainState, init_state, split_model

_SMALL = 2**24
Initial = Callable[["Mesh | None", Mapping[str, tuple[str, ...]]], nnx.Module]


def lay_out(
    model: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    initial: Initial | None = None,
) -> tuple[Any, TrainState, Callable[[], TrainState]]:
    """Find out what the state of a run is and where it lies, with nothing allocated yet.

    Args:
        model: An ``nnx.Module``, or a function of ``nnx.Rngs`` that makes one.
        tx: The optax transformation.
        seed: Root of initialisation.
        mesh: Device mesh; None for one device.
        logical_axes: Parameter path pattern to logical axes; None replicates the parameters.
        rules: Logical axes to mesh axes; None means those in force (``styrax.core.use_rules``).
        initial: Gives the module with the weights to begin with, as ``fit`` takes it; None draws them.

    Returns:
        ``(graphdef, abstract, make)``: the static model, the state as ``jax.ShapeDtypeStruct`` (with shardings if
        there is a mesh), and a function that makes the state in its place.
    """
    key, rules = jax.random.key(seed), rules_in_force() if rules is None else rules

    def build(key: Any) -> TrainState:
        made = model if isinstance(model, nnx.Module) else model(nnx.Rngs(params=stream(key, "init")))
        return init_state(made, tx, key=key)[1]

    if isinstance(model, nnx.Module):
        graphdef = split_model(model)[0]
    else:
        graphdef = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(params=stream(key, "init")))), nnx.Param, ...)[0]
    abstract = jax.eval_shape(build, key)

    def begin(where: TrainState | None) -> TrainState:
        if initial is None:
            return jax.jit(build, out_shardings=where, compiler_options=_once(abstract, mesh))(key)
        params, variables = split_model(initial(mesh, rules))[1:]
        if problems := _differences({"params": params, "variables": variables}, abstract):
            raise UserError("the weights to begin with are not of this model:\n  " + "\n  ".join(problems))
        opt_state = jax.jit(tx.init, out_shardings=None if where is None else where.opt_state)(params)
        step, held = jnp.zeros((), jnp.int32), key
        if where is not None:
            params, variables, step, held = jax.device_put(
                (params, variables, step, held), (where.params, where.variables, where.step, where.key)
            )
        return TrainState(params, opt_state, variables, step, held)

    if mesh is None:
        return graphdef, abstract, lambda: begin(None)
    where = state_shardings(abstract, mesh, logical_axes, rules)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        where,
    )
    return graphdef, abstract, lambda: begin(where)


def _once(abstract: TrainState, mesh: Mesh | AbstractMesh | None) -> dict[str, Any] | None:
    """Options for a program that runs once: of a small model, to optimise it takes longer than it then saves."""
    where = jax.default_backend() if mesh is None or isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
    small = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract.params)) < _SMALL
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return quick if small and where == "cpu" else None


def _differences(found: Mapping[str, Any], wanted: TrainState) -> list[str]:
    """Say which arrays are not what they should be, a line each."""
    problems = []
    for name, given in found.items():
        ours, theirs = tree.flatten(getattr(wanted, name)), tree.flatten(given)
        problems += [f"missing: {path}" for path in ours if path not in theirs]
        problems += [f"not in the model: {path}" for path in theirs if path not in ours]
        problems += [
            f"{path}: expected {leaf.dtype}{list(leaf.shape)}, got {theirs[path].dtype}{list(theirs[path].shape)}"
            for path, leaf in ours.items()
            if path in theirs and (leaf.shape, leaf.dtype) != (theirs[path].shape, theirs[path].dtype)
        ]
    return problems


def state_shardings(
    abstract: TrainState,
    mesh: Mesh,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
) -> TrainState:
    """Shardings of a whole state from the logical axes of its parameters.

    Args:
        abstract: The state as ``jax.ShapeDtypeStruct`` leaves.
        mesh: The device mesh.
        logical_axes: Path pattern to logical axis names, one a dimension; None replicates every parameter.
        rules: Logical axis to mesh axes; None means those in force.

    Returns:
        The same tree with a ``NamedSharding`` a leaf. An optimizer's array lies as the parameter whose path ends
        its own, on the axes that it has of it (see ``styrax.core.placing.follow``). A variable whose path and number of
        dimensions fit a pattern lies as a parameter would, such as a frozen weight. All else is replicated.
    """
    rules, everywhere = rules_in_force() if rules is None else rules, NamedSharding(mesh, PartitionSpec())
    if logical_axes is None:
        return jax.tree.map(lambda _: everywhere, abstract)
    params = shardings(abstract.params, logical_axes, rules, mesh)
    opt_state = follow(abstract.opt_state, abstract.params, params, everywhere)
    named = {}
    for path, leaf in tree.flatten(abstract.variables).items():
        axes = tree.first_match(logical_axes, path, ())
        named[path] = axes if len(axes) == leaf.ndim else (None,) * leaf.ndim
    variables = shardings(abstract.variables, named, rules, mesh)
    return TrainState(params, opt_state, variables, step=cast(Any, everywhere), key=everywhere)


def batch_sharding(mesh: Mesh | AbstractMesh, rules: Mapping[str, tuple[str, ...]] | None = None) -> NamedSharding:
    """How a ``[batch, sequence]`` array of a batch lies on the mesh, by the rules given or else those in force."""
    return NamedSharding(mesh, spec(("batch", "seq"), rules_in_force() if rules is None else rules, mesh))


def batch_shards(mesh: Mesh | AbstractMesh, rules: Mapping[str, tuple[str, ...]] | None = None) -> int:
    """Number of pieces that the mesh cuts the batch axis into, by the rules given or else those in force."""
    axes = spec(("batch",), rules_in_force() if rules is None else rules, mesh)[0]
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size
