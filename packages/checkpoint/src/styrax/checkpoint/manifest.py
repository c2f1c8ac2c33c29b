"""The record that makes a folder a checkpoint: what is in it, and the size and checksum of every file.

A checkpoint is `root/<step, 8 digits>/`:

    MANIFEST.json     this record, written last, with a checksum of itself
    orbax/            large arrays, an Orbax checkpoint that `orbax.checkpoint` reads by itself
    aux/leaves.bin    small arrays, one after another
    aux/NAME.json     an item that is plain JSON

Nothing here needs jax or Orbax, so that folders can be listed, described and verified anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from styrax.checkpoint.errors import CheckpointError

FILE = "MANIFEST.json"
LEAVES = "aux/leaves.bin"
ARRAYS = "orbax"
VERSION = 1

_STEP = re.compile(r"\d{8,}")
_DOCUMENT = re.compile(rb'\{"crc32":"([0-9a-f]{8})","body":(.*)\}\n', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf of an item.

    Attributes:
        path: As `styrax.core.tree.flatten` writes it.
        kind: `array`; `scalar` (of numpy); `key` (typed random key, stored as its data); `python` (a number,
            truth value or text).
        shape: Of the array, of the stored data for a key.
        dtype: Its name, that of the stored data for a key, the type's name for `python`.
        where: `orbax`, `packed` (in `aux/leaves.bin`) or `inline` (`value`, in the manifest).
        impl: Of a key.
        offset: Of a packed leaf, in bytes.
        crc32: Of a packed leaf's bytes.
        value: Of an inline leaf; a complex number as two, a float that JSON lacks as text.
    """

    path: str
    kind: Literal["array", "scalar", "key", "python"]
    shape: tuple[int, ...] = ()
    dtype: str
    where: Literal["orbax", "packed", "inline"]
    nbytes: int = 0
    impl: str | None = None
    offset: int | None = None
    crc32: int | None = None
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Item:
    """A named part of a checkpoint.

    Attributes:
        kind: `tree` (of arrays) or `json`.
        leaves: Of a tree, in jax's order.
        structure: Of a tree: how its containers nest, see `styrax.checkpoint.structure`.
        file: Of JSON, relative to the checkpoint.
    """

    kind: Literal["tree", "json"]
    leaves: tuple[Leaf, ...] = ()
    structure: Any = None
    file: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a checkpoint, as it was written."""

    size: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The step that it was saved for.
        created: UTC, ISO 8601.
        items: By name.
        files: By path relative to the checkpoint, the manifest itself excepted.
        writer: Versions, host and process that wrote it.
    """

    step: int
    created: str
    items: Mapping[str, Item]
    files: Mapping[str, File]
    writer: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def step_name(step: int) -> str:
    """Give the name of a step's folder.

    Example:
        >>> step_name(1200)
        '00001200'
    """
    return f"{step:08d}"


def leaf_name(item: str, path: str) -> str:
    """Name a leaf for people.

    Example:
        >>> leaf_name("params", "layers/0"), leaf_name("rng", "")
        ('params/layers/0', 'rng')
    """
    return f"{item}/{path}" if path else item


def list_steps(directory: str | Path) -> list[int]:
    """List the steps with a complete checkpoint in a folder, in order; what has no manifest is not one."""
    return [step for step, complete in _folders(directory).items() if complete]


def list_incomplete(directory: str | Path) -> list[int]:
    """List the steps of which a folder is there and not empty, but without a manifest, in order.

    No save leaves one, not even one that was killed: something else deleted or copied a part.
    """
    steps = [step for step, complete in _folders(directory).items() if not complete]
    return [step for step in steps if any((Path(directory) / step_name(step)).iterdir())]


def _folders(directory: str | Path) -> dict[int, bool]:
    """Steps that have a folder, in order, and whether it has a manifest."""
    try:
        names = [entry.name for entry in Path(directory).iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return {}
    steps = sorted(int(name) for name in names if _STEP.fullmatch(name) and step_name(int(name)) == name)
    return {step: (Path(directory) / step_name(step) / FILE).is_file() for step in steps}


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON with its own checksum in front."""
    record = {
        "format": "styrax.checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "created": manifest.created,
        "writer": dict(manifest.writer),
        "items": {name: _plain(item) for name, item in manifest.items.items()},
        "files": {name: [file.size, f"{file.crc32:08x}"] for name, file in manifest.files.items()},
    }
    body = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    return b'{"crc32":"%08x","body":%b}\n' % (zlib.crc32(body), body)


def read_manifest(checkpoint: str | Path) -> Manifest:
    """Read the manifest of one checkpoint.

    Args:
        checkpoint: The folder of the step.

    Raises:
        CheckpointError: It is missing, damaged, of a newer version, or of another step than the folder says.
    """
    checkpoint = Path(checkpoint)
    try:
        data = (checkpoint / FILE).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{FILE}: missing, so this is no complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{FILE}: cannot be read ({error.strerror})") from error
    found = _DOCUMENT.fullmatch(data)
    if found is None or zlib.crc32(found[2]) != int(found[1], 16):
        raise CheckpointError(f"{FILE}: damaged, its checksum does not fit")
    record = json.loads(found[2])
    if record.get("format") != "styrax.checkpoint" or not 1 <= record["version"] <= VERSION:
        raise CheckpointError(
            f"{FILE}: format {record.get('format')!r} version {record.get('version')!r}, expected "
            f"'styrax.checkpoint' up to {VERSION}; a newer styrax-checkpoint may read it"
        )
    if checkpoint.name.isdigit() and int(checkpoint.name) != record["step"]:
        raise CheckpointError(f"{FILE}: says step {record['step']}, the folder {checkpoint.name}")
    outside = [name for name in record["files"] if PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    if outside:
        raise CheckpointError(f"{FILE}: names files outside of the checkpoint: {', '.join(outside)}")
    return Manifest(
        step=record["step"],
        created=record["created"],
        writer=record["writer"],
        items={name: _item(item) for name, item in record["items"].items()},
        files={name: File(size=size, crc32=int(crc, 16)) for name, (size, crc) in record["files"].items()},
    )


def _plain(item: Item) -> dict[str, Any]:
    if item.kind == "json":
        return {"kind": "json", "file": item.file}
    leaves = [
        {f.name: value for f in dataclasses.fields(leaf) if (value := getattr(leaf, f.name)) != f.default}
        for leaf in item.leaves
    ]
    return {"kind": "tree", "structure": item.structure, "leaves": leaves}


def _item(record: dict[str, Any]) -> Item:
    leaves = [Leaf(**{**leaf, "shape": tuple(leaf.get("shape", ()))}) for leaf in record.get("leaves", ())]
    return Item(kind=record["kind"], leaves=tuple(leaves), structure=record.get("structure"), file=record.get("file"))
