"""The watchdog writes where a run stands still, once each time, and leaves a run that goes on alone."""

import threading
import time

import pytest

from styrax.train.config import TrainConfig, Watch
from styrax.train.evaluate import HeldOut
from styrax.train.watchdog import ENDED, Watchdog


def until(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_it_writes_the_stack_that_hangs_once_and_again_after_the_run_went_on(tmp_path, capfd):
    held = threading.Event()

    def waits_for_a_collective_that_never_comes():
        held.wait(60)

    hung = threading.Thread(target=waits_for_a_collective_that_never_comes)
    hung.start()
    watchdog = Watchdog(tmp_path / "stacks-3.txt", 0.05, process=3)
    watchdog.on_start(7, 100, True)
    watchdog.on_compile(None)
    time.sleep(0.2)
    assert watchdog.barked == 0  # a compilation may last
    watchdog.on_compile(0.3)
    time.sleep(0.2)
    assert watchdog.barked == 0  # another process may still be at it
    until(lambda: watchdog.barked == 1)
    time.sleep(0.2)
    assert watchdog.barked == 1
    watchdog.on_step(8, {})
    until(lambda: watchdog.barked == 2)
    watchdog.close()
    held.set()
    hung.join()
    text = (tmp_path / "stacks-3.txt").read_text()
    assert text.count("process 3 stands still") == 2
    assert "waits_for_a_collective_that_never_comes" in text
    assert "the last metrics are of step 7" in text
    assert "the last metrics are of step 8" in text
    assert str(tmp_path / "stacks-3.txt") in capfd.readouterr().err


@pytest.mark.parametrize(
    "event",
    [("on_step", 1, {}), ("on_evaluate", 1, HeldOut(1.0, 1, None), 0.1), ("on_sample", 1, 0.1), ("on_save", 1, 0.1)],
    ids=lambda event: event[0],
)
def test_whatever_ends_counts(tmp_path, event):
    name, *args = event
    watchdog = Watchdog(tmp_path / "stacks.txt", 2.0)
    watchdog.on_start(0, 10, False)
    watchdog.on_compile(0.0)
    first = watchdog._since
    getattr(watchdog, name)(*args)
    assert watchdog._since > first
    watchdog.on_end(10)
    assert not watchdog._thread.is_alive()
    assert not (tmp_path / "stacks.txt").exists()


def test_it_can_end_the_process(tmp_path):
    codes = []
    watchdog = Watchdog(tmp_path / "nowhere" / "stacks.txt", 0.02, end=True, leave=codes.append)  # no place to write
    watchdog.on_start(0, 10, False)
    watchdog.on_compile(0.0)
    until(lambda: codes == [ENDED])
    watchdog.close()


def test_the_default_is_off():
    assert TrainConfig().watchdog == Watch(seconds=0.0, end=False)
    with pytest.raises(Exception, match="seconds"):
        Watch(seconds=-1.0)
