"""Whether the files of a checkpoint are still what was written. Needs neither jax nor Orbax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from styrax.checkpoint import digest, storage
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import ARRAYS, COMPRESSED, LEAVES, File, Manifest, leaf_name, read_manifest
from styrax.checkpoint.naming import orbax_name

Stamp = tuple[int, int, int]


def verify(
    checkpoint: str | Path,
    *,
    mode: Literal["size", "checksum"] = "checksum",
    items: Iterable[str] | None = None,
    trusted: dict[Path, Stamp] | None = None,
    part: tuple[int, int] = (0, 1),
    blame: bool = True,
    progress: Callable[[str, int], None] | None = None,
    documents: bool = False,
    manifest: Manifest | None = None,
) -> list[str]:
    """Compare the files of one checkpoint with its manifest.

    Args:
        checkpoint: The folder of the step.
        mode: Compare sizes, or also read everything and compare digests.
        items: Only the files that these need; all by default.
        trusted: Files whose digest was right, with their size, time and inode then; they are not read again
            while those are the same. New ones are added.
        part: Number and count of those who share the files among them; each compares some.
        blame: Read the arrays of a damaged file one by one, to name those that are damaged (this imports jax).
        documents: Compare the digests of what is not in Orbax, even by `mode="size"`.
        manifest: That of the checkpoint, if it was just read.
        progress: Called with the name and bytes of each file when it is done.

    Returns:
        One text for each damaged file, with its name and the leaf or item it belongs to; empty if all is well.
    """
    checkpoint = Path(checkpoint)
    try:
        manifest = manifest or read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    names = None if items is None else set(items)
    files = [name for name in manifest.files if names is None or _needs(name, names, manifest)]
    damaged: dict[str, str] = {}
    for name in files[part[0] :: part[1]]:
        how = "checksum" if documents and not _in_orbax(name) else mode
        problem = _problem(checkpoint / name, manifest.files[name], how, trusted)
        if problem is not None:
            damaged[name] = problem
        if progress is not None:
            progress(name, manifest.files[name].size)
    cache: dict[tuple[str, str], list[str]] = {}
    problems = []
    for name, problem in damaged.items():
        owner = _owner(name, manifest) if _in_orbax(name) else None
        problems.append(f"{name}: {problem}{_part(checkpoint, name, manifest, owner, cache if blame else None)}")
    return problems


def _problem(path: Path, file: File, mode: str, trusted: dict[Path, Stamp] | None) -> str | None:
    try:
        stat = path.stat()
        stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if stat.st_size != file.size:
            return f"{stat.st_size} bytes, expected {file.size}"
        if mode == "size" or (trusted or {}).get(path) == stamp:
            return None
        _, found = storage.measure(path)
        if found != file.digest:
            return f"digest {found[:12]}, expected {file.digest[:12]}"
        if trusted is not None:
            trusted[path] = stamp
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _in_orbax(file: str) -> bool:
    return file.startswith((f"{ARRAYS}/", f"{COMPRESSED}/"))


def _needs(file: str, items: set[str], manifest: Manifest) -> bool:
    """Tell whether restoring these items reads this file."""
    if _in_orbax(file):
        owner = _owner(file, manifest)
        folder = file.split("/")[0]
        used = any(
            leaf.where == folder for name in items & manifest.items.keys() for leaf in manifest.items[name].leaves
        )
        return owner in items if owner else used
    if file == LEAVES:
        return False  # each leaf has its own digest, taken when it is read
    return any(manifest.items[item].file == file for item in items if item in manifest.items)


def _owner(file: str, manifest: Manifest) -> str | None:
    folder = file.split("/")[1]
    return next((name for name in manifest.items if folder in (name, f"-{name}")), None)


def _part(
    checkpoint: Path, name: str, manifest: Manifest, owner: str | None, blamed: dict[tuple[str, str], list[str]] | None
) -> str:
    """Say which item, and if it can be known which leaves, a damaged file belongs to."""
    if name == LEAVES:
        bad = _bad_leaves(checkpoint / name, manifest)
        return f" (leaf {', '.join(bad)})" if bad else " (padding between leaves)"
    if not _in_orbax(name):
        return next((f" (item {item})" for item, value in manifest.items.items() if value.file == name), "")
    if owner is None:
        return " (all arrays in Orbax)"
    folder, _, below, *_ = [*name.split("/"), ""]
    leaves = [leaf for leaf in manifest.items[owner].leaves if leaf.where == folder]
    one = next((leaf for leaf in leaves if len(leaves) == 1 or orbax_name(leaf.path) == below), None)
    if one is not None:  # the others are in other files, see `styrax.checkpoint.raw`
        return f" (leaf {leaf_name(owner, one.path)})"
    if blamed is None:
        return f" (item {owner}, {len(leaves)} arrays)"
    if (owner, folder) not in blamed:
        blamed[owner, folder] = bad_arrays(checkpoint, manifest, owner, folder)
    bad = blamed[owner, folder]
    if not bad:
        return f" (item {owner}, none of its {len(leaves)} arrays is changed)"
    return f" (item {owner}, all {len(bad)} arrays)" if len(bad) == len(leaves) else f" (leaf {', '.join(bad)})"


def bad_arrays(checkpoint: Path, manifest: Manifest, item: str, folder: str | None = None) -> list[str]:
    """Read every array of an item that Orbax holds, and name those that are not what was saved.

    Args:
        checkpoint: The folder of the step.
        manifest: Its manifest.
        item: The item.
        folder: Only those in this Orbax checkpoint.
    """
    from styrax.checkpoint.formats.own import stored
    from styrax.checkpoint.restore import right

    bad = []
    leaves = [leaf for leaf in manifest.items[item].leaves if leaf.in_orbax and folder in (None, leaf.where)]
    for path, array in stored(checkpoint, item, leaves, one_by_one=True).items():
        leaf = next(leaf for leaf in leaves if leaf.path == path)
        try:
            fits = right(leaf, array.load())
        except CheckpointError:
            fits = False
        if not fits:
            bad.append(leaf_name(item, path))
    return bad


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
        and digest.of(data[leaf.offset : leaf.offset + leaf.nbytes]) != leaf.digest
    ]
