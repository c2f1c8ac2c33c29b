"""Parameters that are the same in every layer, laid together as if the layers were stacked."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from styrax.optim.specs import ParamSpec


@dataclass(frozen=True)
class Together:
    """Which parameters are laid together; the first of each group stands for all.

    Attributes:
        members: Path of the first -> paths of all, in order.
        specs: Path of the first -> role and axes, with one more axis of copies in front if there are several.
        on_mesh: Whether arrays may be split over devices.
    """

    members: Mapping[str, tuple[str, ...]]
    specs: Mapping[str, ParamSpec]
    on_mesh: bool = False

    def lay(self, arrays: Mapping[str, Any], *, stacked: bool = False) -> dict[str, Any]:
        """Put the arrays of every group into one.

        Args:
            arrays: Path -> array; groups that are missing stay away.
            stacked: Whether they are `[copies, ...]` already, and so one after another.
        """
        groups = {first: [arrays[path] for path in paths if path in arrays] for first, paths in self.members.items()}
        return {first: self._join(group, stacked) for first, group in groups.items() if group}

    def part(self, arrays: Mapping[str, Any], *, stacked: bool = False) -> dict[str, Any]:
        """Undo `lay`."""
        found = {}
        for first, x in arrays.items():
            paths = self.members[first]
            if len(paths) == 1:
                found[first] = x
            elif self.on_mesh and not stacked:
                found.update({path: jax.lax.index_in_dim(x, i, keepdims=False) for i, path in enumerate(paths)})
            else:
                x = x if stacked else x.reshape(-1, *x.shape[2:])
                size = x.shape[0] // len(paths)
                parts = {path: jax.lax.slice_in_dim(x, i * size, (i + 1) * size) for i, path in enumerate(paths)}
                found.update(parts)
        return found

    def _join(self, group: list[Any], stacked: bool) -> Any:
        if len(group) == 1:
            return group[0]
        if stacked:
            return jnp.concatenate(group)
        if self.on_mesh:
            return jnp.stack(group)
        # The same in one operation for each array and not two; but no axis that is split may be appended to.
        return jnp.concatenate(group).reshape(len(group), *group[0].shape)


def together(
    specs: Mapping[str, ParamSpec], paths: Collection[str], key: Callable[[str], Any], *, on_mesh: bool = False
) -> Together:
    """Find the parameters that are the same in every layer: their paths differ in numbers only.

    One program for all of them is about as long as if layers were stacked. Others of equal shape are not laid
    together, for a mesh may split them in another way.

    Args:
        specs: Path -> role and axes.
        paths: Those to look at.
        key: Path -> what else must be equal.
        on_mesh: Whether arrays may be split over devices.

    Example:
        >>> spec = ParamSpec("matrix", "io")
        >>> found = together({"0/w": spec, "1/w": spec}, ["0/w", "1/w"], lambda path: None)
        >>> found.members, found.specs["0/w"].axes
        ({'0/w': ('0/w', '1/w')}, 'sio')
    """
    groups: dict[Any, list[str]] = {}
    for path in paths:
        groups.setdefault((re.sub(r"\d+", "#", path), specs[path], key(path)), []).append(path)
    members = {group[0]: tuple(group) for group in groups.values()}
    laid = {
        first: specs[first] if len(group) == 1 else replace(specs[first], axes=f"s{specs[first].axes}")
        for first, group in members.items()
    }
    return Together(members, laid, on_mesh)
