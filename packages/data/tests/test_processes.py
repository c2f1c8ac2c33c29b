"""Real processes and simulated hosts, of any number, make the batches that one process makes."""

import inspect
import json
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.data import ByteTokenizer, LMData, Loader, Mixture, write_store

DEVICES = 2  # of each process


def make(folder):
    from styrax.data import LMData, Mixture

    mixture = Mixture(
        {name: f"{folder}/{name}" for name in ("a", "b", "c")},
        [(0, {"a": 0.7, "b": 0.3}), (6, {"a": 0.2, "b": 0.3, "c": 0.5})],
        interpolate="linear",
    )
    sizes, widths = [(0, 8), (3, 16), (8, 24)], [(0, 16), (5, 32)]
    return LMData(mixture, seed=5, pack="best_fit", held_out=0.1, batch_size=sizes, seq_len=widths)


WORKER = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from styrax.core.distributed import initialize
from styrax.core.mesh import MeshConfig
from styrax.data import Loader

folder, out, state, count = *sys.argv[1:4], int(sys.argv[4])
initialize(timeout=120)
data, asked = make(folder), []

class Watched:
    fingerprint, settings, num_steps = data.fingerprint, data.settings, data.num_steps
    specs, spec = data.specs, data.spec

    def batch(self, step, rows=None):
        asked.append(rows.stop - rows.start)
        return data.batch(step, rows)

mesh = MeshConfig(axes={"data": -1}).build()
found = {}
with Loader(Watched(), sharding=NamedSharding(mesh, P("data")), prefetch=2) as loader:
    if state != "-":
        loader.set_state(json.loads(state))
    first = loader.get_state()["step"]
    for step in range(first, first + count):
        batch = next(loader)
        for name, array in batch.items():
            for number, shard in enumerate(array.addressable_shards):
                rows = shard.index[0].indices(array.shape[0])[:2]
                found[f"{step} {name} {rows[0]} {rows[1]}"] = np.asarray(shard.data)
    state = loader.get_state()
# Each process made its own rows and no others, and all of them together make one array.
sizes = [data.shape(step)[0] // jax.device_count() for step in range(first, first + count)]
assert asked[: count * jax.local_device_count()] == np.repeat(sizes, jax.local_device_count()).tolist(), (asked, sizes)
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(batch["targets"])
assert int(total) == data.batch(first + count - 1)["targets"].sum()
np.savez(f"{out}/{jax.process_index()}.npz", state=json.dumps(state), processes=jax.process_count(), **found)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name, count, longest in (("a", 40, 90), ("b", 25, 200), ("c", 9, 30)):
        rng = np.random.default_rng(count)
        texts = {f"{name}/{i}": f"{name}{i} " * int(rng.integers(1, longest)) for i in range(count)}
        write_store(folder / name, texts, ByteTokenizer())
    return folder


def run(folder, out, processes, count, python_env, state=None):
    """Take steps in real processes; gives their arrays by step, put together, and the state that all of them have."""
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **python_env,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "STYRAX_COORDINATOR": f"127.0.0.1:{port}",
        "STYRAX_NUM_PROCESSES": str(processes),
    }
    code = textwrap.dedent(inspect.getsource(make)) + WORKER
    arguments = [str(folder), str(out), "-" if state is None else json.dumps(state), str(count)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**environment, "STYRAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        for worker in workers:
            _, err = worker.communicate(timeout=240)
            assert worker.returncode == 0, err
    finally:
        for worker in workers:
            worker.kill()
    states, parts = set(), {}
    for number in range(processes):
        with np.load(out / f"{number}.npz") as found:
            states.add(str(found["state"]))
            assert found["processes"] == processes
            for key in sorted(set(found) - {"state", "processes"}):
                step, name, begin, end = key.split()
                parts.setdefault((int(step), name), []).append((int(begin), int(end), found[key]))
    assert len(states) == 1, "the processes' states differ"
    steps = {}
    for (step, name), pieces in parts.items():
        pieces.sort(key=lambda piece: piece[:2])
        assert [piece[0] for piece in pieces] == [0, *[piece[1] for piece in pieces[:-1]]]
        assert len(pieces) == DEVICES * processes
        steps.setdefault(step, {})[name] = np.concatenate([piece[2] for piece in pieces])
    return steps, json.loads(states.pop())


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_two_processes_make_the_batches_of_one(folder, tmp_path, python_env):
    data = make(folder)
    steps, state = run(folder, tmp_path / "2", 2, 10, python_env)
    assert sorted(steps) == list(range(10))
    assert len({batch["tokens"].shape for batch in steps.values()}) == 4
    for step, batch in steps.items():
        same(batch, data.batch(step))
    assert state == data.loader(step=10).get_state()
    with data.loader() as loader:
        loader.set_state(state)
        same(next(loader), data.batch(10))


@pytest.mark.slow
def test_four_processes_then_two_then_one_see_the_uninterrupted_sequence(folder, tmp_path, python_env):
    data, steps, state = make(folder), {}, None
    for processes, count in ((4, 7), (2, 4), (1, 3)):
        more, state = run(folder, tmp_path / str(processes), processes, count, python_env, state)
        assert not set(more) & set(steps)
        steps |= more
    assert sorted(steps) == list(range(14))
    for step, batch in steps.items():
        same(batch, data.batch(step))


class Host:
    """One of several hosts: the loader's source, cut to the host's rows."""

    def __init__(self, data, cuts, number):
        self._data, self._cuts, self._number = data, cuts, number
        self.fingerprint, self.settings, self.num_steps = data.fingerprint, data.settings, data.num_steps
        self.differences = data.differences

    def batch(self, step, rows=None):
        edges = [0, *sorted(cut % (self._data.shape(step)[0] + 1) for cut in self._cuts), self._data.shape(step)[0]]
        return self._data.batch(step, slice(*edges[self._number : self._number + 2]))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 3),
    pack=st.sampled_from(["concat", "best_fit", "none"]),
    sizes=st.sampled_from([8, [(0, 4), (3, 8), (9, 16)]]),
    widths=st.sampled_from([32, [(0, 16), (4, 32)], [(0, 8), (2, 24), (5, 20)]]),
    weights=st.sampled_from([{"a": 1, "b": 1}, [(0, {"a": 0.9, "b": 0.1}), (6, {"b": 0.2, "c": 0.8})]]),
    interpolate=st.sampled_from(["hold", "linear"]),
    start=st.integers(0, 30),
    counts=st.tuples(*[st.integers(0, 3)] * 3),
    cuts=st.tuples(*[st.lists(st.integers(0, 1000), min_size=hosts - 1, max_size=hosts - 1) for hosts in (8, 3, 1)]),
    prefetch=st.integers(0, 3),
)
def test_eight_hosts_then_three_then_one_see_the_uninterrupted_sequence(
    folder, seed, pack, sizes, widths, weights, interpolate, start, counts, cuts, prefetch
):
    stores = {name: f"{folder}/{name}" for name in ("a", "b", "c")}

    def data():
        mixture = Mixture(stores, weights, interpolate=interpolate)
        return LMData(mixture, seed=seed, pack=pack, batch_size=sizes, seq_len=widths, held_out=0.1)

    reference = data()
    state, step = reference.loader(step=start).get_state(), start
    for count, edges in zip(counts, cuts, strict=True):
        fresh = data()
        loaders = [Loader(Host(fresh, edges, number), prefetch=prefetch) for number in range(len(edges) + 1)]
        for loader in loaders:
            loader.set_state(json.loads(json.dumps(state)))
        for _ in range(count):
            parts = [next(loader) for loader in loaders]
            same({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, reference.batch(step))
            step += 1
        states = [json.dumps(loader.get_state()) for loader in loaders]
        assert len(set(states)) == 1
        state = json.loads(states[0])
        assert state["step"] == step
        for loader in loaders:
            loader.close()


FLAT = """
    import gc, sys, threading
    import numpy as np, jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    from styrax.core.mesh import MeshConfig

    folder = sys.argv[1]
    data = make(folder)

    def resident():
        gc.collect()
        return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

    def flat(name, use, rounds):
        use()
        found = []
        for _ in range(rounds):
            use()
            found.append((resident(), threading.active_count()))
        half = rounds // 2
        memory, threads = np.array(found).T
        print(name, np.round(memory, 1).tolist(), threads.tolist(), file=sys.stderr)
        # The second half against the first: growth goes on, what is made once does not.
        assert memory[half:].mean() - memory[:half].mean() < 4, (name, memory)
        assert threads[half:].max() <= threads[:half].max(), (name, threads)

    sharding = NamedSharding(MeshConfig(axes={"data": -1}).build(), P("data"))
    plain, sharded = data.loader(step=9), data.loader(step=9, sharding=sharding)

    def steps(loader, count):
        for _ in range(count):
            next(loader)

    flat("numpy", lambda: steps(plain, 1000), 10)
    flat("sharded", lambda: steps(sharded, 100), 10)

    def again(count):
        for _ in range(count):
            for batch in data.held_out():
                pass
            loader = data.loader(prefetch=3)
            next(loader)
            if count % 2:
                loader.close()

    flat("made again", lambda: again(10), 10)
    flat("all anew", lambda: next(make(folder).loader()), 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_and_threads_stay_flat(folder, python_env):
    code = textwrap.dedent(inspect.getsource(make)) + textwrap.dedent(FLAT)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
