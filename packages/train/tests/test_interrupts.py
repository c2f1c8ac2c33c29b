import os
import signal

import pytest
from train_toys import TX, MemoryCheckpointer, MemoryTracker, Toy, ToyData, equal, numbers, toy_loss, train

from styrax.train import fit
from styrax.train.hooks import Hook
from styrax.train.interrupts import Interrupts


class Send(Hook):
    def __init__(self, number, at):
        self.number, self.at, self.told = number, at, []

    def on_step(self, step, metrics):
        if step == self.at:
            os.kill(os.getpid(), self.number)

    def on_interrupt(self, name):
        self.told.append(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_loses_no_step(number):
    checkpointer, tracker = MemoryCheckpointer(), MemoryTracker()
    hook = Send(number, at=3)
    stopped = train(9, checkpointer=checkpointer, tracker=tracker, hooks=[hook])
    assert stopped.interrupted == number.name and hook.told == [number.name]
    assert checkpointer.steps() == [stopped.step] and list(tracker.lines) == list(range(1, stopped.step + 1))
    whole = MemoryTracker()
    result = train(9, checkpointer=checkpointer, tracker=tracker)
    equal(numbers(result.state), numbers(train(9, tracker=whole).state))
    assert result.interrupted is None and tracker.lines == whole.lines


def test_a_signal_in_the_last_step_is_a_finished_run():
    result = fit(lambda r: Toy(r), TX, ToyData(), toy_loss, steps=2, hooks=[Send(signal.SIGTERM, at=2)])
    assert result.step == 2 and result.interrupted is None


def test_handlers_are_put_back_and_a_second_ctrl_c_is_immediate():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
