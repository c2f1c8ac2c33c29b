"""Which format a path has, and reading and writing any of them by tree path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.formats.base import Array, Source, reading
from styrax.checkpoint.formats.names import flat_name, renamed, tree_path
from styrax.checkpoint.manifest import FILE, list_steps
from styrax.core import nearest

Format = Literal["styrax", "orbax", "safetensors", "npz", "torch"]
FORMATS: tuple[str, ...] = get_args(Format)
WRITABLE = ("safetensors", "npz")
#: What stands between keys in the names of each format, if nothing else is said.
SEPARATORS = {"safetensors": ".", "npz": "/", "torch": "."}
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint", "checkpoint", "manifest.ocdbt")


def detect(path: str | Path) -> str:
    """Tell which format a file or folder has, by what is in it.

    Args:
        path: The file or folder.

    Returns:
        `styrax` (one step's folder), `orbax`, `safetensors`, `npz` or `torch`.

    Raises:
        CheckpointError: There is nothing, or it is none of these; the text says what was looked for.
    """
    path = Path(path)
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if FILE in names:
            return "styrax"
        if ".metadata" in names:
            return "torch"
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return "safetensors"
        if names & set(_ORBAX):
            return "orbax"
        raise CheckpointError(_nothing(path, names))
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder; check the path")
    with reading(path, "the file"), path.open("rb") as handle:
        head = handle.read(9)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "npz"
    if path.name.endswith((".safetensors", ".safetensors.index.json")) or head[8:] == b"{":
        return "safetensors"
    if path.suffix == ".npz":
        return "npz"
    if path.name == ".metadata":
        raise CheckpointError(f"{path} is part of a torch checkpoint; give its folder, {path.parent}")
    raise CheckpointError(f"{path} is no checkpoint: neither safetensors nor a .npz archive, nor the folder of one")


def read(
    path: str | Path,
    *,
    format: str | None = None,
    separator: str | None = None,
    items: Iterable[str] | None = None,
) -> Source:
    """Describe the arrays of a file or folder; each is read when its `load` is called.

    Args:
        path: A safetensors file, index or folder, a `.npz` file, or the folder of an Orbax, torch Distributed
            Checkpoint or styrax checkpoint.
        format: Its format; found out by default.
        separator: What joins the keys in the names of a safetensors, `.npz` or torch file: one character, or
            empty if names are not to be taken apart. By default `/` for `.npz` and `.` for the others.
        items: Of a styrax or Orbax checkpoint: only these. If there is one, its name is left out of the paths.

    Returns:
        Tree path -> array.

    Raises:
        CheckpointError: It is damaged, or is not what its format says; what was wrong is said by name.

    Example:
        >>> import tempfile, numpy as np
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write(path, {"layers/0/kernel": np.ones((2, 3), np.float32)})
        >>> source = read(path)
        >>> source["layers/0/kernel"].shape, source["layers/0/kernel"].load().sum().item()
        ((2, 3), 6.0)
    """
    path = Path(path).expanduser()
    format = format or detect(path)
    if format not in FORMATS:
        raise CheckpointError(f"no format {format!r}{nearest(format, FORMATS)}; there are {', '.join(FORMATS)}")
    if format not in SEPARATORS and separator is not None:
        raise CheckpointError(f"{path} is of format {format}, whose paths need no separator; leave it out")
    wanted = None if items is None else list(items)
    if format == "styrax":
        from styrax.checkpoint.formats import own

        arrays, skipped = own.read(path, wanted)
        names = () if wanted is not None and len(wanted) == 1 else tuple(wanted or _first(arrays, skipped))
        return Source(format, path, arrays, skipped=skipped, items=names)
    if format == "orbax":
        return _orbax(path, wanted)
    if wanted is not None:
        raise CheckpointError(f"{path} is of format {format}, which has no items; leave them out")
    separator = SEPARATORS[format] if separator is None else separator
    skipped: dict[str, str] = {}
    if format == "safetensors":
        from styrax.checkpoint.formats import safetensors

        things = [(name, tree_path(name, separator), array) for name, array in safetensors.read(path).items()]
    elif format == "npz":
        from styrax.checkpoint.formats import npz

        arrays, left = npz.read(path)
        things = [(name, tree_path(name, separator), array) for name, array in arrays.items()]
        skipped = {tree_path(name, separator): why for name, why in left.items()}
    else:
        from styrax.checkpoint.formats import torch_dcp

        keyed, omitted = torch_dcp.read(path)
        things = [(str(keys), _keys(keys, separator), array) for keys, array in keyed.items()]
        skipped = {_keys(keys, separator): why for keys, why in omitted.items()}
    return Source(format, path, renamed(things, path), skipped=skipped)


def write(
    path: str | Path,
    items: Mapping[str, Any],
    *,
    format: str | None = None,
    separator: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write arrays, one in memory at a time; the file or folder appears whole or not at all.

    Args:
        path: What to make: a file `.safetensors` or `.npz`, or a folder of safetensors.
        items: Tree path -> `Array`, or an array of numpy or jax.
        format: `safetensors` or `npz`; by default what the path ends in, safetensors for a folder.
        separator: What joins the keys in the names, see `read`.
        metadata: Texts for the header of safetensors.
        max_shard: Bytes from which a folder of safetensors has several files.
        overwrite: Replace what is there.
        progress: Called with the name and bytes of each array when it is written.

    Raises:
        CheckpointError: Something is there already, an array or name has no place in the format (all such are
            listed), or it cannot be written. Nothing is left then.
    """
    path = Path(path).expanduser()
    format = format or ("npz" if path.suffix == ".npz" else "safetensors")
    if format not in WRITABLE:
        raise CheckpointError(f"cannot write {format!r}{nearest(format, WRITABLE)}; expected {' or '.join(WRITABLE)}")
    separator = SEPARATORS[format] if separator is None else separator
    arrays = {name: Array.of(value) for name, value in items.items()}
    named = renamed(((name, flat_name(name, separator), array) for name, array in arrays.items()), path)
    if format == "npz":
        from styrax.checkpoint.formats import npz

        npz.write(path, named, overwrite=overwrite, progress=progress)
        return
    from styrax.checkpoint.formats import safetensors

    safetensors.write(path, named, metadata=metadata, max_shard=max_shard, overwrite=overwrite, progress=progress)


def _orbax(path: Path, wanted: list[str] | None) -> Source:
    from styrax.checkpoint.formats import orbax

    arrays, skipped, items = orbax.read(path)
    if wanted is not None:
        lacking = [name for name in wanted if name not in items]
        if lacking:
            has = f"it has {', '.join(items)}" if items else "it is one tree, without items"
            raise CheckpointError(f"{path} has no item {', '.join(map(repr, lacking))}; {has}")
        arrays = {key: array for key, array in arrays.items() if key[0] in wanted}
        skipped = {key: why for key, why in skipped.items() if key[0] in wanted}
        items = tuple(wanted)
    alone = len(items) < 2
    return Source(
        "orbax",
        path,
        {_join(key, alone): array for key, array in arrays.items()},
        skipped={_join(key, alone): why for key, why in skipped.items()},
        items=() if alone else items,
    )


def _join(key: tuple[str, str], alone: bool) -> str:
    item, path = key
    if alone:
        return path
    item = tree_path(item, "")
    return f"{item}/{path}" if path else item


def _keys(keys: tuple[str, ...] | str, separator: str) -> str:
    # torch's own path ends in module names such as `layers.0.weight`, which are paths too. It knows no escapes.
    name = keys if isinstance(keys, str) else (separator or ".").join(keys)
    return tree_path(name.replace("%", "%25") if separator else name, separator)


def _first(*found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(path.partition("/")[0] for paths in found for path in paths))


def _nothing(path: Path, names: set[str]) -> str:
    steps = list_steps(path) or sorted(int(name) for name in names if name.isdigit())
    inside = f"; it holds steps {', '.join(map(str, steps[:5]))}: give the folder of one" if steps else ""
    return (
        f"{path} is no checkpoint{inside}. Looked for {FILE} (styrax), .metadata (torch), *.safetensors, "
        f"{' or '.join(_ORBAX[:2])} (Orbax)"
    )
