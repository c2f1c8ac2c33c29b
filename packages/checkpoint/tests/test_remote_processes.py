"""Two processes with a folder that they share and a bucket: one uploads and downloads, both find the same."""

import socket
import subprocess
import sys

import pytest

pytest.importorskip("fsspec")

SCRIPT = """
import sys, warnings
from pathlib import Path
import jax
import numpy as np
index, port, place = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, index)
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from styrax.checkpoint import CheckpointError
from styrax.checkpoint.remote import Bucket, BucketStore, TieredStore, errors

errors.WAIT = 0.001
warnings.simplefilter("ignore")
sharding = NamedSharding(jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
value = np.arange(32.0, dtype=np.float32).reshape(8, 4)
like = {"params": {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}, "run": None}
url = f"file://{place}/bucket"


def items(step):
    array = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index] + step)
    return {"params": {"w": array}, "run": {"step": step}}


def check(array, step):
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index] + step)


with TieredStore(place / "a", url) as store:
    for step in (1, 2):
        ticket = store.save(step, items(step))
        assert ticket.uploaded() is (index == 0)
    store.uploaded()
    multihost_utils.sync_global_devices("uploaded")
    assert store.steps() == store.bucket.steps() == [1, 2]
with TieredStore(place / "b", url) as store:
    assert store.latest() == 2
    assert store.local.steps() == [2]
    for step in (2, 1):
        found = store.restore(step, like)
        assert found["run"] == {"step": step}
        check(found["params"]["w"], step)
multihost_utils.sync_global_devices("closed")
if index == 0:
    for path in (place / "b" / "00000002").rglob("*"):
        if path.is_file() and path.stat().st_size > 40:
            path.write_bytes(b"?" + path.read_bytes()[1:])
multihost_utils.sync_global_devices("spoilt")
with TieredStore(place / "b", url) as store:
    assert store.latest() == 2
    check(store.restore(2, like)["params"]["w"], 2)
    assert store.local.verify(2) == []
# Each reads its own part.
check(Bucket(url).read_arrays(2, "params", like["params"])["w"], 2)
reader = TieredStore(place / "none", url, read_only=True)
check(reader.restore(2, like)["params"]["w"], 2)
# An upload that fails is told to both.
multihost_utils.sync_global_devices("read")
if index == 0:
    (place / "file").write_text("no folder")
multihost_utils.sync_global_devices("file")
try:
    TieredStore(place / "c", f"file://{place}/file/bucket")
except CheckpointError as error:
    print("told:", error)
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
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(index), str(port), tmp_path],
            env={**env, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, "\n-----\n".join(outputs)
        assert "told: " in output and "cannot list file://" in output
        assert "done" in output
