"""Files of Orbax that are an array's very bytes, so that its digest is the file's and it can be read without Orbax.

On a local disk arrays are written in the Zarr 2 format, without compression and a folder for each: a file is one
part, as one device held it, in C order. Orbax and every Zarr library read that too; but a process that wants whole
arrays reads them several times faster by itself, each byte once and into the place where it stays.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from styrax.checkpoint import digest
from styrax.checkpoint.errors import Damaged
from styrax.checkpoint.manifest import File, Leaf, Manifest, Shard, leaf_name
from styrax.checkpoint.naming import item_name, orbax_name

_ALIGN = 64  # jax takes host memory as its own, without a copy, if it is aligned so
_READERS = 4
_CHUNK = 2**22


def file_of(item: str, leaf: Leaf, start: Sequence[int], stop: Sequence[int]) -> str:
    """Name the file that holds a part, if it is one that holds that part alone.

    Args:
        item: The item.
        leaf: A leaf of it that is in Orbax.
        start: First index of the part on each axis.
        stop: The index behind its last one.

    Returns:
        Path relative to the checkpoint.
    """
    numbers = [first // max(last - first, 1) for first, last in zip(start, stop)] or [0]
    return f"{leaf.where}/{item_name(item)}/{orbax_name(leaf.path)}/{'.'.join(map(str, numbers))}"


def known(folder: Path, item: str, leaf: Leaf, shards: Sequence[Shard]) -> dict[str, File]:
    """Give the files of a leaf whose digests need not be taken, because they are those of its parts in memory.

    Args:
        folder: The checkpoint, written but for the manifest.
        item: The item.
        leaf: A leaf of it that is in Orbax.
        shards: Its parts.
    """
    found = {}
    for shard in shards:
        name = file_of(item, leaf, shard.start, shard.stop)
        size = np.dtype(leaf.dtype).itemsize
        for first, last in zip(shard.start, shard.stop):
            size *= last - first
        path = folder / name
        if path.is_file() and path.stat().st_size == size:
            found[name] = File(size=size, digest=shard.digest)
    return found


def memory(nbytes: int) -> np.ndarray:
    """Give fresh bytes, aligned so that jax takes them as its own."""
    found = np.empty(nbytes + _ALIGN, np.uint8)
    shift = -found.ctypes.data % _ALIGN
    return found[shift : shift + nbytes]


def whole(checkpoint: Path, item: str, leaf: Leaf) -> str | None:
    """Name the one file that is the whole of a leaf by its size, or `None` if there is none.

    Args:
        checkpoint: The folder of the step.
        item: The item.
        leaf: A leaf of it that is in Orbax.
    """
    name = file_of(item, leaf, (0,) * len(leaf.shape), leaf.shape)
    path = checkpoint / name
    return name if leaf.digest is not None and path.is_file() and path.stat().st_size == leaf.nbytes else None


def readable(manifest: Manifest, item: str, leaf: Leaf) -> str | None:
    """Name the one file that is the whole of a leaf, or `None` if there is none."""
    if leaf.digest is None or not leaf.in_orbax:
        return None
    name = file_of(item, leaf, (0,) * len(leaf.shape), leaf.shape)
    file = manifest.files.get(name)
    return name if file is not None and (file.size, file.digest) == (leaf.nbytes, leaf.digest) else None


def read(
    checkpoint: Path, leaves: Mapping[tuple[str, Leaf], str], *, verify: bool
) -> dict[tuple[str, str], np.ndarray]:
    """Read whole leaves.

    Args:
        checkpoint: The folder of the step.
        leaves: Item and leaf -> file, from `readable`.
        verify: Compare each with its digest.

    Returns:
        Item and path -> array of the leaf's shape and dtype, aligned for jax.

    Raises:
        Damaged: One is not what was saved; all such are listed.
    """

    def one(entry: tuple[tuple[str, Leaf], str], data: np.ndarray) -> tuple[np.ndarray | None, str]:
        (_, leaf), name = entry
        view, at = data.data, 0
        state = digest.state() if verify else None
        with (checkpoint / name).open("rb", buffering=0) as handle:
            while at < leaf.nbytes and (count := handle.readinto(view[at : at + _CHUNK])):
                if state is not None:
                    state.update(view[at : at + count])  # while it is in the cache
                at += count
        if at < leaf.nbytes:
            return None, f"{name}: {at} bytes, expected {leaf.nbytes}"
        if state is not None and state.hexdigest() != leaf.digest:
            return None, f"{name}: digest {state.hexdigest()[:12]}, expected {leaf.digest[:12] if leaf.digest else '?'}"
        return data.view(np.dtype(leaf.dtype)).reshape(leaf.shape), ""

    # Taken here and not by the readers: what a thread allocates may stay with it when it ends.
    buffers = [memory(leaf.nbytes) for _, leaf in leaves]
    if len(leaves) == 1:
        results = [*map(one, leaves.items(), buffers)]
    else:
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            results = list(pool.map(one, leaves.items(), buffers))
    bad = [
        f"{problem} (leaf {leaf_name(item, leaf.path)})"
        for ((item, leaf), _), (_, problem) in zip(leaves.items(), results)
        if problem
    ]
    if bad:
        raise Damaged("\n  ".join(bad))
    return {(item, leaf.path): data for (item, leaf), (data, _) in zip(leaves, results) if data is not None}
