"""What a manifest says about files: whose they are, and how one differs from it."""

from __future__ import annotations

import tempfile
from collections.abc import Set
from pathlib import Path

from styrax.checkpoint.manifest import FILE, LEAVES, File, Manifest, read_manifest, step_name


def parse(data: bytes, step: int) -> Manifest:
    """Read a manifest from its bytes.

    Raises:
        CheckpointError: As of `read_manifest`.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / step_name(step)
        place.mkdir()
        (place / FILE).write_bytes(data)
        return read_manifest(place)


def difference(expected: File, size: int, text: str) -> str:
    """Say how a file differs, by its size or else by its digest."""
    if size != expected.size:
        return f"{size} bytes, expected {expected.size}"
    return f"digest {text}, expected {expected.digest}"


def needed(name: str, items: Set[str], manifest: Manifest) -> bool:
    """Tell whether restoring some items may read a file.

    Args:
        name: Of the file, as in the manifest.
        items: Their names.
        manifest: Of the checkpoint.
    """
    chosen = [manifest.items[item] for item in items if item in manifest.items]
    if name == LEAVES:
        return any(leaf.where == "packed" for item in chosen for leaf in item.leaves)
    if name.startswith("aux/"):
        return any(item.file == name for item in chosen)
    owner = _owner(name, manifest)
    if owner is not None:
        return owner in items
    return any(leaf.in_orbax for item in chosen for leaf in item.leaves)


def part_of(name: str, manifest: Manifest) -> str:
    """Say which item a file belongs to, as text to append to its name."""
    item = _owner(name, manifest) or next((item for item, value in manifest.items.items() if value.file == name), None)
    if item is not None:
        return f" (item {item})"
    if name == LEAVES:
        return " (small arrays)"
    return " (all arrays in Orbax)" if "/" in name else ""


def _owner(name: str, manifest: Manifest) -> str | None:
    parts = name.split("/")
    if len(parts) < 3 or parts[0] == "aux":
        return None
    # No item's name begins with a dash: it marks those that Orbax would treat in its own way.
    item = parts[1].removeprefix("-")
    return item if item in manifest.items else None
