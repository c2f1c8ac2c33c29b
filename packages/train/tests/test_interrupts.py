import os
import signal
import subprocess
import sys

import pytest
from train_toys import TX, MemoryCheckpointer, MemoryTracker, Toy, ToyData, equal, numbers, toy_loss, train

from styrax.train import fit, session
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


def test_contexts_nest_without_losing_a_signal():
    with Interrupts() as outer:
        with Interrupts() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert inner.received == outer.received == "SIGTERM"
        told = []
        with Interrupts(told.append) as later:
            assert later.received == "SIGTERM" and told == ["SIGTERM"]
    stopped = None
    with Interrupts():
        signal.raise_signal(signal.SIGTERM)
        stopped = train(5)
    assert stopped.step == 0 and stopped.interrupted == "SIGTERM"
    assert "saved" not in session.stopped(stopped)


def test_a_part_that_a_signal_ends():
    with Interrupts() as interrupts:
        with interrupts.stopping("before it"), pytest.raises(ZeroDivisionError):
            _ = 1 // 0
        with pytest.raises(ImportError), interrupts.stopping("before it"):
            raise ImportError
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM before it"), interrupts.stopping("before it"):
            raise ImportError("half of a module")
        with pytest.raises(KeyboardInterrupt, match="SIGTERM before it"):
            interrupts.check("before it")


def test_printing_in_the_midst_of_printing_is_no_error():
    def notify(name):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with Interrupts(notify) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.received == "SIGTERM"


# The main thread sits in one long call that releases the interpreter's lock, as in a compilation: no handler runs.
BUSY = """
import hashlib, os, signal, sys, time
from styrax.train.interrupts import Interrupts
with Interrupts(command=True) as interrupts:
    if sys.argv[1] == "fork" and os.fork() == 0:
        os.kill(os.getpid(), signal.SIGTERM)  # as without the context: no copy of it, and not the parent's signal
    print("ready", flush=True)
    if sys.argv[1] == "twice":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    while interrupts.received is None:
        time.sleep(0.01)
print(os.wait()[1] if sys.argv[1] == "fork" else "", interrupts.received)
"""


def test_a_second_ctrl_c_ends_the_process_even_in_a_long_call():
    busy = [sys.executable, "-c", BUSY]
    twice, fork = (
        subprocess.Popen([*busy, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for how in ("twice", "fork")
    )
    for process in (twice, fork):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    twice.send_signal(signal.SIGTERM)
    assert twice.stderr is not None and "Ctrl-C again stops at once" in twice.stderr.readline()
    twice.send_signal(signal.SIGINT)
    out, err = twice.communicate(timeout=60)
    assert (twice.returncode, err) == (130, "stopped at once\n")
    fork.send_signal(signal.SIGINT)
    out, err = fork.communicate(timeout=60)
    assert (fork.returncode, out) == (0, f"{int(signal.SIGTERM)} SIGINT\n")
