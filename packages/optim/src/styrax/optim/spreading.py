"""Where batches of matrices lie while they are worked on: whole ones on each device, not parts of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from styrax.core.errors import UserError
from styrax.core.placing import dividing, over_copies
from styrax.optim.barrier import alike, barrier

ANYHOW = PartitionSpec.UNCONSTRAINED


def spread(
    f: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None = None,
    axes: Collection[str] | None = None,
    *,
    home: int = 0,
) -> Callable[..., Any]:
    """Let the devices of a mesh share the matrices of a batch, each taking whole ones.

    Left to itself, the compiler splits each matrix as its parameter is split and communicates at every product.
    With whole matrices on each device, it moves an array of the batch there or back by one all-to-all each.

    Args:
        f: Takes arrays `[copies, ...]` and gives such an array or a tuple of them, each copy for itself. Zeros are
            added to make the number of copies a multiple of the devices, where that spares a device some of them.
        mesh: The mesh if `jax.set_mesh` has set none and the arrays do not tell (see `mesh_of`).
        axes: Mesh axes to spread over; `None` for all.
        home: The last so many arrays that `f` takes and gives stay on the devices that work on them, as
            `styrax.core.placing.over_copies` lays them, and are not moved.

    Returns:
        `f`, constrained if there is a mesh. It raises `UserError` if the mesh has no such axis.
    """

    def on_mesh(*arrays: Any) -> Any:
        used = mesh_of(arrays, mesh)
        if used is None:
            return f(*arrays)
        if unknown := [name for name in axes or () if name not in used.axis_names]:
            raise UserError(f"stack_axes: the mesh has no {', '.join(unknown)}; it has {', '.join(used.axis_names)}")
        kinds = zip(used.axis_names, used.axis_types)
        names = tuple(n for n, kind in kinds if kind != AxisType.Manual and (axes is None or n in axes))
        devices = math.prod(used.shape[name] for name in names)
        if devices == 1:
            return f(*arrays)
        copies = arrays[0].shape[0]
        fitting = dividing(copies, names, used)
        if copies // math.prod(used.shape[name] for name in fitting) <= -(-copies // devices):
            names, devices = fitting, 1
        extra = -copies % devices
        whole = PartitionSpec(names or None)

        def there(x: Any, moved: bool) -> Any:
            if extra:
                x = jnp.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1))
            # Or the compiler would move the gradient, the momentum and the weights and not what is made from them.
            return barrier(x) if moved else x

        def back(x: Any, moved: bool) -> Any:
            if not moved:
                return x[:copies]
            x = barrier(x[:copies])
            # As what was given, or each of several uses of it might move it for itself.
            like = isinstance(x, Tracer) and x.shape == arrays[0].shape
            x = alike(arrays[0], x) if like else x
            return jax.lax.with_sharding_constraint(x, NamedSharding(used, PartitionSpec(*(ANYHOW,) * x.ndim)))

        given = [there(x, number < len(arrays) - home) for number, x in enumerate(arrays)]
        # By hand and not by a constraint, for loops and factorisations that the compiler would not split.
        local: Any = jax.shard_map(
            f,
            mesh=used if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=whole,
            out_specs=whole,
            axis_names={n for n, kind in zip(used.axis_names, used.axis_types) if kind != AxisType.Manual},
            check_vma=False,
        )
        results = local(*given)
        if not isinstance(results, tuple):
            return back(results, True)
        return tuple(back(x, number < len(results) - home) for number, x in enumerate(results))

    return on_mesh


def mesh_of(arrays: Iterable[Any], mesh: Mesh | AbstractMesh | None = None) -> Mesh | AbstractMesh | None:
    """Find the mesh that arrays lie on.

    That which `jax.set_mesh` has set counts first, then the one given, then that of the first array which has one.
    While `jax.jit` traces, an array that was given to it on a mesh has that mesh in its type, with automatic axes too;
    only how these split it nobody knows before it is compiled.

    Returns:
        The mesh; `None` if there is none or it has one device.
    """
    context = jax.sharding.get_abstract_mesh()
    found: Any = mesh if context.empty else context
    for x in arrays if found is None else ():
        where = getattr(x, "sharding", None) if not isinstance(x, Tracer) else jax.typeof(x).sharding
        if isinstance(where, NamedSharding) and not where.mesh.empty:
            found = where.mesh
            break
    return None if found is None or found.size == 1 else found


def settled(x: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Lay a stack of a state as `styrax.core.placing.over_copies` says, where the compiler would decide."""
    if mesh is None or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, over_copies(x.shape, mesh)))


def automatic(f: Callable[..., Any], arrays: tuple[Any, ...], like: Any) -> Any:
    """Call a function with its arrays on automatic axes, where a mesh has explicit ones.

    The types of explicit axes forbid to reshape split axes, as one does to lay parameters out as matrices.

    Args:
        f: Takes `arrays`.
        arrays: Trees of arrays; `f` must close over none.
        like: Arrays that those of the result lie as, a tree like the result.
    """
    where = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    if not any(AxisType.Explicit in s.mesh.axis_types for s in jax.tree.leaves(where) if not s.mesh.empty):
        return f(*arrays)
    lost = [s for s in jax.tree.leaves(where) if s.mesh.empty]
    if lost:
        raise UserError(
            f"{len(lost)} arrays of the gradient or the optimizer's state lie on no mesh, the others on one with "
            "explicit axes; make the state by styrax.optim.init(tx, params), and put all parameters on the mesh"
        )
    on_automatic_axes: Any = jax.sharding.auto_axes(f, out_sharding=where)
    return on_automatic_axes(*arrays)
