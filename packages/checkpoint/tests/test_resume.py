"""A run goes on where it was, with all that it is, in one call; or nothing of it is changed."""

import base64
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store

STEPS, CUT = 6, 3


class Data:
    """An endless iterator whose state is plain JSON, or bytes."""

    def __init__(self, seed=0, raw=False):
        self.seed, self.raw, self.position, self.set = seed, raw, 0, 0

    def __next__(self):
        self.position += 1
        return np.random.default_rng([self.seed, self.position]).normal(size=(4, 3)).astype(np.float32)

    def get_state(self):
        state = {"position": self.position, "seed": self.seed}
        return base64.b64encode(json.dumps(state).encode()) if self.raw else state

    def set_state(self, state):
        state = json.loads(base64.b64decode(state)) if self.raw else state
        self.position, self.seed, self.set = state["position"], state["seed"], self.set + 1


@jax.jit
def step(params, moments, key, batch):
    def loss(params):
        keep = jax.random.bernoulli(key, 0.8, batch.shape)
        return jnp.mean((jnp.tanh(batch * keep @ params["w"]) @ params["v"] + params["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value


class Run:
    """A run on plain trees."""

    def __init__(self, seed=0, raw=False):
        draw = np.random.default_rng(seed)
        self.params = {name: jnp.asarray(draw.normal(size=size), jnp.float32) for name, size in SIZES.items()}
        self.moments = jax.tree.map(jnp.zeros_like, self.params)
        self.key, self.data, self.done = jax.random.key(seed), Data(seed, raw), 0

    def go(self, steps):
        losses = []
        for _ in range(steps):
            self.key, now = jax.random.split(self.key)
            self.params, self.moments, loss = step(self.params, self.moments, now, next(self.data))
            losses.append(np.asarray(loss).tobytes())
            self.done += 1
        return losses

    def items(self):
        state = {"params": self.params, "opt_state": self.moments, "rng": self.key, "data": self.data}
        return {**state, "run": {"done": self.done}}

    def resume(self, store):
        found = store.resume(params=self.params, opt_state=self.moments, rng=self.key, data=self.data)
        self.params, self.moments, self.key = found["params"], found["opt_state"], found["rng"]
        self.done = found["run"]["done"]
        assert found["data"] is self.data
        return found


SIZES = {"w": (3, 5), "v": (5, 2), "b": (2,)}
WAYS = {"packed": {"pack_below": 2**30}, "orbax": {"pack_below": 1}}


@pytest.mark.parametrize("raw", [False, True], ids=["json", "bytes"])
@pytest.mark.parametrize("way", WAYS)
def test_plain_trees(way, raw, tmp_path):
    run = Run(raw=raw)
    with CheckpointConfig(**WAYS[way]).build(tmp_path) as store:
        run.go(CUT)
        store.save(CUT, run.items())
        after = run.go(STEPS - CUT)
    with CheckpointConfig(**WAYS[way]).build(tmp_path) as store:
        again = Run(seed=1, raw=raw)
        found = again.resume(store)
        assert (found.step, again.done, found.kept, found.left, found.passed_over) == (CUT, CUT, (), (), {})
        assert again.go(STEPS - CUT) == after
        assert np.asarray(again.params["w"]).tobytes() == np.asarray(run.params["w"]).tobytes()


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_resume import CUT, STEPS, Run
from styrax.checkpoint import Store

run = Run(seed=7)
with Store(sys.argv[2]) as store:
    run.resume(store)
print([loss.hex() for loss in run.go(STEPS - CUT)])
"""


def test_a_fresh_process(tmp_path, run_python):
    from pathlib import Path

    run = Run()
    with Store(tmp_path / "run") as store:
        run.go(CUT)
        store.save(CUT, run.items())
    done = run_python(SCRIPT, Path(__file__).parent, tmp_path / "run")
    assert done.stdout == f"{[loss.hex() for loss in run.go(STEPS - CUT)]}\n", done.stderr[-2000:]


# With flax


def network(nnx, seed):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(3, 6, use_bias=False, rngs=rngs)
            self.inner = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)])
            self.again = nnx.List([self.inner[0]])
            self.shared = self.inner[0].kernel
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            x = self.inner[1](jnp.tanh(self.inner[0](self.embed(x))))
            return self.dropout(self.again[0](x)) @ self.shared[...]

    return Tied(nnx.Rngs(params=seed, dropout=seed + 1))


@pytest.fixture
def tools():
    return pytest.importorskip("flax.nnx"), pytest.importorskip("optax")


def trainer(tools, seed):
    nnx, optax = tools
    model = network(nnx, seed)
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def go(data, steps):
        return [np.asarray(step(model, optimizer, next(data))).tobytes() for _ in range(steps)]

    return model, optimizer, go


def bits(nnx, *modules):
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()
        for module in modules
        for leaf in jax.tree.leaves(nnx.state(module))
    ]


@pytest.mark.parametrize("way", WAYS)
def test_nnx(way, tools, tmp_path):
    nnx, _ = tools
    model, optimizer, go = trainer(tools, 0)
    data = Data()
    with CheckpointConfig(**WAYS[way]).build(tmp_path) as store:
        go(data, CUT)
        store.save(CUT, {"model": model, "optimizer": optimizer, "data": data, "run": {"note": "x"}})
        store.wait()
        paths = [leaf.path for leaf in store.manifest(CUT).items["model"].leaves]
        assert sorted(path for path in paths if path.endswith("kernel")) == ["again/0/kernel", "embed/kernel"]
        after = go(data, STEPS - CUT)
    model_, optimizer_, go_ = trainer(tools, 5)
    go_(Data(3), 1)
    again = Data(9)
    with CheckpointConfig(**WAYS[way]).build(tmp_path) as store:
        found = store.resume(model=model_, optimizer=optimizer_, data=again)
        assert found["model"] is model_ and found["optimizer"] is optimizer_ and found["run"] == {"note": "x"}
        assert model_.again[0] is model_.inner[0] and model_.shared is model_.inner[0].kernel
        # What restore gives is another module, and the one handed over stays.
        before = bits(nnx, model)
        other = store.restore(CUT, {"model": model})["model"]
        assert other is not model and bits(nnx, model) == before != bits(nnx, other)
        assert other.shared is other.inner[0].kernel
    assert go_(again, STEPS - CUT) == after
    assert bits(nnx, model_, optimizer_) == bits(nnx, model, optimizer)


def test_random_streams_and_metrics_are_changed_in_place(tools, tmp_path):
    nnx, _ = tools
    rngs, loss = nnx.Rngs(params=1, dropout=2), nnx.MultiMetric(loss=nnx.metrics.Average())
    rngs.dropout()
    loss.update(values=jnp.array([1.0, 2.0]))
    with Store(tmp_path) as store:
        store.save(1, {"rngs": rngs, "loss": loss})
        expected, mean = jax.random.key_data(rngs.dropout()), loss.compute()["loss"]
        loss.update(values=jnp.array([9.0]))
        again = nnx.Rngs(params=5, dropout=6)
        for number in range(2):
            found = store.resume(rngs=again, loss=loss)
            assert found["rngs"] is again and found["loss"] is loss
            np.testing.assert_array_equal(jax.random.key_data(again.dropout()), expected)
            assert loss.compute()["loss"] == mean, number


def test_an_abstract_module(tools, tmp_path):
    nnx, _ = tools
    model = network(nnx, 0)
    with Store(tmp_path) as store:
        store.save(1, {"model": model})
        abstract = nnx.eval_shape(lambda: network(nnx, 1))
        got = store.resume(model=abstract)["model"]
        assert got is abstract and bits(nnx, got) == bits(nnx, model)


# Nothing is changed when something fails


def wreck(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def packed(directory, step):
    return directory / f"{step:08d}" / "aux" / "leaves.bin"


def test_a_mismatch_changes_nothing(tools, tmp_path):
    nnx, _ = tools
    model, optimizer, go = trainer(tools, 0)
    data = Data()
    go(data, 1)
    with Store(tmp_path) as store:
        store.save(1, {"model": model, "optimizer": optimizer, "data": data, "extra": {"x": np.ones(2)}})
        go(data, 1)
        before, position = bits(nnx, model, optimizer), data.position
        for items, text in (
            ({"model": model, "optimizer": optimizer, "data": data}, "items that were not asked for: 'extra'"),
            ({"model": model, "optimizer": optimizer, "data": data, "extra": {"x": np.ones(3)}}, "extra/x: shape"),
            ({"model": model, "optimizer": optimizer, "data": data, "extra": None, "more": 1}, "item 'more'"),
            ({"model": model, "optimizer": data, "data": data, "extra": None}, "optimizer"),
            ({"model": data, "optimizer": optimizer, "data": data, "extra": None}, "model"),
            ({"model": model, "optimizer": optimizer, "data": model, "extra": None}, "data"),
        ):
            with pytest.raises(CheckpointError, match=text):
                store.resume(items)
            assert bits(nnx, model, optimizer) == before and data.position == position and data.set == 0


@pytest.mark.parametrize("verify", ["checksum", "size"])
def test_damage_changes_nothing_and_the_next_older_one_is_taken(verify, tools, tmp_path):
    nnx, _ = tools
    model, optimizer, go = trainer(tools, 0)
    data, kept = Data(), {}
    items = {"model": model, "optimizer": optimizer, "data": data}
    with CheckpointConfig(verify=verify).build(tmp_path) as store:
        for step in (1, 2, 3):
            go(data, 1)
            store.save(step, items)
            store.wait()
            kept[step] = bits(nnx, model, optimizer)
        wreck(packed(tmp_path, 3))
        go(data, 4)
        with pytest.warns(UserWarning, match=r"step 3 .* is damaged"):
            found = store.resume(items)
        assert found.step == 2 and list(found.passed_over) == [3] and "leaves.bin" in found.passed_over[3][0]
        assert list(store.skipped) == [3]
        assert bits(nnx, model, optimizer) == kept[2] and (data.position, data.set) == (2, 1)
        for step in (1, 2):
            wreck(packed(tmp_path, step))
        go(data, 1)
        before, position = bits(nnx, model, optimizer), data.position
        with (
            pytest.raises(CheckpointError, match=r"all 3 checkpoints in .* are damaged"),
            pytest.warns(UserWarning, match="damaged"),
        ):
            store.resume(items)
        with pytest.raises(CheckpointError, match=r"step 3 .* is damaged"):
            store.restore(3, items)
        assert bits(nnx, model, optimizer) == before and (data.position, data.set) == (position, 1)
    with (
        CheckpointConfig(verify=verify, on_corrupt="error").build(tmp_path) as store,
        pytest.raises(CheckpointError, match=r"step 3 .* is damaged"),
    ):
        store.resume(items)


@pytest.mark.parametrize("name", ["MANIFEST.json", "aux/data.json", "aux/run.json"])
def test_whatever_is_damaged(name, tmp_path):
    run = Run()
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, run.items())
            run.go(1)
        store.wait()
        wreck(tmp_path / "00000002" / name)
        with pytest.warns(UserWarning, match="step 2 .* is damaged"):
            found = run.resume(store)
        assert found.step == 1 and run.data.position == 0
        (tmp_path / "00000002" / name).unlink()
        with pytest.warns(UserWarning, match="step 2 .* is damaged"):
            assert run.resume(store).step == 1


# What is asked for


def test_items_that_are_not_asked_for(tmp_path):
    run = Run()
    run.go(1)
    with Store(tmp_path) as store:
        store.save(1, run.items())
        with pytest.raises(CheckpointError, match="not asked for: 'params', 'opt_state', 'data'; resume with them"):
            store.resume(rng=run.key)
        for drop in ("drop", {"params/**": "drop", "opt_state": "drop", "data": "drop"}):
            found = store.resume(rng=run.key, on_extra=drop)
            assert list(found.items) == ["run", "rng"] or set(found.items) == {"run", "rng"}
            assert found["run"] == {"done": 1}
            assert {path.split("/")[0] for path in found.left} == {"params", "opt_state", "data"}
        with pytest.raises(CheckpointError, match="not asked for: 'opt_state', 'data'"):
            store.resume(rng=run.key, on_extra={"params": "drop"})
        with pytest.raises(CheckpointError, match=r"item 'prams': not in the checkpoint.*'params'"):
            store.resume(prams=run.params, on_extra="drop")
        # Weights without the rest, into a run of another seed.
        other = Run(seed=4)
        found = store.resume(params=other.params, only="params/**", on_extra="drop")
        assert np.asarray(found["params"]["w"]).tobytes() == np.asarray(run.params["w"]).tobytes()


@pytest.mark.parametrize("read_only", [False, True])
def test_nothing_to_resume_from(read_only, tmp_path):
    run = Run()
    with Store(tmp_path, read_only=read_only) as store:
        assert store.resume(run.items()) is None
        assert store.resume() is None
        (tmp_path / "notes").mkdir()
        assert store.resume(params=run.params) is None
    assert run.data.set == 0


def test_a_run_on_a_read_only_store(tmp_path):
    run = Run()
    with Store(tmp_path) as store:
        store.save(1, run.items(), metrics={"loss": 2})
    found = Run(seed=3).resume(Store(tmp_path, read_only=True))
    assert found.step == 1 and found.metrics == {"loss": 2.0}


def test_an_iterator_of_grain(tmp_path):
    grain = pytest.importorskip("grain.python")
    if not hasattr(grain, "MapDataset"):
        pytest.skip("another grain")

    def dataset():
        return grain.MapDataset.range(100).seed(3).shuffle().map(lambda x: x * 2).to_iter_dataset().batch(4)

    loader = grain.DataLoader(
        data_source=range(50), sampler=grain.IndexSampler(50, grain.ShardOptions(0, 1), True, 2, 7), worker_count=0
    )
    for number, make in enumerate((lambda: iter(dataset()), lambda: iter(loader))):
        data = make()
        with Store(tmp_path / str(number)) as store:
            head = [next(data) for _ in range(5)]
            store.save(5, {"data": data})
            rest = [next(data) for _ in range(5)]
            again = make()
            assert store.resume(data=again)["data"] is again
            np.testing.assert_array_equal([next(again) for _ in range(5)], rest)
            assert not np.array_equal(head, rest)
