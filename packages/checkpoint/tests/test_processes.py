"""Two processes save one checkpoint on a shared folder, and agree on what happened."""

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import jax
import jax.numpy as jnp
import numpy as np
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, index)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from styrax.checkpoint import CheckpointConfig, CheckpointError, commit

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
assert jax.process_count() == 2 and len(jax.local_devices()) == 2


def put(value, spec):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


values = {"w": np.arange(32.0, dtype=np.float32).reshape(8, 4), "b": np.arange(6, dtype=np.int32)}
specs = {"w": P("x"), "b": P()}
like = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, specs[n])) for n, v in values.items()}


def arrays(step):
    return {name: put(value + step, specs[name]) for name, value in values.items()}


with CheckpointConfig(keep_last=2).build(directory) as store:
    for step in (1, 2, 3):
        store.save(step, {"params": arrays(step), "count": {"n": jnp.int32(step)}, "run": {"step": step}})
    store.wait()
    assert store.steps() == [2, 3] and store.latest() == 3, store.steps()
    leaves = {leaf.path: leaf.where for leaf in store.manifest(3).items["params"].leaves}
    assert leaves == {"w": "orbax", "b": "packed"}, leaves
    got = store.restore(3, {"params": like, "run": None, "count": None})
    assert got["run"] == {"step": 3} and got["count"]["n"] == 3
    for name, value in values.items():
        assert got["params"][name].sharding == like[name].sharding
        for shard in got["params"][name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), (value + 3)[shard.index])
    # Process 0 alone fails behind: both are told.
    real = commit.seal
    def broken(folder, names, known=None):
        raise OSError(28, "No space left on device")
    commit.seal = broken if index == 0 else real
    store.save(4, {"params": arrays(4)})
    try:
        store.wait()
    except CheckpointError as error:
        print("told:", error)
    commit.seal = real
    # Process 1 alone cannot save: both are told, at once.
    try:
        store.save(5, {"params": arrays(5), "bad": {"x": object() if index else np.zeros(1)}})
    except CheckpointError as error:
        print("told:", error)
    store.save(6, {"params": arrays(6)})
    store.wait()
    assert store.steps() == [3, 6], store.steps()
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")
def test_two_processes(tmp_path, env):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **env, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(index), str(port), tmp_path / "run"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, outputs):
        assert process.returncode == 0 and output.endswith("done\n"), (output, errors[-3000:])
    assert "step 4 cannot be written" in outputs[0][0] and "process 0 failed: the checkpoint of step 4 cannot be written" in outputs[1][0]
    assert "process 1 failed: these cannot be saved:\n  bad/x" in outputs[0][0] and "bad/x: is object" in outputs[1][0]
