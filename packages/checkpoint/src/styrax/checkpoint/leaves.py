"""The leaves of a checkpoint one at a time, each compared with its digest; nothing else of it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.checkpoint import digest
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import Leaf, Manifest, leaf_name

if TYPE_CHECKING:
    import numpy as np

    from styrax.checkpoint.formats.base import Array


def arrays(checkpoint: Path, item: str, wanted: Iterable[Leaf]) -> dict[str, Array]:
    """Describe leaves of an item that are read when their `load` is called.

    Args:
        checkpoint: The folder of the step.
        item: Its name.
        wanted: Leaves in the order in which they will be read.

    Returns:
        Path -> array; a random key is its data, a number an array without dimensions, and what numpy has no number
        for is left out. `load` raises `CheckpointError` if the leaf is not what was saved.
    """
    wanted = list(wanted)
    if not wanted:
        return {}
    from styrax.checkpoint.formats.own import described, stored

    large = stored(checkpoint, item, [leaf for leaf in wanted if leaf.in_orbax])
    found = {}
    for leaf in wanted:
        array = large.get(leaf.path)
        array = _checked(checkpoint, item, leaf, array) if array else described(checkpoint, item, leaf)
        if array is not None:
            found[leaf.path] = array
    return found


def document(checkpoint: Path, manifest: Manifest, item: str) -> Any:
    """Read an item that is JSON, or the state of an iterator.

    Raises:
        CheckpointError: It is not what was saved.
    """
    return json.loads(raw_document(checkpoint, manifest, item))


def raw_document(checkpoint: Path, manifest: Manifest, item: str) -> bytes:
    """Read the bytes of such an item."""
    file = str(manifest.items[item].file)
    try:
        data = (checkpoint / file).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{checkpoint / file} cannot be read ({error.strerror})") from error
    if digest.of(data) != manifest.files[file].digest:
        raise CheckpointError(f"{checkpoint / file} is damaged: item {item} is not what was saved")
    return data


def _checked(checkpoint: Path, item: str, leaf: Leaf, array: Array) -> Array:
    import dataclasses

    from styrax.checkpoint.restore import right

    def load() -> np.ndarray:
        name = leaf_name(item, leaf.path)
        try:
            data = array.load()
        except CheckpointError as error:
            raise CheckpointError(
                f"{checkpoint}: {name} cannot be read; `styrax checkpoint verify` says more"
            ) from error
        if not right(leaf, data):
            raise CheckpointError(f"{checkpoint} is damaged: {name} is not what was saved")
        return data

    return dataclasses.replace(array, load=load, mapped=None)
