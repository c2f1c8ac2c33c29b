"""A loss that is suddenly far too large: found, undone, its data left out, and just so in a run that was stopped."""

import random
import statistics

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_toys import MemoryCheckpointer, MemoryTracker, Toy, ToyData, equal, numbers, toy_batch

from styrax.core import UserError
from styrax.train import Term, fit
from styrax.train.config import Spike
from styrax.train.hooks import Hook
from styrax.train.spikes import SpikeWatch

BACK = Spike(action="rollback", window=4, sigmas=20.0)


class BadData(ToyData):
    """Batches by step, some of which make the loss jump, to infinity if asked."""

    def __init__(self, bad=(), factor=1e3):
        super().__init__()
        self.bad, self.factor, self.drawn = bad, factor, []

    def __next__(self):
        self.drawn.append(self.step)
        batch = super().__next__()
        if self.step - 1 in self.bad:
            batch["y"] = (batch["y"] * self.factor).astype(np.float32)
        return batch


def loss(model, batch, rngs):
    error = model(batch["x"], rngs=rngs) - batch["y"]
    return {"loss": Term(jnp.sum(error**2), jnp.asarray(error.size, float))}


TX = optax.adam(0.01)


def run(steps, data, **options):
    options = {"save_every": 2, "spike": BACK, "seed": 3} | options
    return fit(lambda rngs: Toy(rngs), TX, data, loss, steps=steps, **options)


class Told(Hook):
    def __init__(self):
        self.rollbacks = []

    def on_rollback(self, step, to, loss):
        assert loss > 100 or np.isnan(loss)
        self.rollbacks.append((step, to))


@pytest.mark.parametrize(
    ("bad", "factor", "every", "gone"),
    [
        (7, 1e3, 2, (6, 8)),  # the loss of step 8 is known before the checkpoint that is due then
        (5, np.nan, 4, (4, 7)),  # that of step 6 is known when step 7 was begun
        (6, 1e3, 4, (4, 8)),  # that of step 7 when step 8 was, at which a checkpoint is due
    ],
)
def test_the_run_is_that_without_the_data_since_the_checkpoint(bad, factor, every, gone):
    tracker, checkpointer = MemoryTracker(), MemoryCheckpointer()
    told = Told()
    result = run(10, BadData({bad}, factor), tracker=tracker, checkpointer=checkpointer, save_every=every, hooks=[told])
    assert told.rollbacks == [(bad + 1, gone[0])]

    class Without(ToyData):
        def __next__(self):
            self.step += 1
            return toy_batch(self.step - 1 + (gone[1] - gone[0] if self.step > gone[0] else 0))

    whole = MemoryTracker()
    expected = run(10, Without(), tracker=whole, save_every=None, spike=None)
    assert result.skipped == (gone,)
    equal(numbers(result.state), numbers(expected.state))
    assert tracker.lines == whole.lines
    assert checkpointer.latest() == 10


def test_a_spike_between_checkpoints_is_never_saved():
    checkpointer = MemoryCheckpointer()
    run(8, BadData({3}), checkpointer=checkpointer)  # step 4, at whose end a checkpoint is due
    for step, items in checkpointer.saved.items():
        assert step in (2, 4, 6, 8)
        assert max(items["run"]["loop"]["watch"]["losses"]) < 100
        assert np.abs(items["params"]["outer"]["bias"]).max() < 10


@pytest.mark.parametrize("stop", [4, 6, 7, 8, 10])
def test_stopped_anywhere_it_is_the_same_run(stop):
    whole, straight = MemoryTracker(), BadData({5, 6})
    expected = run(9, straight, tracker=whole, checkpointer=MemoryCheckpointer())

    class Stop(Exception):
        pass

    class Killed(BadData):
        """As if the process was killed when a batch is drawn."""

        def __next__(self):
            if len(self.drawn) == stop:
                raise Stop
            return super().__next__()

    checkpointer, tracker = MemoryCheckpointer(), MemoryTracker()
    with pytest.raises(Stop):
        run(9, Killed({5, 6}), tracker=tracker, checkpointer=checkpointer)
    result = run(9, BadData({5, 6}), tracker=tracker, checkpointer=checkpointer)
    equal(numbers(result.state), numbers(expected.state))
    assert tracker.lines == whole.lines
    assert result.skipped == expected.skipped


def test_without_a_checkpoint_it_begins_anew():
    told = Told()
    result = run(5, iter(BadData({4})), checkpointer=None, hooks=[told])
    assert told.rollbacks == [(5, 0)]
    assert result.step == 5 and result.skipped == ((0, 5),)
    assert result.metrics["loss"] < 10


def test_each_rollback_leaves_out_its_own_data():
    told, data = Told(), BadData({5, 11})
    result = run(12, data, checkpointer=MemoryCheckpointer(), hooks=[told])
    assert told.rollbacks == [(6, 4), (10, 8)]
    assert result.skipped == ((4, 6), (10, 12))
    assert data.drawn == list(range(16))


def test_spikes_that_do_not_end_stop_the_run():
    with pytest.raises(UserError, match=r"spike 4 times since step 4.*train.spike.limit = 3"):
        run(20, BadData(range(5, 100)), checkpointer=MemoryCheckpointer())


def test_a_step_that_the_optimizer_skipped_is_none():
    tx = optax.apply_if_finite(optax.sgd(0.01), 1000)
    result = fit(
        lambda rngs: Toy(rngs), tx, BadData({4}, np.nan), loss, steps=6, spike=BACK,
        metrics=lambda state: {"skipped": state.total_notfinite},
    )  # fmt: skip
    assert result.skipped == () and result.metrics["skipped"] == 1


def test_no_policy_leaves_the_run_as_it_was():
    tracker = MemoryTracker()
    run(6, BadData({4}), spike=Spike(), tracker=tracker, checkpointer=MemoryCheckpointer())
    assert tracker.lines[5]["loss"] > 1e4


def test_the_threshold_is_that_of_the_definition():
    rng = random.Random(0)
    losses = [rng.gauss(3.0, 0.1) for _ in range(64)]
    middle = statistics.median(losses)
    limit = middle + 6 * 1.4826 * statistics.median(abs(x - middle) for x in losses)
    for value, far in ((limit - 1e-9, False), (limit + 1e-9, True)):
        watch = SpikeWatch(Spike(action="rollback", window=64, sigmas=6.0))
        assert not any(watch.judge(x) for x in losses)
        again = SpikeWatch(watch.config)
        again.set_state(watch.get_state())
        assert watch.judge(value) == again.judge(value) == far
