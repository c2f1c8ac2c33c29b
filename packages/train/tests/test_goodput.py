"""The account of the time: with a clock that only moves when told, every delay is in its part and the sum is exact."""

import itertools

import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_toys import MemoryCheckpointer, MemoryTracker, Toy, ToyData, toy_batch, toy_loss, train

from styrax.train import HeldOut, fit, loop
from styrax.train.goodput import PARTS, Goodput, total
from styrax.train.hooks import Hook


class Clock:
    """Moves when told."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def wait(self, amount):
        self.now += amount


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PARTS), st.none(), st.integers(0, 10**15)), max_size=40))
def test_the_parts_add_up_to_the_wall_time_whatever_happens(events):
    clock, depth = Clock(), 0
    goodput = Goodput(clock=clock)
    for event in events:
        if isinstance(event, int):
            clock.wait(event)
        elif event is not None:
            goodput.enter(event)
            depth += 1
        elif depth:
            goodput.leave()
            depth -= 1
    assert sum(goodput.spent().values()) == goodput.wall() == clock.now
    assert set(goodput.spent()) == set(PARTS)


def test_what_went_before_is_starting():
    goodput = Goodput(clock=lambda: 50, begun=20)
    assert goodput.spent()["startup"] == goodput.wall() == 30


@pytest.fixture
def slow(monkeypatch):
    """A run in which each part takes its own time, a digit of the clock each."""
    clock = Clock()

    class Data(ToyData):
        def __next__(self):
            clock.wait(1_000)
            return super().__next__()

    class Checkpointer(MemoryCheckpointer):
        def save(self, step, items):
            clock.wait(10_000)
            super().save(step, items)

        def wait(self):
            clock.wait(20_000)

    class Tracker(MemoryTracker):
        def log(self, step, metrics):
            clock.wait(7)
            super().log(step, metrics)

    class Slow(Hook):
        def on_start(self, step, steps, resumed):
            clock.wait(100)

        def on_compile(self, seconds):
            clock.wait(1_000_000 if seconds is None else 0)

        def on_step(self, step, metrics):
            clock.wait(3)

    def evaluator(*args):
        def evaluate(state, batches, token_bytes):
            clock.wait(100_000)
            return HeldOut(1.0, 1, None)

        return evaluate

    monkeypatch.setattr(loop, "evaluator", evaluator)
    compiled = loop.CompiledStep.__call__

    def step(self, state, batch, number):
        out = compiled(self, state, batch, number)
        clock.wait(50)
        return out

    monkeypatch.setattr(loop.CompiledStep, "__call__", step)

    def run(steps, *, checkpointer, done=0, **options):
        goodput = Goodput(clock=clock, done=done)
        begun = clock.now
        result = fit(
            lambda rngs: Toy(rngs), optax.sgd(0.1), Data(), toy_loss,
            steps=steps, checkpointer=checkpointer, save_every=2, tracker=Tracker(), hooks=(Slow(),),
            goodput=goodput, eval_every=3, held_out=[toy_batch(9)], sample=lambda result: clock.wait(500_000),
            sample_every=2, **options,
        )  # fmt: skip
        assert result.goodput is goodput
        assert sum(goodput.spent().values()) == clock.now - begun
        return goodput.spent()

    run.checkpointer = Checkpointer
    return run


def test_each_delay_is_in_its_part(slow):
    spent = slow(5, checkpointer=slow.checkpointer())
    assert spent == {
        "startup": 100,
        "compile": 1_000_000,
        "step": 5 * 50,
        "data": 5 * 1_000,
        "checkpoint": 3 * 10_000 + 20_000,  # after 2, 4 and 5, and the last of them to its end
        "evaluate": 2 * 100_000,  # after 3 and 5
        "sample": 2 * 500_000,  # after 2 and 4; that at the end is not the loop's
        "lost": 0,
        "other": 5 * (7 + 3),
    }


def test_steps_that_are_done_again_are_lost(slow):
    checkpointer = slow.checkpointer()
    slow(4, checkpointer=checkpointer)
    spent = slow(8, checkpointer=checkpointer, done=6)  # killed after step 6, saved at 4
    assert (spent["lost"], spent["step"]) == (2 * 50, 2 * 50)


def test_a_loop_without_an_account_makes_one():
    result = train(2)
    assert sum(result.goodput.spent(now := 10**18).values()) == result.goodput.wall(now)


def test_starts_are_added_up_with_the_time_between():
    def account(time, **parts):
        return {"event": "goodput", "time": time, "nanoseconds": {name: round(s * 1e9) for name, s in parts.items()}}

    events = [
        {"event": "start", "time": 100.0},
        account(104.0, step=3),
        account(110.0, step=7, startup=2),  # begun at 101
        {"event": "start", "time": 121.0},  # killed before it noted anything
        {"event": "start", "time": 131.0},
        account(140.0, lost=4, step=3, data=3),  # begun at 130
        {"event": "goodput", "time": "?", "nanoseconds": {"step": 10**9}},  # damaged
    ]
    whole, *starts = total(events)
    assert whole == {**dict.fromkeys(PARTS, 0), "startup": 2e9, "step": 10e9, "lost": 4e9, "data": 3e9, "down": 20e9}
    assert sum(whole.values()) == (140 - 101) * 10**9
    assert [sum(start.values()) for start in starts] == [9 * 10**9, 10 * 10**9]
    assert sum(total([])[0].values()) == 0


def test_a_clock_of_day_that_was_set_back_gives_no_negative_time():
    events = itertools.chain.from_iterable(
        ({"event": "start"}, {"event": "goodput", "time": t, "nanoseconds": {"step": 10**10}}) for t in (50.0, 40.0)
    )
    assert total(events)[0]["down"] == 0
