"""Which checkpoints stay, for any history; and what the manifest says of each."""

import math
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from styrax.checkpoint import Best, CheckpointConfig, CheckpointError, Store
from styrax.checkpoint import store as module
from styrax.checkpoint.retention import Kept, expired

kept = st.builds(
    Kept,
    temporary=st.booleans(),
    metrics=st.dictionaries(st.sampled_from(["loss", "score"]), st.floats() | st.integers(-2, 2).map(float)),
)
histories = st.dictionaries(st.integers(0, 40), kept, min_size=1, max_size=12)


@hypothesis.given(
    histories,
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none()
    | st.builds(
        Best, metric=st.sampled_from(["loss", "score"]), mode=st.sampled_from(["min", "max"]), count=st.integers(1, 3)
    ),
    st.data(),
)
@hypothesis.settings(max_examples=150, deadline=None, database=None)
def test_what_stays(steps, keep_last, keep_every, best, data):
    newest = data.draw(st.sampled_from(sorted(steps)))
    spared = data.draw(st.sets(st.sampled_from(sorted(steps))))
    gone = expired(steps, keep_last=keep_last, keep_every=keep_every, newest=newest, best=best, spared=spared)
    left = set(steps) - set(gone)
    assert len(set(gone)) == len(gone) and set(gone) <= set(steps)
    assert newest in left and spared <= left
    good = {step: facts for step, facts in steps.items() if step not in spared}
    lasting = sorted(step for step, facts in good.items() if not facts.temporary)
    wanted = set(lasting[len(lasting) - keep_last if len(lasting) > keep_last else 0 :]) | {newest}
    if keep_every:
        wanted |= {step for step in lasting if step % keep_every == 0}
    if best:
        # Each chosen one beats, or is newer than as good, every one that is not.
        found = {step: facts.metrics[best.metric] for step, facts in good.items() if best.metric in facts.metrics}
        found = {step: value for step, value in found.items() if not math.isnan(value)}
        better = [(value if best.mode == "min" else -value, -step) for step, value in found.items()]
        wanted |= {-step for _, step in sorted(better)[: best.count]}
    assert left == wanted | (spared & set(steps))


def items(step):
    return {"params": {"w": np.full(4, step)}}


def saved(directory):
    return Store(directory, read_only=True).steps()


def test_best_and_metrics(tmp_path):
    losses = {1: 0.5, 2: np.float32(0.1), 3: math.nan, 4: 0.4, 5: np.array(0.3), 6: 1}
    with CheckpointConfig(keep_last=1, keep_best=Best(count=2)).build(tmp_path) as store:
        for step, loss in losses.items():
            store.save(step, items(step), metrics={"loss": loss, "tokens": 10 * step})
        store.wait()
        assert store.steps() == [2, 5, 6]
        assert store.manifest(2).metrics == {"loss": float(np.float32(0.1)), "tokens": 20.0}
        assert store.resume(params=None).metrics == {"loss": 1.0, "tokens": 60.0}
        for wrong in ("high", None, [1.0, 2.0], np.ones(2)):
            with pytest.raises(CheckpointError, match=r"metrics: 'loss' is .*expected a number"):
                store.save(7, items(7), metrics={"loss": wrong})
    # The values are read again by the next run.
    with CheckpointConfig(keep_last=1, keep_best=Best(count=2)).build(tmp_path) as store:
        store.save(7, items(7))
    assert saved(tmp_path) == [2, 5, 7]
    with CheckpointConfig(keep_last=1, keep_best=Best(metric="tokens", mode="max")).build(tmp_path) as store:
        store.save(8, items(8))
    assert saved(tmp_path) == [5, 8]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -0.0, 10**400], ids=str)
def test_odd_metrics_come_back(tmp_path, value):
    with CheckpointConfig().build(tmp_path) as store:
        if value == 10**400:
            with pytest.raises(CheckpointError, match="metrics: 'x' is int"):
                store.save(1, items(1), metrics={"x": value})
            return
        store.save(1, items(1), metrics={"x": value})
        store.wait()
        found = store.manifest(1).metrics["x"]
    assert repr(found) == repr(value)


@pytest.mark.parametrize("metrics", [3, [("loss", 1.0)], {1: 2.0}, {None: 1.0}], ids=repr)
def test_metrics_that_are_none(tmp_path, metrics):
    with CheckpointConfig().build(tmp_path) as store, pytest.raises(CheckpointError, match="metrics: "):
        store.save(1, items(1), metrics=metrics)


def test_temporary_ones_go_with_the_next(tmp_path):
    with CheckpointConfig(keep_last=2, keep_every=10).build(tmp_path) as store:
        for step, temporary in ((5, False), (10, True), (12, False), (14, True), (15, True), (18, False), (20, True)):
            store.save(step, items(step), temporary=temporary)
            store.wait()
            assert store.manifest(step).temporary is temporary
            assert store.latest() == step
        assert store.steps() == [12, 18, 20]
        store.save(20, items(20))
        store.wait()
        assert store.steps() == [18, 20] and not store.manifest(20).temporary


def test_due_by_steps_and_by_time(tmp_path, monkeypatch):
    now = [0.0]

    class Clock:
        def __getattr__(self, name):
            return getattr(time, name)

        def monotonic(self):
            return now[0]

    monkeypatch.setattr(module, "time", Clock())
    with CheckpointConfig(every=10, minutes=5).build(tmp_path) as store:
        assert [store.due(step) for step in (0, 1, 9, 10, 11, 20)] == [None, None, None, "lasting", None, "lasting"]
        now[0] = 299.0
        assert store.due(11) is None
        now[0] = 300.0
        assert store.due(11) == "temporary" and store.due(20) == "lasting"
        store.save(11, items(11), temporary=True)
        assert store.due(12) is None
        now[0] = 599.0
        assert store.due(12) is None
        now[0] = 601.0
        assert store.due(12) == "temporary"
    with CheckpointConfig(every=10).build(tmp_path) as store:
        now[0] = 1e9
        assert store.due(12) is None and store.due(20) == "lasting"
