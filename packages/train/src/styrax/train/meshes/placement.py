"""Which arrays of a run's state are split over a mesh, how, and which are not and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from styrax.core import rules_in_force, tree


@dataclass(frozen=True, kw_only=True)
class Place:
    """How one array lies.

    Attributes:
        path: Of the array.
        shape: Of all of it.
        bytes: Of all of it.
        share: Bytes on each device.
        spec: Mesh axes for each of its dimensions.
        axes: Names of its dimensions; empty if it has none.
        reason: Why every device holds all of it; empty if it is split.
    """

    path: str
    shape: tuple[int, ...]
    bytes: int
    share: int
    spec: tuple[tuple[str, ...], ...]
    axes: tuple[str | None, ...]
    reason: str


def placements(
    params: Any, logical_axes: Mapping[str, tuple[str | None, ...]], rules: Mapping[str, tuple[str, ...]] | None = None
) -> list[Place]:
    """Say of each array of a tree how it lies on the mesh of its sharding.

    Args:
        params: Arrays or shapes with a ``NamedSharding``.
        logical_axes: Path pattern -> names of dimensions.
        rules: Name of a dimension -> mesh axes; None means those in force.

    Example:
        >>> import jax
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from styrax.core.mesh import MeshConfig
        >>> mesh = MeshConfig(axes={"fsdp": 4}).abstract(4)
        >>> kernel = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        >>> scale = jax.ShapeDtypeStruct((6,), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
        >>> axes = {"kernel": ("embed", "mlp"), "scale": (None,)}
        >>> for place in placements({"kernel": kernel, "scale": scale}, axes):
        ...     print(place.path, place.share, place.spec, place.reason)
        kernel 48 (('fsdp',), ())
        scale 24 ((),) its dimensions have no names, so nothing splits them
    """
    rules = rules_in_force() if rules is None else rules
    return [
        _place(path, leaf, tree.first_match(logical_axes, path, ()) or (), rules)
        for path, leaf in tree.flatten(params).items()
    ]


def _place(path: str, leaf: Any, axes: tuple[str | None, ...], rules: Mapping[str, tuple[str, ...]]) -> Place:
    size, mesh = leaf.dtype.itemsize, leaf.sharding.mesh
    entries = list(leaf.sharding.spec) + [None] * (leaf.ndim - len(leaf.sharding.spec))
    spec = tuple(() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in entries)
    ways = math.prod(mesh.shape[name] for part in spec for name in part)
    named = [name for name in axes if name is not None]
    reason = ""
    if ways == 1:
        wanted = {name: [axis for axis in rules.get(name, ()) if mesh.shape.get(axis, 1) > 1] for name in named}
        if not leaf.ndim:
            reason = "it is one number"
        elif not named:
            reason = "its dimensions have no names, so nothing splits them"
        elif not any(wanted.values()):
            texts = [f"{name} ({', '.join(rules.get(name, ())) or 'no axis'})" for name in named]
            reason = f"the mesh has no axis for {', '.join(texts)}"
        else:
            reason = "another of its dimensions has taken the axis"
    nbytes, shape = math.prod(leaf.shape) * size, tuple(leaf.shape)
    lies = {"spec": spec, "axes": tuple(axes), "reason": reason}
    return Place(path=path, shape=shape, bytes=nbytes, share=nbytes // ways, **lies)


def used(places: list[Place], mesh: Any) -> dict[str, dict[str, Any]]:
    """Say of each mesh axis what it splits.

    Args:
        places: From `placements`.
        mesh: Its axes and sizes.

    Returns:
        Axis -> its size, the names of the dimensions that it splits, and the bytes of arrays that it splits.
    """
    found: dict[str, dict[str, Any]] = {
        axis: {"size": size, "splits": [], "bytes": 0} for axis, size in mesh.shape.items()
    }
    for place in places:
        for dimension, names in enumerate(place.spec):
            for axis in names:
                name = place.axes[dimension] if dimension < len(place.axes) else None
                if name is not None and name not in found[axis]["splits"]:
                    found[axis]["splits"].append(name)
                found[axis]["bytes"] += place.bytes
    return found
