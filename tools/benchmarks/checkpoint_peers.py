"""What `checkpoint.py` compares: each writes a dictionary of jax arrays to a new folder, durably, and reads it back.

`save` gives the seconds after which the arrays may be changed, and returns when everything is on the disk. `load` gives
jax arrays, or what the peer itself makes (torch tensors), complete in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

Tree = dict[str, Any]


def sync(*paths: Path) -> None:
    """Bring files or folders to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Styrax:
    """Ours, by `CheckpointConfig` at its defaults: in the background, digests taken, and verified when read."""

    def __init__(self, options: dict[str, Any]) -> None:
        from styrax.checkpoint import CheckpointConfig

        self.config = CheckpointConfig(**options)

    def save(self, folder: Path, tree: Tree) -> float:
        with self.config.build(folder) as store:
            begin = time.perf_counter()
            store.save(1, {"params": tree})
            return time.perf_counter() - begin

    def load(self, folder: Path, like: Tree) -> Tree:
        return self.config.build(folder, read_only=True).restore(1, {"params": like})["params"]


class Orbax:
    """Orbax version 1, by its free functions; `options` are dotted names of a `Context`, none for its defaults."""

    def __init__(self, options: dict[str, Any]) -> None:
        from orbax.checkpoint import v1

        self.ocp = v1
        self.options = options

    def context(self) -> Any:
        context = self.ocp.Context()
        for name, value in self.options.items():
            *parents, last = name.split(".")
            target = context
            for parent in parents:
                target = getattr(target, parent)
            setattr(target, last, value)
        return context

    def save(self, folder: Path, tree: Tree) -> float:
        with self.context():
            begin = time.perf_counter()
            response = self.ocp.save_async(str(folder), tree)
            blocked = time.perf_counter() - begin
            response.result()
        return blocked

    def load(self, folder: Path, like: Tree) -> Tree:
        with self.context():
            return self.ocp.load(str(folder), like)

    def metadata(self, folder: Path) -> Any:
        with self.context():
            return self.ocp.metadata(str(folder))


class Safetensors:
    """`safetensors.flax.save_file`, one file, and fsync of it and its folder; nothing in the background."""

    def __init__(self, options: dict[str, Any]) -> None:
        from safetensors import flax  # pyright: ignore[reportMissingImports] - not part of the workspace

        self.flax = flax

    def save(self, folder: Path, tree: Tree) -> float:
        begin = time.perf_counter()
        folder.mkdir()
        self.flax.save_file(tree, folder / "model.safetensors")
        sync(folder / "model.safetensors", folder)
        return time.perf_counter() - begin

    def load(self, folder: Path, like: Tree) -> Tree:
        return self.flax.load_file(folder / "model.safetensors")


class Torch:
    """torch Distributed Checkpoint, one process, `async_save` and its default writer, which syncs its files."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch.distributed  # pyright: ignore[reportMissingImports] - not part of the workspace
        import torch.distributed.checkpoint as dcp  # pyright: ignore[reportMissingImports]

        self.torch, self.dcp = torch, dcp
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)

    def tensor(self, array: np.ndarray) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def save(self, folder: Path, tree: Tree) -> float:
        tensors = {name: self.tensor(np.asarray(array)) for name, array in tree.items()}
        begin = time.perf_counter()
        future = self.dcp.async_save(tensors, checkpoint_id=str(folder))
        blocked = time.perf_counter() - begin
        future.result()
        return blocked

    def load(self, folder: Path, like: Tree) -> Any:
        tensors = {name: self.tensor(np.empty(leaf.shape, leaf.dtype)) for name, leaf in like.items()}
        self.dcp.load(tensors, checkpoint_id=str(folder))
        return tensors


class Raw:
    """The bytes of every array to one file, and fsync: what the disk takes, and what reading into memory takes."""

    def __init__(self, options: dict[str, Any]) -> None:
        pass

    def save(self, folder: Path, tree: Tree) -> float:
        begin = time.perf_counter()
        folder.mkdir()
        with (folder / "data").open("wb", buffering=0) as file:
            for array in tree.values():
                file.write(np.asarray(array).reshape(-1).view(np.uint8).data)
        sync(folder / "data", folder)
        return time.perf_counter() - begin

    def load(self, folder: Path, like: Tree) -> Tree:
        found = {}
        with (folder / "data").open("rb", buffering=0) as file:
            for name, leaf in like.items():
                found[name] = np.empty(leaf.shape, leaf.dtype)
                file.readinto(found[name].reshape(-1).view(np.uint8).data)
        return found


PEERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "styrax": Styrax,
    "orbax, defaults": Orbax,
    "orbax, at its best": Orbax,
    "safetensors + fsync": Safetensors,
    "torch DCP": Torch,
    "raw write + fsync": Raw,
}

# What is tried to find Orbax's best, for saving and for loading; the winners of a tree's first round are used.
_OFF = {"array_options.saving.use_compression": False}
_READ = "memory_options.read_concurrent_bytes"
SAVE_OPTIONS: list[dict[str, Any]] = [
    _OFF,
    {**_OFF, "array_options.saving.enable_write_sharding_file": False, "memory_options.deepcopy_host_arrays": False},
    {**_OFF, "array_options.saving.use_ocdbt": False},
    {
        **_OFF,
        "array_options.saving.use_ocdbt": False,
        "array_options.saving.use_zarr3": False,
        "memory_options.deepcopy_host_arrays": False,
    },
]
LOAD_OPTIONS: list[dict[str, Any]] = [{}, *({_READ: count * 2**20} for count in (128, 256, 512))]


def make_tree(count: int, nbytes: int, dtype: str) -> Tree:
    """Random arrays as a training step gives them: the results of a compiled function.

    Args:
        count: Arrays.
        nbytes: Of each.
        dtype: Its name.
    """
    size = nbytes // jax.numpy.dtype(dtype).itemsize
    rows = next(rows for rows in (256, 64, 16, 4, 1) if size % rows == 0)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(size + 2**20, np.float32)  # a window of it for each: no array repeats within itself
    starts = rng.integers(0, 2**20, count)
    step = jax.jit(lambda x: (0.02 * x).astype(dtype).reshape(rows, -1))
    return {f"layer_{i:04d}": jax.block_until_ready(step(pool[s : s + size])) for i, s in enumerate(starts)}


def abstract(tree: Tree) -> Tree:
    """What to load a tree as."""
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in tree.items()}
