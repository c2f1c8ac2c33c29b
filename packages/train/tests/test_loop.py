import itertools
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_toys import (
    TX,
    MemoryCheckpointer,
    MemoryTracker,
    Toy,
    ToyData,
    equal,
    numbers,
    toy_batch,
    toy_loss,
    train,
)

from styrax.core import UserError
from styrax.train import Term, fit
from styrax.train.hooks import Hook, StopFile


def test_resumed_equals_uninterrupted_bit_for_bit():
    whole = MemoryTracker()
    straight = train(9, tracker=whole)
    checkpointer, tracker = MemoryCheckpointer(), MemoryTracker()
    for stop in (2, 3, 7, 9):
        result = train(stop, checkpointer=checkpointer, tracker=tracker, save_every=2)
    assert result.step == 9
    equal(numbers(result.state), numbers(straight.state))
    assert tracker.lines == whole.lines
    assert list(tracker.lines) == list(range(1, 10))


def test_lines_after_the_checkpoint_are_dropped_and_made_again():
    checkpointer, tracker = MemoryCheckpointer(), MemoryTracker()
    train(4, checkpointer=checkpointer, tracker=tracker, save_every=2)
    wanted = dict(tracker.lines)
    del checkpointer.saved[4]  # as if killed after step 4 was logged and before it was saved
    train(4, checkpointer=checkpointer, tracker=tracker, save_every=2)
    assert tracker.lines == wanted


def test_metrics_are_durable_before_the_checkpoint_that_follows_them():
    checkpointer = MemoryCheckpointer()
    train(4, checkpointer=checkpointer, tracker=MemoryTracker(checkpointer.order), save_every=2)
    assert checkpointer.order[:4] == [("flush", 2), ("save", 2), ("flush", 4), ("save", 4)]


def test_a_finished_run_does_nothing_and_more_steps_continue():
    checkpointer = MemoryCheckpointer()
    train(3, checkpointer=checkpointer)
    again = train(3, checkpointer=checkpointer)
    assert again.step == 3
    assert checkpointer.order == [("save", 3)]
    assert train(5, checkpointer=checkpointer).step == 5


def test_a_module_is_left_as_it_was_and_the_result_is_a_module():
    model = Toy(nnx.Rngs(0))
    before = np.asarray(model.inner.kernel[...])
    result = fit(model, TX, ToyData(), toy_loss, steps=2)
    np.testing.assert_array_equal(before, np.asarray(model.inner.kernel[...]))
    assert result.model(jnp.ones((1, 4))).shape == (1, 3)
    assert not np.array_equal(before, np.asarray(result.model.inner.kernel[...]))


def test_the_step_is_compiled_once_over_a_resume():
    class Count(Hook):
        compiles = 0

        def on_compile(self, seconds):
            Count.compiles += seconds is not None

    checkpointer = MemoryCheckpointer()
    train(2, checkpointer=checkpointer)
    traces = []

    def traced(model, batch, rngs):
        traces.append(1)
        return toy_loss(model, batch, rngs)

    fit(
        lambda rngs: Toy(rngs),
        TX,
        ToyData(),
        traced,
        steps=6,
        seed=3,
        checkpointer=checkpointer,
        hooks=[Count()],
    )
    assert Count.compiles == 1
    assert len(traces) == 1


def test_held_out_is_evaluated_when_due_and_at_the_end():
    def loss(model, batch, rngs):
        return {"loss": toy_loss(model, batch, rngs)["fit"]}

    tracker = MemoryTracker()
    held = [toy_batch(100), toy_batch(101)]
    result = fit(lambda r: Toy(r), TX, ToyData(), loss, steps=5, held_out=held, eval_every=2, tracker=tracker)
    assert [s for s, m in tracker.lines.items() if "held_out_loss" in m] == [2, 4, 5]
    model = result.model
    error = sum(float(jnp.sum(jnp.sum((model(b["x"]) - b["y"]) ** 2, -1) * b["mask"])) for b in held)
    assert result.held_out.loss == pytest.approx(error / sum(b["mask"].sum() for b in held), rel=1e-5)
    assert result.held_out.bits_per_byte is None
    assert "held_out_bits_per_byte" not in tracker.lines[5]


def test_several_held_out_sets_have_names():
    def loss(model, batch, rngs):
        return {"loss": toy_loss(model, batch, rngs)["fit"]}

    class Told(Hook):
        names = ()

        def on_evaluate(self, step, result, seconds):
            Told.names += ((step, result.name),)

    def run(held):
        tracker = MemoryTracker()
        options = {"eval_every": 2, "tracker": tracker, "hooks": [Told()]}
        return fit(lambda r: Toy(r), TX, ToyData(), loss, steps=3, held_out=held, **options), tracker.lines

    both, lines = run({"code": [toy_batch(100)], "prose": [toy_batch(101), toy_batch(102)]})
    alone, single = run([toy_batch(101), toy_batch(102)])
    assert Told.names == ((2, "code"), (2, "prose"), (3, "code"), (3, "prose"), (2, ""), (3, ""))
    assert both.held_out["prose"].loss == alone.held_out.loss == lines[3]["held_out_loss/prose"]
    assert lines[3]["held_out_loss/code"] == both.held_out["code"].loss != alone.held_out.loss
    assert "held_out_loss" not in lines[3] and "held_out_loss" in single[3]
    for wrong in ({"code": iter([])}, {1: [toy_batch(0)]}, {"code": toy_batch(0)}):
        with pytest.raises(UserError, match=r"held_out.*expected a list of batches"):
            run(wrong)


def test_a_hook_is_told_as_often_as_it_asks():
    class Some(Hook):
        every = 3
        steps = ()

        def on_step(self, step, metrics):
            Some.steps += (step,)

    train(7, hooks=[Some()])
    assert Some.steps == (3, 6, 7)


class Enough(Hook):
    def __init__(self, at):
        self.at = at

    def on_step(self, step, metrics):
        return "enough" if step >= self.at else None


def test_a_wish_to_stop_ends_the_run_as_its_last_step_would():
    def loss(model, batch, rngs):
        return {"loss": toy_loss(model, batch, rngs)["fit"]}

    def run(steps, **options):
        tracker, checkpointer = MemoryTracker(), options.pop("checkpointer", MemoryCheckpointer())
        options |= {"tracker": tracker, "checkpointer": checkpointer, "held_out": [toy_batch(100)]}
        return fit(lambda r: Toy(r), TX, ToyData(), loss, steps=steps, **options), tracker, checkpointer

    result, tracker, checkpointer = run(20, hooks=[Enough(3)])
    assert (result.step, result.stopped, result.interrupted) == (4, "enough", None)  # told one step later
    assert tracker.lines[4]["held_out_loss"] == result.held_out.loss
    assert checkpointer.steps() == [4]
    more, _, _ = run(6, checkpointer=checkpointer)
    assert more.stopped is None
    whole, _, _ = run(6)
    equal(numbers(more.state), numbers(whole.state))
    assert run(3, hooks=[Enough(3)])[0].stopped is None  # it was the last step anyway


def test_patience_is_a_hook():
    class Patience(Hook):
        def on_evaluate(self, step, result, seconds):
            return "no better" if step == 4 else None

    def loss(model, batch, rngs):
        return {"loss": toy_loss(model, batch, rngs)["fit"]}

    result = fit(
        lambda r: Toy(r), TX, ToyData(), loss, steps=9, held_out=[toy_batch(1)], eval_every=2, hooks=[Patience()]
    )
    assert (result.step, result.stopped) == (4, "no better")


def test_a_file_stops_the_run(tmp_path):
    clock = iter([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    hook = StopFile(tmp_path / "STOP", clock=lambda: next(clock))
    (tmp_path / "STOP").touch()
    assert "STOP was found" in hook.on_step(1, {})
    assert hook.on_step(2, {}) is None  # it looks once a second
    assert hook.on_step(3, {})
    (tmp_path / "STOP").unlink()
    assert [hook.on_step(step, {}) for step in (4, 5)] == [None, None]


def test_samples_are_taken_on_the_way_and_change_nothing():
    taken = []

    def sample(result):
        taken.append((result.step, result.model(jnp.ones((1, 4))).shape))

    result = train(6, sample=sample, sample_every=2)
    assert taken == [(2, (1, 3)), (4, (1, 3))]
    equal(numbers(result.state), numbers(train(6).state))


def test_log_every_keeps_the_last_step():
    tracker = MemoryTracker()
    train(7, tracker=tracker, log_every=3)
    assert list(tracker.lines) == [3, 6, 7]


def test_data_that_ends_says_so():
    with pytest.raises(UserError, match="ended after 3 of 5 steps"):
        train(5, data=ToyData(length=3))


def test_a_ragged_batch_is_one_clear_error():
    batches = itertools.chain([toy_batch(0)], [toy_batch(1, rows=5)])
    with pytest.raises(UserError, match=r"batch 1 does not have the shapes.*\(5, 4\)"):
        train(2, data=batches)


class Growing(ToyData):
    """Twice as many rows from the third step on, as announced."""

    specs = tuple(
        {"x": ((rows, 4), np.float32), "y": ((rows, 3), np.float32), "mask": ((rows,), np.float32)} for rows in (12, 24)
    )

    def __next__(self):
        self.step += 1
        return toy_batch(self.step - 1, rows=12 if self.step < 3 else 24)


def test_a_schedule_of_batches_compiles_each_shape_once():
    class Count(Hook):
        compiles = 0

        def on_compile(self, seconds):
            Count.compiles += seconds is not None

    checkpointer = MemoryCheckpointer()
    whole = train(6, data=Growing(), hooks=[Count()])
    assert Count.compiles == 2
    train(2, data=Growing(), checkpointer=checkpointer)
    resumed = train(6, data=Growing(), checkpointer=checkpointer)
    assert resumed.metrics == whole.metrics


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="accumulate=5 does not divide the batch of 12 rows"):
        train(1, accumulate=5)
    with pytest.raises(UserError, match="same leading axis"):
        train(1, data=iter([{"x": np.ones((2, 4)), "y": np.ones((3, 3))}]))


def test_data_without_state_cannot_be_saved():
    with pytest.raises(UserError, match=r"get_state\(\) and set_state\(\)"):
        train(1, data=(toy_batch(i) for i in range(9)), checkpointer=MemoryCheckpointer())


def test_a_loss_that_is_not_finite_stops_with_the_step():
    def explode(model, batch, rngs):
        total = jnp.sum(model(batch["x"])) * jnp.where(batch["x"][0, 0] == BAD, jnp.nan, 1.0)
        return {"loss": Term(total, jnp.ones(()))}

    BAD = toy_batch(2)["x"][0, 0]
    with pytest.raises(UserError, match="not finite since step 3"):
        fit(lambda rngs: Toy(rngs), TX, ToyData(), explode, steps=6)


def test_an_optimizer_that_skips_may_skip_a_few_and_not_for_ever():
    def explode(model, batch, rngs):
        return {"loss": Term(jnp.sum(model(batch["x"])) * jnp.nan, jnp.ones(()))}

    tx = optax.apply_if_finite(optax.sgd(0.1), 1000)
    skipped = {"metrics": lambda state: {"skipped": state.total_notfinite}}
    with pytest.raises(UserError, match="not finite since step 1 "):
        fit(lambda rngs: Toy(rngs), tx, ToyData(), explode, steps=50, **skipped)
    result = fit(lambda rngs: Toy(rngs), tx, ToyData(), explode, steps=4, **skipped)
    assert math.isnan(result.metrics["loss"])


def test_no_steps_is_refused():
    with pytest.raises(UserError, match="steps: expected integer >= 1"):
        train(0)


def test_a_grain_style_byte_state_round_trips():
    class Bytes(ToyData):
        def get_state(self):
            return str(self.step).encode()

        def set_state(self, state):
            self.step = int(state)

    checkpointer = MemoryCheckpointer()
    train(2, data=Bytes(), checkpointer=checkpointer)
    result = train(4, data=Bytes(), checkpointer=checkpointer)
    equal(numbers(result.state), numbers(train(4).state))
