"""Writes small files of other formats with the libraries that own them, for packages/checkpoint/tests.

    uv run --locked --with safetensors==0.8.0 --with torch==2.13.0 python tools/golden/checkpoint_formats.py

makes packages/checkpoint/tests/golden/formats.zip anew: safetensors (single, and two shards with their index),
`.npz`, plain Orbax checkpoints in four layouts, torch Distributed Checkpoint folders of one process and of two.
`expected.json` in it holds every array as bytes, taken from the arrays that were handed to those libraries.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors.torch  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.distributed.checkpoint as dcp  # pyright: ignore[reportMissingImports]
import torch.multiprocessing as mp  # pyright: ignore[reportMissingImports]
from orbax.checkpoint import v1
from torch.distributed.tensor import (  # pyright: ignore[reportMissingImports]
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

OUT = Path(__file__).parents[2] / "packages/checkpoint/tests/golden/formats.zip"
GOLDEN = Path(os.environ.setdefault("GOLDEN", tempfile.mkdtemp()))  # the same in the processes started below
#: torch's dtypes that safetensors 0.8 writes.
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
expected = {}


def note(source, path, array, dtype=None):
    """Write down an array: numpy's, or torch's by its bytes."""
    if isinstance(array, torch.Tensor):
        dtype = dtype or str(array.dtype).removeprefix("torch.")
        data = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b""
        shape = list(array.shape)
    else:
        array = np.asarray(array)
        dtype, data, shape = array.dtype.name, np.ascontiguousarray(array).tobytes(), list(array.shape)
    expected.setdefault(source, {})[path] = [dtype, shape, data.hex()]


def every_dtype():
    whole = torch.tensor([[0, 1, 2], [1, 4, 1]])
    tensors = {f"all.{str(dtype)[6:]}": whole.to(dtype) for dtype in DTYPES}
    return tensors | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "layers.0.w%2E": torch.arange(5)}


def write_safetensors():
    tensors = every_dtype()
    safetensors.torch.save_file(tensors, GOLDEN / "single.safetensors", metadata={"format": "pt"})
    for name, tensor in tensors.items():
        note("single.safetensors", name, tensor)
    folder = GOLDEN / "sharded"
    folder.mkdir()
    shards = {"a": {"x.w": torch.arange(6.0).reshape(2, 3)}, "b": {"x.b": torch.ones(3), "y": torch.tensor(2)}}
    weights = {}
    for number, shard in enumerate(shards.values(), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.torch.save_file(shard, folder / file)
        weights |= dict.fromkeys(shard, file)
        for name, tensor in shard.items():
            note("sharded", name, tensor)
    index = {"metadata": {"total_size": 44}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_npz():
    arrays = {
        "a/w": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "big_endian": np.arange(4, dtype=">f4"),
        "empty": np.zeros((0, 2), np.complex64),
        "scalar": np.array(True),
    }
    np.savez(GOLDEN / "plain.npz", **arrays)
    np.savez_compressed(GOLDEN / "compressed.npz", **arrays)
    for name, array in arrays.items():
        native = array.astype(array.dtype.newbyteorder("="))
        note("plain.npz", name, native)
        note("compressed.npz", name, native)


def write_orbax():
    tree = {
        "layer": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4, jnp.bfloat16)},
        "list": [jnp.zeros((2,), jnp.int32), jnp.float32(3)],
    }
    paths = {"layer/w": tree["layer"]["w"], "layer/b": tree["layer"]["b"]}
    paths |= {"list/0": tree["list"][0], "list/1": tree["list"][1]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:
        writer.save(GOLDEN / "orbax-v0-plain", tree)
    with ocp.StandardCheckpointer() as writer:
        writer.save(GOLDEN / "orbax-v0-standard", tree)
    with ocp.CheckpointManager(GOLDEN / "orbax-v0-manager") as manager:
        items = {"params": ocp.args.StandardSave(tree), "opt": ocp.args.StandardSave(tree["layer"])}
        manager.save(3, args=ocp.args.Composite(**items, run=ocp.args.JsonSave({"x": 1})))
        manager.wait_until_finished()
    v1.save(str(GOLDEN / "orbax-v1"), tree)
    for path, array in paths.items():
        for source in ("orbax-v0-plain", "orbax-v0-standard", "orbax-v1"):
            note(source, path, array)
        note("orbax-v0-manager/3", f"params/{path}", array)
    for name, array in tree["layer"].items():
        note("orbax-v0-manager/3", f"opt/{name}", array)


def write_torch():
    state = {name.removeprefix("all."): tensor for name, tensor in every_dtype().items()}
    state["transposed"] = torch.arange(12.0).reshape(3, 4).T
    state["part"] = torch.arange(20.0)[3:9:2]
    state["parameter"] = torch.nn.Parameter(torch.ones(2, 2))
    dcp.save({"model": state, "step": 7}, checkpoint_id=GOLDEN / "torch-one", no_dist=True)
    for name, tensor in state.items():
        note("torch-one", f"model/{name.replace('.', '/').replace('%', '%25')}", tensor)
    mp.spawn(write_shards, nprocs=2)
    whole = torch.arange(35.0).reshape(7, 5)
    for name in ("rows", "columns", "replicated", "plain"):
        note("torch-two", name, whole)
    note("torch-two", "half", whole.bfloat16())


def write_shards(rank):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "half": distribute_tensor(whole.bfloat16(), mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole,
    }
    dcp.save(state, checkpoint_id=GOLDEN / "torch-two")
    dist.destroy_process_group()


if __name__ == "__main__":
    for write in (write_safetensors, write_npz, write_orbax, write_torch):
        write()
    (GOLDEN / "expected.json").write_text(json.dumps(expected))
    OUT.parent.mkdir(exist_ok=True)
    shutil.make_archive(str(OUT.with_suffix("")), "zip", GOLDEN)
    shutil.rmtree(GOLDEN)
