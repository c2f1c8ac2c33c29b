"""On which mesh a computation is, and which of its axes can be taken in hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from styrax.core.mesh import DEFAULT_RULES
from styrax.core.placing import dividing


class Here(NamedTuple):
    """The mesh of an array.

    Attributes:
        mesh: The mesh that is set, or that the array lies on; it may be empty.
        free: Size of each of its axes that nobody has split by hand.
    """

    mesh: Any
    free: dict[str, int]

    def axes(self, rule: str, size: int) -> tuple[str, ...]:
        """Name the free axes that `styrax.core.DEFAULT_RULES` give for a logical axis, as far as they divide it.

        Args:
            rule: Name of the logical axis.
            size: Of the array along it.
        """
        return dividing(size, [name for name in DEFAULT_RULES[rule] if name in self.free], self.mesh)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Multiply the sizes of some axes.

        Args:
            axes: From `axes`.
        """
        found = 1
        for name in axes:
            found *= self.free[name]
        return found


def mesh_of(array: jax.Array) -> Here:
    """Find the mesh that is set, or that an array lies on.

    Args:
        array: Traced or not.

    Example:
        >>> mesh_of(jax.numpy.ones(2)).free
        {}
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    mesh = jax.typeof(array).sharding.mesh if mesh.empty else mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return Here(mesh, {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual})
