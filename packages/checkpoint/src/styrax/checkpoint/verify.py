"""Whether the files of a checkpoint are still what was written. Needs neither jax nor Orbax."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from styrax.checkpoint.commit import checksum
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import ARRAYS, LEAVES, Manifest, leaf_name, read_manifest

Stamp = tuple[int, int, int]


def verify(
    checkpoint: str | Path,
    *,
    mode: Literal["size", "checksum"] = "checksum",
    items: Iterable[str] | None = None,
    trusted: dict[Path, Stamp] | None = None,
) -> list[str]:
    """Compare the files of one checkpoint with its manifest.

    Args:
        checkpoint: The folder of the step.
        mode: Compare sizes, or also read everything and compare checksums.
        items: Only the files that these need; all by default.
        trusted: Files whose checksum was right, with their size, time and inode then; they are not read again
            while those are the same. New ones are added.

    Returns:
        One text for each damaged file, with its name and the leaf or item it belongs to; empty if all is well.
    """
    checkpoint = Path(checkpoint)
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    names = None if items is None else set(items)
    problems = []
    for name, file in manifest.files.items():
        if names is not None and not _needs(name, names, manifest):
            continue
        path = checkpoint / name
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            if stat.st_size != file.size:
                problem = f"{stat.st_size} bytes, expected {file.size}"
            elif mode == "size" or (trusted or {}).get(path) == stamp:
                continue
            elif (found := checksum(path)) != file:
                problem = f"checksum {found.crc32:08x}, expected {file.crc32:08x}"
            else:
                if trusted is not None:
                    trusted[path] = stamp
                continue
        except FileNotFoundError:
            problem = "missing"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        problems.append(f"{name}: {problem}{_part(path, name, manifest)}")
    return problems


def _needs(file: str, items: set[str], manifest: Manifest) -> bool:
    """Tell whether restoring these items reads this file."""
    if file.startswith(f"{ARRAYS}/"):
        owner = _owner(file, manifest)
        in_orbax = any(
            leaf.where == "orbax" for item in items if item in manifest.items for leaf in manifest.items[item].leaves
        )
        return owner in items if owner else in_orbax
    if file == LEAVES:
        return False  # each leaf has its own checksum, taken when it is read
    return any(manifest.items[item].file == file for item in items if item in manifest.items)


def _owner(file: str, manifest: Manifest) -> str | None:
    folder = file.split("/")[1]
    return next((name for name in manifest.items if folder in (name, f"-{name}")), None)


def _part(path: Path, name: str, manifest: Manifest) -> str:
    """Say which item, and if it can be known which leaves, a damaged file belongs to."""
    if name == LEAVES:
        bad = _bad_leaves(path, manifest)
        return f" (leaf {', '.join(bad)})" if bad else " (padding between leaves)"
    if name.startswith(f"{ARRAYS}/"):
        owner = _owner(name, manifest)
        if owner is None:
            return " (all arrays in Orbax)"
        leaves = [leaf.path for leaf in manifest.items[owner].leaves if leaf.where == "orbax"]
        one = f"leaf {leaf_name(owner, leaves[0])}" if len(leaves) == 1 else f"item {owner}, {len(leaves)} arrays"
        return f" ({one})"
    return next((f" (item {item})" for item, value in manifest.items.items() if value.file == name), "")


def _bad_leaves(path: Path, manifest: Manifest) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    return [
        leaf_name(name, leaf.path)
        for name, item in manifest.items.items()
        for leaf in item.leaves
        if leaf.where == "packed"
        and leaf.offset is not None
        and leaf.nbytes
        and zlib.crc32(data[leaf.offset : leaf.offset + leaf.nbytes]) != leaf.crc32
    ]
