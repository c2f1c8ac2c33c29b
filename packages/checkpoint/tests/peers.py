"""One of several processes of a run, started by `test_processes.py`.

    python peers.py TASK INDEX COUNT PORT DIRECTORY ARGUMENTS

What a step holds is told by its number, so that every process can check what it gets.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.checkpoint import CheckpointConfig, CheckpointError, commit, processes, saving, snapshot

GRIDS = {1: (1, 1), 2: (2, 1), 4: (1, 4), 6: (3, 2), 8: (2, 4)}
SPECS = {
    "even": (("x",), ("y",)),
    "odd": (("x",), ("y",)),
    "rows": (("x", "y"),),
    "half": (("x",),),
    "turned": (("y",), ("x",)),
    "whole": (),
    "tiny": (("x",),),
}


def values(step: int) -> dict[str, np.ndarray]:
    """Arrays whose sizes share few divisors, so that the parts of two layouts lie across each other."""
    draw = np.random.default_rng(step)
    return {
        "even": draw.normal(size=(24, 48)).astype(np.float32),
        "odd": draw.integers(-99, 99, (6, 20, 7), np.int32),
        "rows": draw.normal(size=(24, 5)).astype(jnp.bfloat16),
        "half": draw.integers(0, 2, (12, 9)).astype(bool),
        "turned": draw.normal(size=(28, 18)).astype(np.float16),
        "whole": draw.integers(0, 255, (7, 11), np.uint8),
        "tiny": draw.normal(size=2).astype(np.float32),
    }


def shardings(devices=None) -> dict[str, NamedSharding]:
    """Lay each out over all devices, on those axes that divide it."""
    devices = jax.devices() if devices is None else devices
    grid = GRIDS[len(devices)]
    mesh = jax.make_mesh(grid, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    found = {}
    for name, value in values(0).items():
        spec = []
        for size, axes in zip(value.shape, SPECS[name]):
            parts = int(np.prod([mesh.shape[axis] for axis in axes]))
            spec.append(axes if size % parts == 0 else None)
        found[name] = NamedSharding(mesh, PartitionSpec(*spec))
    return found


def put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Lay an array that every process has out over all of them."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def items(step: int) -> dict:
    """What a step holds."""
    where = shardings()
    arrays = {name: put(value, where[name]) for name, value in values(step).items()}
    return {"params": arrays, "local": {"n": jnp.int32(step), "f": np.float64(step)}, "run": {"step": step}}


def check(found: dict[str, jax.Array], step: int) -> None:
    """Compare the parts that are here bit by bit."""
    where = shardings()
    for name, value in values(step).items():
        assert found[name].sharding == where[name], name
        assert found[name].dtype == value.dtype
        for shard in found[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), name


def save(directory: str, **changes) -> None:
    """Save steps 1 and 2."""
    with CheckpointConfig(**changes).build(directory) as store:
        for step in (1, 2):
            store.save(step, items(step), metrics={"loss": 1 / step})


def restore(directory: str) -> None:
    """Restore on as many devices as there are, as numpy, and as saved."""
    where = shardings()
    like = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where[n]) for n, v in values(0).items()}
    with CheckpointConfig().build(directory) as store:
        assert store.latest() == 2
        for step in (1, 2):
            got = store.restore(step, {"params": like, "run": None, "local": None})
            check(got["params"], step)
            assert got["run"] == {"step": step} and got["local"] == {"n": step, "f": step}
            for whole in (values(0), None):
                host = store.restore(step, {"params": whole})["params"]
                for name, value in values(step).items():
                    assert type(host[name]) is np.ndarray and host[name].dtype == value.dtype
                    assert host[name].tobytes() == value.tobytes(), name
        resumed = store.resume(params=like, local=None)
        assert resumed is not None and resumed.step == 2 and resumed.metrics == {"loss": 0.5}
        check(resumed["params"], 2)
        store.save(3, items(3))
        store.wait()
        check(store.restore(3, {"params": like})["params"], 3)


def _strike(how: str):
    def act(*args, **kwargs):
        print("struck", flush=True)
        if how == "raise":
            raise OSError(28, "No space left on device")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        time.sleep(600)

    return act


def strike(directory: str, victim: int, phase: str, how: str) -> None:
    """Save step 1, then let something happen to one process while step 2 is saved; nothing is caught."""
    store = CheckpointConfig(pack_below=64).build(directory)
    store.save(1, items(1))
    store.wait()
    if victim == INDEX:
        act = _strike(how)
        if phase == "stage":
            snapshot.take = act
        elif phase == "write":
            from styrax.checkpoint import arrays

            real = arrays.Writing.wait
            arrays.Writing.wait = act
            if how == "raise":
                arrays.Writing.wait = lambda self, check: (real(self, check), act())
        else:
            commit.seal = act
    try:
        store.save(2, items(2))
        store.wait()
    except CheckpointError as error:
        print("told", error, flush=True)
        raise
    print("saved", flush=True)


def leave(directory: str, victim: int) -> None:
    """Save in the background, while one process dies; nobody waits for it, and the program ends."""
    store = CheckpointConfig(pack_below=64).build(directory)
    if victim == INDEX:
        saving.commit.seal = _strike("kill")
    store.save(1, items(1))


def apart(directory: str) -> None:
    """Each process has a folder of its own."""
    processes._APPEAR = 1.0
    Path(directory, str(INDEX)).mkdir(parents=True, exist_ok=True)
    CheckpointConfig().build(Path(directory, str(INDEX)))
    print("opened", flush=True)


def damage(directory: str) -> None:
    """One process alone sees the newest checkpoint damaged."""
    from styrax.checkpoint import reading, restore

    where = shardings()
    like = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where[n]) for n, v in values(0).items()}
    real_verify, real_read = reading.verify, restore.read

    def verify(checkpoint, **options):
        if Path(checkpoint).name == "00000002":
            return ["aux/leaves.bin: cut off here"]
        return real_verify(checkpoint, **options)

    def read(checkpoint, *args, **options):
        found = real_read(checkpoint, *args, **options)
        if checkpoint.name == "00000002":
            raise restore.Damaged("leaf params/even is not what was saved")
        return found

    with CheckpointConfig().build(directory) as store:
        for owner, name, broken in ((reading, "verify", verify), (restore, "read", read)):
            real = getattr(owner, name)
            if INDEX == COUNT - 1:
                setattr(owner, name, broken)
            resumed = store.resume(params=like, local=None)
            assert resumed is not None and resumed.step == 1, resumed
            check(resumed["params"], 1)
            assert list(resumed.passed_over) == [2] and resumed["run"] == {"step": 1}
            print("passed over", resumed.passed_over[2], flush=True)
            setattr(owner, name, real)
        resumed = store.resume(params=like, local=None)
        assert resumed is not None and resumed.step == 2 and not resumed.passed_over


class Counter:
    """An iterator whose position differs between processes."""

    def __init__(self, start: int) -> None:
        self.position = start

    def get_state(self) -> dict:
        return {"position": self.position}

    def set_state(self, state: dict) -> None:
        self.position = state["position"]


def position(directory: str) -> None:
    """Each process gets its own position of an iterator back, and any number that of one which all share."""
    with CheckpointConfig().build(directory) as store:
        if store.latest() is None:
            store.save(1, {"own": Counter(10 + INDEX), "shared": Counter(5), "run": {"a": 1}})
            store.wait()
            own, shared = Counter(0), Counter(0)
            resumed = store.resume(own=own, shared=shared)
            assert resumed is not None and resumed["own"] is own
            assert (own.position, shared.position) == (10 + INDEX, 5)
            return
        shared, own = Counter(0), Counter(0)
        store.restore(1, {"shared": shared})
        assert shared.position == 5
        shared = Counter(0)
        try:
            store.resume(own=own, shared=shared)
        except CheckpointError as error:
            print("told", error, flush=True)
        assert (own.position, shared.position) == (0, 0)


def raising(directory: str) -> None:
    """What a caller's own code raises on one process: the others hear of it, and all go on."""
    with CheckpointConfig().build(directory) as store:
        data = Counter(1)
        if INDEX == 1:
            data.get_state = lambda: {}["mine"]
        store.save(2, items(2))
        for call in (
            lambda: store.save(1, {"data": data}),
            lambda: store.restore(2, {"new": {"x": np.ones(1)}, "run": None}, on_missing=make),
        ):
            try:
                call()
            except (CheckpointError, KeyError) as error:
                print("told", type(error).__name__, error, flush=True)
            store.save(2, items(2))
            store.wait()
            assert store.steps() == [2]
            if INDEX == 0:
                assert not list(Path(directory).glob(".staging-*"))


def make(path: str, leaf: np.ndarray) -> np.ndarray:
    """Make a missing leaf; on process 1 that fails."""
    return {}["yours"] if INDEX == 1 else leaf


def due(directory: str) -> None:
    """All processes agree on whether a checkpoint is due by the time, as process 0 sees it."""
    import styrax.checkpoint.store as module

    class Clock:
        now = 0.0

        def __getattr__(self, name):
            return getattr(time, name)

        def monotonic(self):
            return self.now

    module.time = clock = Clock()
    with CheckpointConfig(every=10, minutes=2).build(directory) as store:
        clock.now = 119.0 if INDEX else 121.0
        assert store.due(3) == "temporary" and store.due(10) == "lasting"
        clock.now = 500.0 if INDEX else 1.0
        assert store.due(3) is None


if __name__ == "__main__":
    task, INDEX, COUNT, port, folder, arguments = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:]
    if COUNT > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", COUNT, INDEX)
    globals()[task](folder, **json.loads(arguments))
    print("done", flush=True)
