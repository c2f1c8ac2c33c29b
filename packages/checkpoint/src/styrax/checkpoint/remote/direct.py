"""Arrays read from a bucket without a download: each host reads the parts that it needs, and nothing unverified.

Orbax 0.12.8 opens no path of the kind `s3://`, but what it writes are arrays of TensorStore, which can. What is
compared with a digest is each part as it was saved: one device's share, or the whole array. So a host reads every
part that its own share touches, and no other; where the layout is that of the save, it reads just its share.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from styrax.checkpoint import digest, structure
from styrax.checkpoint.errors import CheckpointError, Damaged
from styrax.checkpoint.manifest import LEAVES, Leaf, Manifest, leaf_name, step_name
from styrax.checkpoint.naming import item_name, orbax_name
from styrax.checkpoint.remote.objects import Objects
from styrax.checkpoint.remote.threads import ordered
from styrax.checkpoint.restore import default_sharding
from styrax.core import nearest, tree

Box = tuple[tuple[int, int], ...]


def restore(objects: Objects, manifest: Manifest, item: str, like: Any = None) -> Any:
    """Restore one item of arrays; see `Bucket.read_arrays`."""
    found = manifest.items.get(item)
    where = f"step {manifest.step} in {objects.url}"
    if found is None or found.kind != "tree":
        has = ", ".join(repr(name) for name, each in manifest.items.items() if each.kind == "tree") or "none"
        near = nearest(item, manifest.items)
        raise CheckpointError(f"item {item!r} is no tree of arrays in {where}{near}; of those it has {has}")
    saved = {leaf.path: leaf for leaf in found.leaves}
    asked = dict.fromkeys(saved) if like is None else tree.flatten(like)
    problems = [f"{leaf_name(item, path)}: in the checkpoint, not asked for" for path in saved if path not in asked]
    for path, leaf in asked.items():
        problems += [f"{leaf_name(item, path)}: {text}" for text in _differences(path, leaf, saved)]
    if problems:
        raise CheckpointError("\n  ".join([f"{where} is not what was asked for:", *problems]))
    wanted = {path: (saved[path], None if leaf is None else _sharding(leaf)) for path, leaf in asked.items()}
    arrays = read(objects, manifest.step, item, wanted)
    values = [arrays[path] for path in asked]
    if like is None:
        return structure.rebuild(found.structure, values)
    return jax.tree.unflatten(jax.tree.structure(like), values)


def read(objects: Objects, step: int, item: str, wanted: Mapping[str, tuple[Leaf, Any]]) -> dict[str, Any]:
    """Read arrays of one item.

    Args:
        objects: Where the checkpoints are.
        step: Which.
        item: The item.
        wanted: Path -> leaf of the manifest and the sharding to read it with; `None` for a numpy array.

    Raises:
        Damaged: Bytes are not those that were saved.
        CheckpointError: They cannot be read.
    """
    store = kvstore(objects.url, objects.options)

    def one(path: str) -> tuple[str, dict[Box, np.ndarray]]:
        leaf, sharding = wanted[path]
        if leaf.in_orbax:
            part = _engine(store, f"{step_name(step)}/{leaf.where}/{item_name(item)}/", leaf, leaf_name(item, path))
        else:
            part = _packed(objects, step, leaf)
        boxes = {_whole(leaf.shape)} if sharding is None else _boxes(sharding, leaf.shape)
        return path, _assemble(leaf, boxes, part, f"{leaf_name(item, path)} of step {step} in {objects.url}")

    found = {}
    for path, blocks in ordered(one, wanted, workers=objects.workers):
        leaf, sharding = wanted[path]
        if sharding is None:
            found[path] = blocks[_whole(leaf.shape)]
        else:
            place = _placer(blocks, leaf.shape)
            found[path] = jax.make_array_from_callback(leaf.shape, sharding, place)
    return found


def _differences(path: str, like: Any, saved: Mapping[str, Leaf]) -> list[str]:
    leaf = saved.get(path)
    if leaf is None:
        return [f"missing from the checkpoint{nearest(path, saved)}"]
    if leaf.kind != "array":
        return [f"is a {leaf.kind} value; download the checkpoint, and restore it from there"]
    if like is None:
        return []
    if not (hasattr(like, "shape") and hasattr(like, "dtype")):
        return [f"{type(like).__name__} does not say what to read it as; expected a jax.ShapeDtypeStruct or an array"]
    there, wanted = f"{leaf.dtype}{list(leaf.shape)}", f"{like.dtype}{list(like.shape)}"
    return [] if there == wanted else [f"{there} in the checkpoint, {wanted} asked for"]


def _sharding(like: Any) -> Any:
    return None if isinstance(like, np.ndarray) else getattr(like, "sharding", None) or default_sharding()


def kvstore(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Say where a URL is in TensorStore's words.

    Raises:
        CheckpointError: TensorStore cannot get there.

    Example:
        >>> kvstore("gs://bucket/runs/a", {})
        {'driver': 'gcs', 'bucket': 'bucket', 'path': 'runs/a/'}
    """
    parts = urllib.parse.urlsplit(url)
    path = f"{parts.path.strip('/')}/"
    if parts.scheme == "file":
        return {"driver": "file", "path": f"/{path}"}
    if parts.scheme in ("gs", "gcs"):
        return {"driver": "gcs", "bucket": parts.netloc, "path": path}
    if parts.scheme not in ("s3", "s3a"):
        raise CheckpointError(f"{url}: arrays cannot be read from {parts.scheme}:// by parts; download the checkpoint")
    if options.get("key") or options.get("secret") or options.get("token"):
        raise CheckpointError(
            f"{url}: keys in storage_options are of no use to TensorStore, which reads the arrays; set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile in their place, or download the checkpoint"
        )
    client = options.get("client_kwargs") or {}
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    found: dict[str, Any] = {"driver": "s3", "bucket": parts.netloc, "path": path}
    if endpoint:
        found |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        found["aws_region"] = region
    if options.get("anon"):
        found["aws_credentials"] = {"type": "anonymous"}
    elif options.get("profile"):
        found["aws_credentials"] = {"type": "profile", "profile": options["profile"]}
    return found


def _engine(store: Mapping[str, Any], folder: str, leaf: Leaf, name: str) -> Callable[[Box], np.ndarray]:
    """Open an array that Orbax wrote; gives what reads a part of it."""
    import tensorstore  # comes with Orbax

    base = {**store, "path": f"{store['path']}{folder}"}
    entry = f"{orbax_name(leaf.path)}/"
    packed = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": entry}}
    plain = {"driver": "zarr", "kvstore": {**base, "path": f"{base['path']}{entry}"}}

    def opened() -> Any:
        try:
            return tensorstore.open(packed, read=True, open=True).result()
        except ValueError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return tensorstore.open(plain, read=True, open=True).result()

    def part(box: Box) -> np.ndarray:
        try:
            array = opened()
            if (array.shape, array.dtype.name) != (leaf.shape, leaf.dtype):
                raise Damaged(f"{name}: {array.dtype.name}{list(array.shape)}, expected {leaf.dtype}{list(leaf.shape)}")
            return array[tuple(slice(*bounds) for bounds in box)].read().result()
        except (ValueError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise
            text = str(error).partition(" [")[0]  # what follows is the whole specification
            raise (Damaged if "DATA_LOSS" in text or "checksum" in text.lower() else CheckpointError)(
                f"{name} cannot be read: {text}"
            ) from error

    return part


def _packed(objects: Objects, step: int, leaf: Leaf) -> Callable[[Box], np.ndarray]:
    def part(box: Box) -> np.ndarray:
        start, data = leaf.offset or 0, b""
        if leaf.nbytes:
            try:
                data = objects.read(f"{step_name(step)}/{LEAVES}", start, start + leaf.nbytes)
            except FileNotFoundError as error:
                raise Damaged(f"{objects.url}/{step_name(step)}/{LEAVES} is missing") from error
        array = np.frombuffer(bytearray(data), np.dtype(leaf.dtype)).reshape(leaf.shape)
        return array[tuple(slice(*bounds) for bounds in box)]

    return part


def _assemble(leaf: Leaf, boxes: set[Box], part: Callable[[Box], np.ndarray], name: str) -> dict[Box, np.ndarray]:
    """Read all saved parts that some boxes touch, compare them, and cut the boxes out of them."""
    saved = {tuple(zip(shard.start, shard.stop)): shard.digest for shard in leaf.shards}
    if not saved and leaf.digest is not None:
        saved = {_whole(leaf.shape): leaf.digest}
    found = {box: np.empty([stop - start for start, stop in box], np.dtype(leaf.dtype)) for box in boxes}
    filled = dict.fromkeys(boxes, 0)
    for place, text in saved.items():
        touched = {box: common for box in boxes if (common := _common(box, place)) is not None}
        if not touched:
            continue
        data = part(place)
        if digest.of(data) != text:
            raise Damaged(f"{name} is not what was saved: digest {digest.of(data)}, expected {text}")
        for box, common in touched.items():
            found[box][_within(common, box)] = data[_within(common, place)]
            filled[box] += _size(common)
    assert all(filled[box] == _size(box) for box in boxes), f"{name}: the parts of the manifest do not make it whole"
    return found


def _boxes(sharding: Any, shape: tuple[int, ...]) -> set[Box]:
    return {_box(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _common(left: Box, right: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right))
    return box if all(start < stop for start, stop in box) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer))


def _size(box: Box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def _placer(blocks: Mapping[Box, np.ndarray], shape: tuple[int, ...]) -> Callable[[Any], np.ndarray]:
    return lambda index: blocks[_box(index, shape)]
