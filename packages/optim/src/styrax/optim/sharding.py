"""Where an optimizer's state lies: as the parameters that it belongs to, as far as its shapes allow."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from styrax.core.placing import follow
from styrax.core.tree import flatten, unflatten


def state_shardings(tx: Any, params: Any) -> Any:
    """Derive the shardings of an optimizer's state from those of the parameters.

    What has the shape of its parameter lies as the parameter. What has fewer or shorter axes (rows and columns,
    means, scales of blocks) is split along those that are left. A stack with a matrix for each copy (SOAP, Shampoo and
    Kron) is split over copies first, and over rows if devices are left. Everything else is replicated over the
    parameters' mesh. `styrax.core.placing.follow` has the rules.

    `jax.jit(tx.init)` alone does not do this on a mesh with automatic axes: it makes replicated state, the
    whole of it on every device. Use `init`, or give it the result as `out_shardings`.

    Args:
        tx: Any optax transformation.
        params: Arrays, or `jax.ShapeDtypeStruct`s with a sharding.

    Returns:
        A tree like `tx.init(params)` with a sharding at each leaf.

    Raises:
        ValueError: A parameter lies on no mesh and no one device (all such are listed), or they lie on several.

    Example:
        >>> import optax
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        >>> there = NamedSharding(mesh, PartitionSpec("data", None))
        >>> params = {"w": jax.ShapeDtypeStruct((4, 2), "float32", sharding=there)}
        >>> state = state_shardings(optax.adam(1e-3), params)
        >>> tuple(state[0].mu["w"].spec), tuple(state[0].count.spec)
        (('data', None), ())
    """
    leaves = flatten(params)
    where = {path: getattr(leaf, "sharding", None) for path, leaf in leaves.items()}
    wrong = {path: s for path, s in where.items() if not isinstance(s, NamedSharding | SingleDeviceSharding)}
    if wrong:
        lines = ["parameters without a sharding (use jax.device_put, or give ShapeDtypeStruct one):"]
        raise ValueError("\n  ".join(lines + [f"{path}: {sharding}" for path, sharding in wrong.items()]))
    return follow(jax.eval_shape(tx.init, params), params, unflatten(params, where), _replicated(where))


def init(tx: Any, params: Any) -> Any:
    """Make an optimizer's state in its shards, so that no device ever holds more than its part.

    The same as `tx.init(params)` with the leaves where `state_shardings` says. An update under `jax.jit` keeps them
    there on explicit axes. On automatic axes the compiler decides where results lie; give `jax.jit` the same shardings
    as `out_shardings` to make sure.

    Args:
        tx: Any optax transformation whose `init` can be traced.
        params: Arrays on one device or one mesh, its axes automatic or explicit.

    Returns:
        The state.

    Raises:
        ValueError: As `state_shardings`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> init(optax.sgd(0.1, momentum=0.9), {"w": jnp.ones(2)})[0].trace
        {'w': Array([0., 0.], dtype=float32)}
    """
    leaves = flatten(params).values()
    if not any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves):
        # On one device, and no more committed to it than the parameters: otherwise a first step is compiled twice.
        return jax.jit(tx.init)(params)
    where = state_shardings(tx, params)

    def place(x: Any, sharding: Any) -> Any:
        # On explicit axes the sharding is a part of the type, which `out_shardings` may not change.
        mesh = getattr(sharding, "mesh", None)
        explicit = mesh is not None and all(kind == AxisType.Explicit for kind in mesh.axis_types)
        return jax.sharding.reshard(x, sharding) if explicit else x

    return jax.jit(lambda params: jax.tree.map(place, tx.init(params), where), out_shardings=where)(params)


def _replicated(where: dict[str, Any]) -> Any:
    first: dict[Any, str] = {}
    for path, sharding in where.items():
        first.setdefault(sharding.mesh if isinstance(sharding, NamedSharding) else sharding, path)
    if len(first) > 1:
        lines = ["the parameters do not lie on one mesh; for instance:"]
        raise ValueError("\n  ".join(lines + [f"{path}: {where[path]}" for path in first.values()]))
    one = next(iter(where.values()), None)
    return NamedSharding(one.mesh, PartitionSpec()) if isinstance(one, NamedSharding) else one
