"""Where an optimizer's state lies: as the parameters that it belongs to."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from styrax.core.mesh import follow
from styrax.core.tree import flatten, unflatten


def state_shardings(tx: Any, params: Any) -> Any:
    """Derive the shardings of an optimizer's state from those of the parameters.

    A leaf of the state whose path ends with the path of a parameter and that has its shape lies as that
    parameter; the longest such path counts. Everything else is replicated over the parameters' mesh.

    `jax.jit(tx.init)` alone does not do this on a mesh with automatic axes: it makes replicated state, the
    whole of it on every device. Give it the result as `out_shardings`.

    Args:
        tx: Any optax transformation.
        params: Arrays, or `jax.ShapeDtypeStruct`s with a sharding.

    Returns:
        A tree like `tx.init(params)` with a sharding at each leaf.

    Raises:
        ValueError: A parameter lies on no mesh and no one device (all such are listed), or they lie on several.

    Example:
        >>> import optax
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
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
        lines = ["parameters without a NamedSharding (put arrays on a mesh, or give ShapeDtypeStruct one):"]
        raise ValueError("\n  ".join(lines + [f"{path}: {sharding}" for path, sharding in wrong.items()]))
    return follow(jax.eval_shape(tx.init, params), params, unflatten(params, where), _replicated(where))


def _replicated(where: dict[str, Any]) -> Any:
    first: dict[Any, str] = {}
    for path, sharding in where.items():
        first.setdefault(sharding.mesh if isinstance(sharding, NamedSharding) else sharding, path)
    if len(first) > 1:
        lines = ["the parameters do not lie on one mesh; for instance:"]
        raise ValueError("\n  ".join(lines + [f"{path}: {where[path]}" for path in first.values()]))
    one = next(iter(where.values()), None)
    return NamedSharding(one.mesh, PartitionSpec()) if isinstance(one, NamedSharding) else one
