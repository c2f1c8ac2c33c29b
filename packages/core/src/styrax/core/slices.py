"""Devices of several slices, which a slower network joins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from styrax.core.errors import UserError


def slices_of(devices: Iterable[Any]) -> list[int]:
    """List the slices that devices say they are in; empty where they do not know, as on a CPU.

    >>> import jax
    >>> slices_of(jax.devices("cpu"))
    []
    """
    found = {getattr(device, "slice_index", None) for device in devices if device.platform != "cpu"}
    return sorted(index for index in found if index is not None)


def arranged(devices: Sequence[Any], sizes: Mapping[str, int], dcn: Mapping[str, int]) -> Any:
    """Arrange devices in a grid, the ways across slices of each axis before those within.

    Args:
        devices: They count as slices in equal runs where they do not know theirs.
        sizes: Mesh axis -> devices along it.
        dcn: Mesh axis -> how many ways of it lie across slices.

    Returns:
        An array of devices with the shape of `sizes`.

    Raises:
        UserError: The ways do not multiply to the number of slices.
    """
    import numpy as np

    found, slices = slices_of(devices), math.prod(dcn.values())
    if found and len(found) != slices:
        said = ", ".join(f"{name}={ways}" for name, ways in dcn.items()) or "nothing"
        raise UserError(
            f"mesh.dcn says {said} across slices, which is {slices} slice(s), and the devices are in "
            f"{len(found)}; set it, such as dcn = {{ data = {len(found)} }}, so that the ways multiply to that"
        )
    outer = tuple(dcn.get(name, 1) for name in sizes)
    inner = tuple(size // ways for size, ways in zip(sizes.values(), outer))
    if found:
        from jax.experimental.mesh_utils import create_hybrid_device_mesh

        return create_hybrid_device_mesh(inner, outer, devices)
    order = [axis + half * len(sizes) for axis in range(len(sizes)) for half in (0, 1)]
    grid = np.array(devices, dtype=object).reshape(*outer, *inner)
    return grid.transpose(order).reshape(tuple(sizes.values()))
