import os
import socket
import subprocess
import sys

import pytest

from styrax.core import UserError, distributed

WORKER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from styrax.core.distributed import initialize
from styrax.core.mesh import DEFAULT_RULES, MeshConfig, shardings
assert initialize(timeout=120)
assert initialize(timeout=120)  # a second call changes nothing
mesh = MeshConfig(axes={"data": -1, "fsdp": 2, "tensor": 2}).build()
init = lambda: {"kernel": jnp.arange(32.0).reshape(4, 8)}
where = shardings(jax.eval_shape(init), {"kernel": ("embed", "mlp")}, DEFAULT_RULES, mesh)
kernel = jax.jit(init, out_shardings=where)()["kernel"]
shard = kernel.addressable_shards[0].data.shape
batch = NamedSharding(mesh, P("data"))
x = jax.make_array_from_callback((2,), batch, lambda index: np.array([1.0, 10.0])[index])
total = jax.jit(lambda k, x: k.sum() + x.sum(), out_shardings=NamedSharding(mesh, P()))(kernel, x)
print("RESULT", jax.process_index(), jax.process_count(), dict(mesh.shape), shard, float(total))
"""


@pytest.fixture
def port():
    with distributed.reserved_port() as port:
        yield port


def test_two_processes_make_one_mesh(port):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "STYRAX_COORDINATOR": f"127.0.0.1:{port}",
        "STYRAX_NUM_PROCESSES": "2",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**environment, "STYRAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for number, worker in enumerate(workers):
            out, err = worker.communicate(timeout=180)
            expected = f"RESULT {number} 2 {{'data': 2, 'fsdp': 2, 'tensor': 2}} (2, 4) 507.0"
            assert expected in out, out + err
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the system has no way to hold a port for another one")
def test_a_reserved_port_is_nobody_elses(port):
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))
    with socket.socket() as server:  # as gRPC binds
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass


def test_a_process_that_failed_does_not_wait_for_the_others(port):
    script = """
import sys, time
from styrax.core.distributed import abandon, initialize
initialize(timeout=60)
if sys.argv[1] == "0":
    abandon(3)
    sys.exit("this is why")
time.sleep(600)
"""
    environment = {**os.environ, "STYRAX_COORDINATOR": f"127.0.0.1:{port}", "STYRAX_NUM_PROCESSES": "2"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(number)],
            env={**environment, "STYRAX_PROCESS_ID": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        _, err = workers[0].communicate(timeout=100)
        assert workers[0].returncode == 3
        assert "this is why" in err
        workers[1].communicate(timeout=60)  # the coordinator is gone with process 0
        assert workers[1].returncode != 0
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        (
            {"coordinator": "a:1"},
            {"STYRAX_PROCESS_ID": "0"},
            "coordinator=a:1, process_id=0 is set but not num_processes (STYRAX_NUM_PROCESSES); set all three or none",
        ),
        ({}, {"STYRAX_NUM_PROCESSES": "2"}, "not coordinator (STYRAX_COORDINATOR), process_id (STYRAX_PROCESS_ID)"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, {}, "coordinator: expected host:port, got 'a'"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, {}, "process_id: expected 0 to 1, got 2"),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, {}, "num_processes: expected 1 or more, got 0"),
        (
            {"coordinator": "a:1", "num_processes": 2},
            {"STYRAX_PROCESS_ID": "x"},
            "process_id: expected an integer, got 'x'",
        ),
        ({"coordinator": "auto", "num_processes": 2}, {}, "not process_id"),
    ],
)
def test_a_plan_that_does_not_hold_together(given, environ, message):
    with pytest.raises(UserError) as caught:
        distributed.initialize(**given, environ=environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"STYRAX_COORDINATOR": "", "STYRAX_NUM_PROCESSES": "", "STYRAX_PROCESS_ID": ""},
        {"STYRAX_COORDINATOR": "a:1", "STYRAX_NUM_PROCESSES": "1", "STYRAX_PROCESS_ID": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script, not a step
        {"TPU_WORKER_HOSTNAMES": "localhost"},
    ],
)
def test_one_process_needs_nothing(environ):
    assert distributed.initialize(environ=environ) is False


SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environ", "plan"),
    [
        (
            {**SLURM, "SLURM_STEP_NODELIST": "gpu[007-010]"},
            {
                "coordinator_address": "gpu007:61808",
                "num_processes": 8,
                "process_id": 5,
                "local_device_ids": [1],
            },
        ),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "a1,b[2-4]", "SLURM_STEP_NUM_NODES": "8"},
            {"coordinator_address": "a1:61808", "num_processes": 8, "process_id": 5},
        ),
        ({"TPU_WORKER_HOSTNAMES": "h0,h1"}, {}),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "h0"}, {}),
        ({"STYRAX_COORDINATOR": "auto"}, {}),
        (
            {**SLURM, "STYRAX_COORDINATOR": "h:9", "STYRAX_NUM_PROCESSES": "2", "STYRAX_PROCESS_ID": "1"},
            {"coordinator_address": "h:9", "num_processes": 2, "process_id": 1},
        ),
    ],
)
def test_what_each_environment_means(monkeypatch, environ, plan):
    seen = []
    monkeypatch.setattr(distributed, "_join", lambda plan, timeout, heartbeat: seen.append(plan) or True)
    assert distributed.initialize(environ=environ) is True
    assert seen == [plan]
