"""The record that makes a folder a checkpoint: what is in it, and the digest of every leaf, shard and file.

A checkpoint is `root/<step, 8 digits>/`:

    MANIFEST.json     this record, written last, with a checksum of itself
    orbax/            large arrays, an Orbax checkpoint that `orbax.checkpoint` reads by itself
    orbax-zstd/       another one, with those of the items that are to be compressed
    aux/leaves.bin    small arrays, one after another
    aux/NAME.json     an item that is plain JSON

Nothing here needs jax or Orbax, so that folders can be listed, described and verified anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from styrax.checkpoint import digest
from styrax.checkpoint.errors import CheckpointError

FILE = "MANIFEST.json"
LEAVES = "aux/leaves.bin"
ARRAYS = "orbax"
COMPRESSED = "orbax-zstd"
VERSION = 2

_STEP = re.compile(r"\d{8,}")
_DOCUMENT = re.compile(rb'\{"digest":"([0-9a-f]{32})","body":(.*)\}\n', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of an array that one device held when it was saved.

    Attributes:
        start: Its first index on each axis.
        stop: The index behind its last one on each axis.
        digest: Of its bytes in C order.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One leaf of an item.

    Attributes:
        path: As `styrax.core.tree.flatten` writes it.
        kind: `array`; `scalar` (of numpy); `key` (typed random key, stored as its data); `python` (a number,
            truth value, text or bytes).
        shape: Of the array, of the stored data for a key.
        dtype: Its name, that of the stored data for a key, the type's name for `python`.
        where: `orbax` or `orbax-zstd`, `packed` (in `aux/leaves.bin`) or `inline` (`value`, in the manifest).
        impl: Of a key.
        offset: Of a packed leaf, in bytes.
        digest: Of its bytes in C order; `None` if inline, or if no process held the whole of it.
        shards: Of an array that was laid out over several devices: the parts, without copies.
        value: Of an inline leaf; a complex number as two, a float that JSON lacks and bytes as text.
    """

    path: str
    kind: Literal["array", "scalar", "key", "python"]
    shape: tuple[int, ...] = ()
    dtype: str
    where: Literal["orbax", "orbax-zstd", "packed", "inline"]
    nbytes: int = 0
    impl: str | None = None
    offset: int | None = None
    digest: str | None = None
    shards: tuple[Shard, ...] = ()
    value: Any = None

    @property
    def in_orbax(self) -> bool:
        """Whether Orbax holds it."""
        return self.where in (ARRAYS, COMPRESSED)


_DEFAULTS = [(each.name, each.default) for each in dataclasses.fields(Leaf)]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A named part of a checkpoint.

    Attributes:
        kind: `tree` (of arrays), `json`, or `iterator` (its state, as JSON).
        leaves: Of a tree, in jax's order.
        structure: Of a tree: how its containers nest, see `styrax.checkpoint.structure`.
        file: Of JSON, relative to the checkpoint.
    """

    kind: Literal["tree", "json", "iterator"]
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
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The step that it was saved for.
        created: UTC, ISO 8601.
        items: By name.
        files: By path relative to the checkpoint, the manifest itself excepted.
        writer: Versions, host and process that wrote it.
        metrics: What was measured at that step, for `keep_best` and for people.
        temporary: It goes when the next one is saved.
    """

    step: int
    created: str
    items: Mapping[str, Item]
    files: Mapping[str, File]
    writer: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    temporary: bool = False

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
    return [step for step in steps if _holds_something(Path(directory) / step_name(step))]


def _holds_something(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:  # its writer deletes it just now
        return False


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
        "files": {name: [file.size, file.digest] for name, file in manifest.files.items()},
        "metrics": {name: repr(value) for name, value in manifest.metrics.items()},  # JSON has no infinity
        "temporary": manifest.temporary,
    }
    body = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    return b'{"digest":"%b","body":%b}\n' % (digest.of(body).encode(), body)


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
    if found is None and data.startswith(b'{"crc32":'):
        raise CheckpointError(f"{FILE}: of a styrax-checkpoint that was never released, it cannot be read any more")
    if found is None or digest.of(found[2]) != found[1].decode():
        raise CheckpointError(f"{FILE}: damaged, its digest does not fit")
    record = json.loads(found[2])
    if record.get("format") != "styrax.checkpoint" or record["version"] != VERSION:
        raise CheckpointError(
            f"{FILE}: format {record.get('format')!r} version {record.get('version')!r}, expected "
            f"'styrax.checkpoint' version {VERSION}; a newer styrax-checkpoint may read it"
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
        files={name: File(size=size, digest=text) for name, (size, text) in record["files"].items()},
        metrics={name: float(text) for name, text in record["metrics"].items()},
        temporary=record["temporary"],
    )


def _plain(item: Item) -> dict[str, Any]:
    if item.kind != "tree":
        return {"kind": item.kind, "file": item.file}
    return {"kind": "tree", "structure": item.structure, "leaves": [_leaf_record(leaf) for leaf in item.leaves]}


def _leaf_record(leaf: Leaf) -> dict[str, Any]:
    record = {name: value for name, default in _DEFAULTS if (value := getattr(leaf, name)) != default}
    if leaf.shards:
        record["shards"] = [[shard.start, shard.stop, shard.digest] for shard in leaf.shards]
    return record


def _item(record: dict[str, Any]) -> Item:
    records = record.get("leaves", ())
    if any("shards" in leaf for leaf in records):
        leaves = tuple(map(_leaf, records))
    else:  # thousands, perhaps: made in C
        leaves = msgspec.convert(records, tuple[Leaf, ...])
    return Item(kind=record["kind"], leaves=leaves, structure=record.get("structure"), file=record.get("file"))


def _leaf(record: dict[str, Any]) -> Leaf:
    record["shape"] = tuple(record.get("shape", ()))
    if "shards" in record:
        record["shards"] = tuple(
            Shard(start=tuple(start), stop=tuple(stop), digest=text) for start, stop, text in record["shards"]
        )
    return Leaf(**record)
