"""On which mesh a computation is, and which of its axes the rules in force say to take in hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from styrax.core import rules_in_force
from styrax.core.mesh import spec
from styrax.core.placing import dividing


class Here(NamedTuple):
    """The mesh of an array.

    Attributes:
        mesh: The mesh that is set, or that the array lies on; it may be empty.
        free: Size of each of its axes that nobody has split by hand.
    """

    mesh: Any
    free: dict[str, int]

    def named(self, *rules: str | None) -> tuple[tuple[str, ...], ...]:
        """Name the free axes of several devices that split the dimensions of an array, by the rules in force.

        As `styrax.core.mesh.spec` has it, an axis that a dimension has taken is not there for those after it.

        Args:
            rules: Names of the logical axes of the array, or `None`.

        Raises:
            UserError: A logical axis has no rule.

        Example:
            >>> from styrax.core import DEFAULT_RULES, MeshConfig, use_rules
            >>> mesh = MeshConfig(axes={"data": 4, "tensor": 2}).abstract(8)
            >>> here = Here(mesh, dict(mesh.shape))
            >>> with use_rules({**DEFAULT_RULES, "seq": ("tensor",)}):
            ...     here.named("batch", "seq", "heads"), here.named("heads")
            ((('data',), ('tensor',), ()), (('tensor',),))
        """
        if all(size == 1 for size in self.free.values()):
            return ((),) * len(rules)
        taken = spec(rules, rules_in_force(), self.mesh)
        axes = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in taken]
        return tuple(tuple(name for name in names if self.free.get(name, 1) > 1) for names in axes)

    def split(self, rules: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Name the axes of `named`, as far as they divide an array.

        Args:
            rules: Names of its logical axes, or `None`.
            shape: Its size along each.
        """
        return tuple(dividing(size, names, self.mesh) for names, size in zip(self.named(*rules), shape, strict=True))

    def axes(self, rule: str, size: int) -> tuple[str, ...]:
        """Name the axes of `named` for one logical axis alone, as far as they divide it.

        Args:
            rule: Name of the logical axis.
            size: Of the array along it.
        """
        return self.split((rule,), (size,))[0]

    def ways(self, axes: tuple[str, ...]) -> int:
        """Multiply the sizes of some axes.

        Args:
            axes: From `named`, `split` or `axes`.
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
