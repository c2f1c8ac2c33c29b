"""Device meshes from a config, and shardings from logical axis names by a table of rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from styrax.core import tree
from styrax.core.config.convert import check
from styrax.core.errors import UserError, nearest
from styrax.core.placing import ways_of
from styrax.core.slices import arranged, slices_of

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec

Rules = Mapping[str, tuple[str, ...]]
Axes = tuple[str | None, ...]

DEFAULT_RULES: Rules = MappingProxyType(
    {
        "batch": ("data", "fsdp", "expert", "stage"),
        "seq": ("context",),
        "embed": ("fsdp", "expert"),
        "mlp": ("tensor",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "vocab": ("tensor",),
        "layers": ("stage",),
        "expert": ("expert",),
    }
)
"""Logical axis -> the mesh axes that split it, those that a mesh has."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How devices are arranged.

    Attributes:
        axes: Mesh axis name -> number of devices along it, in order from the slowest links to the fastest;
            one of them may be -1, which takes all devices that the others leave.
        dcn: Mesh axis name -> how many ways of it lie across slices, which a slower network joins; the rest of the
            axis lies within a slice. The ways multiply to the number of slices. Empty for devices of one slice.

    Example:
        >>> MeshConfig(axes={"data": -1, "tensor": 2}).sizes(8)
        {'data': 4, 'tensor': 2}
        >>> MeshConfig(axes={"data": 4, "fsdp": 256}, dcn={"data": 4}).slices
        4
    """

    axes: dict[str, int] = field(default_factory=lambda: {"data": -1})
    dcn: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        problems = [f"axis {name!r} has size {n}" for name, n in self.axes.items() if n < 1 and n != -1]
        if problems:
            problems = [f"{'; '.join(problems)}: expected 1 or more, or -1 for all devices that are left"]
        free = [name for name, n in self.axes.items() if n == -1]
        if len(free) > 1:
            problems.append(f"axes {', '.join(free)} are all -1: expected at most one")
        if not self.axes:
            problems.append("axes is empty: expected at least one, such as {'data': -1}")
        for name, ways in self.dcn.items():
            if name not in self.axes:
                known = ", ".join(self.axes)
                problems.append(f"dcn.{name}: no such axis{nearest(name, self.axes)}; the axes are {known}")
            elif ways < 1:
                problems.append(f"dcn.{name}: expected 1 or more ways across slices, got {ways}")
            elif self.axes[name] > 0 and self.axes[name] % ways:
                problems.append(
                    f"dcn.{name}: {ways} ways across slices do not divide the axis, which is {self.axes[name]}; "
                    "the size of an axis counts all of its devices, in all slices"
                )
        if problems:
            raise UserError("\n".join(problems))

    @property
    def slices(self) -> int:
        """How many slices the mesh is for."""
        return math.prod(self.dcn.values())

    def over_slices(self, slices: int) -> MeshConfig:
        """Give a mesh for so many slices: this, or if it says nothing of slices, with the axis `data` across them.

        An axis `data` that is -1 or divides by the number takes it in; otherwise the axis is made, or made longer.

        Args:
            slices: How many there are.

        Example:
            >>> MeshConfig(axes={"fsdp": -1}).over_slices(4)
            MeshConfig(axes={'data': 4, 'fsdp': -1}, dcn={'data': 4})
        """
        if self.dcn or slices == 1:
            return self
        axes = {"data": 1, **self.axes}
        if axes["data"] > 0 and axes["data"] % slices:
            axes["data"] *= slices
        return MeshConfig(axes=axes, dcn={"data": slices})

    def sizes(self, devices: int) -> dict[str, int]:
        """Resolve the -1 for a number of devices.

        Raises:
            UserError: The axes do not multiply to `devices`.
        """
        fixed = math.prod(n for n in self.axes.values() if n != -1)
        given = ", ".join(f"{name}={n}" for name, n in self.axes.items())
        if -1 in self.axes.values():
            if devices < 1 or devices % fixed:
                raise UserError(
                    f"mesh {given}: {devices} device(s) do not divide by {fixed}, the product of the fixed "
                    f"axes; choose sizes whose product divides {devices}"
                )
        elif fixed != devices:
            raise UserError(
                f"mesh {given} needs {fixed} devices, got {devices}; "
                "change a size, or set one axis to -1 to take what is there"
            )
        sizes = {name: devices // fixed if n == -1 else n for name, n in self.axes.items()}
        if uneven := [f"{name}={sizes[name]} by {ways}" for name, ways in self.dcn.items() if sizes[name] % ways]:
            raise UserError(
                f"mesh {given} on {devices} devices: the ways across slices do not divide {', '.join(uneven)}; "
                "choose dcn whose ways divide their axes"
            )
        return sizes

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Arrange devices in a mesh, all axes `AxisType.Auto`.

        Devices that know their slice are arranged by it. Others, such as CPUs, count as slices in equal runs.

        Args:
            devices: Which devices; all of them by default.

        Raises:
            UserError: The axes do not multiply to the number of devices, or `dcn` not to the number of slices.
        """
        import jax

        devices = jax.devices() if devices is None else list(devices)
        sizes = self.sizes(len(devices))
        if self.slices > 1 or len(slices_of(devices)) > 1:
            return jax.sharding.Mesh(arranged(devices, sizes, self.dcn), tuple(sizes), axis_types=_auto(len(sizes)))
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=_auto(len(sizes)), devices=devices)

    def abstract(self, n: int) -> AbstractMesh:
        """Give the mesh's shape for `n` devices that need not exist, to plan and compile ahead.

        Raises:
            UserError: The axes do not multiply to `n`.

        Example:
            >>> MeshConfig(axes={"fsdp": -1}).abstract(64).shape["fsdp"]
            64
        """
        from jax.sharding import AbstractMesh

        sizes = self.sizes(n)
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=_auto(len(sizes)))


def idle_axes(names: Iterable[str], rules: Rules = DEFAULT_RULES) -> list[str]:
    """Name the mesh axes that no rule uses: nothing would be split over them, and their devices do the same work.

    Args:
        names: Names of mesh axes.
        rules: Logical axis -> mesh axes.

    Returns:
        A line for each.

    Example:
        >>> idle_axes(["fsdp", "tensr"])
        ["tensr: no rule splits anything over this mesh axis (did you mean 'tensor'?); the axes with rules are \
data, fsdp, expert, stage, context, tensor"]
    """
    used = list(dict.fromkeys(axis for axes in rules.values() for axis in axes))
    return [
        f"{name}: no rule splits anything over this mesh axis{nearest(name, used)}; the axes with rules are "
        + ", ".join(used)
        for name in names
        if name not in used
    ]


def spec(axes: Axes, rules: Rules, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Turn the logical axes of an array into a partition over a mesh.

    Each dimension takes the mesh axes that its rule names, without those that the mesh lacks and those that
    an earlier dimension has taken.

    Args:
        axes: One logical name, or `None` (replicated), per dimension.
        rules: Logical name -> mesh axes.
        mesh: Only its axis names matter.

    Raises:
        UserError: A logical name has no rule.

    Example:
        >>> mesh = MeshConfig(axes={"fsdp": 4, "tensor": 2}).abstract(8)
        >>> tuple(spec(("embed", "heads", None), DEFAULT_RULES, mesh))
        ('fsdp', 'tensor', None)
        >>> tuple(spec(("batch", "embed"), DEFAULT_RULES, mesh))
        ('fsdp', None)
    """
    from jax.sharding import PartitionSpec

    unknown = [axis for axis in axes if axis is not None and axis not in rules]
    if unknown:
        raise UserError(
            f"no rule for logical axis {', '.join(map(repr, unknown))}{nearest(unknown[0], rules)}; "
            f"the rules are for {', '.join(rules)}"
        )
    taken: set[str] = set()
    entries: list[str | tuple[str, ...] | None] = []
    for axis in axes:
        free = [m for m in (rules[axis] if axis else ()) if m in mesh.axis_names and m not in taken]
        taken.update(free)
        entries.append(None if not free else free[0] if len(free) == 1 else tuple(free))
    return PartitionSpec(*entries)


def shardings(abstract_tree: Any, axes_by_pattern: Mapping[str, Axes], rules: Rules, mesh: Mesh | AbstractMesh) -> Any:
    """Give every array of a tree its sharding.

    Args:
        abstract_tree: A tree of arrays or `jax.ShapeDtypeStruct`, `nnx` states included.
        axes_by_pattern: Path pattern (see `styrax.core.tree.match`) -> logical axes; the first that fits
            counts. A scalar needs none.
        rules: Logical axis -> mesh axes, such as `DEFAULT_RULES`.
        mesh: Where the arrays go, or its abstract form.

    Returns:
        A tree of `NamedSharding` with the structure of `abstract_tree`.

    Raises:
        UserError: Paths that fit no pattern, that have another number of dimensions than axes, or a dimension
            that its mesh axes do not divide; all are listed.

    Example:
        >>> import jax
        >>> mesh = MeshConfig(axes={"fsdp": 2}).abstract(2)
        >>> like = {"kernel": jax.ShapeDtypeStruct((4, 6), "float32")}
        >>> tuple(shardings(like, {"**/kernel": ("embed", "mlp")}, DEFAULT_RULES, mesh)["kernel"].spec)
        ('fsdp', None)
    """
    from jax.sharding import NamedSharding

    found: dict[str, Any] = {}
    problems = []
    for path, leaf in tree.flatten(abstract_tree).items():
        axes = tree.first_match(axes_by_pattern, path, None if leaf.ndim else ())
        if axes is None:
            problems.append(f"{path}: no pattern gives its axes; shape {tuple(leaf.shape)}")
            continue
        if len(axes) != leaf.ndim:
            problems.append(f"{path}: {len(axes)} axes {axes} for {leaf.ndim} dimensions {tuple(leaf.shape)}")
            continue
        try:
            partition = spec(axes, rules, mesh)
        except UserError as error:
            problems.append(f"{path}: {error}")
            continue
        uneven = _uneven(leaf.shape, axes, partition, mesh)
        problems += [f"{path}: {problem}" for problem in uneven]
        found[path] = NamedSharding(mesh, partition)
    if problems:
        raise UserError("\n  ".join([f"{len(problems)} problem(s) with shardings on {dict(mesh.shape)}:", *problems]))
    return tree.unflatten(abstract_tree, found)


def _uneven(shape: tuple[int, ...], axes: Axes, partition: PartitionSpec, mesh: Mesh | AbstractMesh) -> list[str]:
    problems = []
    for number, (size, axis, entry) in enumerate(zip(shape, axes, partition)):
        if size % (ways := ways_of(entry, mesh)):
            names = (entry,) if isinstance(entry, str) else entry
            problems.append(
                f"dimension {number} ({axis}) is {size}, not divisible by {ways} = "
                + " x ".join(f"{name} {mesh.shape[name]}" for name in names)
            )
    return problems


def _auto(n: int) -> tuple[Any, ...]:
    from jax.sharding import AxisType

    return (AxisType.Auto,) * n
