import gc
import json
import sys
import threading
import time

import numpy as np
import pytest

from styrax.core import UserError
from styrax.core.protocols import DataIterator
from styrax.core.testing import check_iterator
from styrax.data import LMData, Loader


@pytest.fixture(scope="module")
def data(store):
    return LMData(store, seed=0, seq_len=32, batch_size=16, held_out=0.1)


class Slow:
    """A source that counts its reads, and can block or fail at a step."""

    fingerprint = "slow"
    num_steps = None

    def __init__(self, *, fail_at=None, block_at=None):
        self.settings = {"name": "slow"}
        self.reads, self.fail_at, self.block_at = [], fail_at, block_at
        self.release = threading.Event()

    def batch(self, step, rows=None):
        self.reads.append(step)
        if step == self.fail_at:
            raise RuntimeError(f"cannot read step {step}")
        if step == self.block_at:
            self.release.wait(60)
        return {"tokens": np.full((2, 4), step, np.int32)}


def steps(loader, count):
    return [int(next(loader)["tokens"][0, 0]) for _ in range(count)]


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("start", [0, "epoch end", 40])
def test_conformance(data, prefetch, start):
    # An epoch has about 10 steps: the checks go over its end and into the third.
    first = int(data.steps_per_epoch) - 3 if start == "epoch end" else start
    check_iterator(lambda: data.loader(step=first, prefetch=prefetch), batches=8)


def test_a_loader_is_its_batches_whatever_the_prefetch(data):
    assert isinstance(data.loader(), DataIterator)
    for prefetch in (0, 1, 2, 7):
        with data.loader(step=3, prefetch=prefetch) as loader:
            for step, batch in zip(range(3, 30), loader):
                same(batch, data.batch(step))


def test_resume_at_every_step_into_the_second_epoch(data):
    with data.loader() as loader:
        for step in range(2 * int(data.steps_per_epoch) + 2):
            state = json.loads(json.dumps(loader.get_state()))
            assert state["step"] == step
            with data.loader(prefetch=1) as fresh:
                fresh.set_state(state)
                # Saved again at once, and restored again.
                again = fresh.get_state()
                assert again == state
                with data.loader(prefetch=0) as third:
                    third.set_state(again)
                    same(next(third), data.batch(step))
                same(next(fresh), data.batch(step))
            next(loader)


def test_the_state_counts_what_was_given_out():
    source = Slow()
    with Loader(source, prefetch=4) as loader:
        assert steps(loader, 3) == [0, 1, 2]
        wait_until(lambda: len(source.reads) == 7)
        assert loader.get_state()["step"] == 3
        assert loader.get_state()["fingerprint"] == "slow"


def test_seek_forwards_and_backwards():
    with Loader(Slow(), step=5, prefetch=2) as loader:
        assert steps(loader, 2) == [5, 6]
        loader.seek(100)
        assert steps(loader, 2) == [100, 101]
        loader.seek(0)
        assert loader.get_state()["step"] == 0
        assert steps(loader, 2) == [0, 1]
        with pytest.raises(UserError, match="step -1"):
            loader.seek(-1)


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def test_an_early_break_stops_reads():
    source = Slow()
    loader = Loader(source, prefetch=2)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    wait_until(lambda: len(source.reads) == 6)
    time.sleep(0.05)
    assert source.reads == [0, 1, 2, 3, 4, 5]
    loader.close()
    assert source.reads == [0, 1, 2, 3, 4, 5]


def test_nothing_is_read_before_it_is_asked_for():
    source = Slow()
    loader = Loader(source)
    loader.set_state({**loader.get_state(), "step": 9})
    assert source.reads == []
    assert steps(loader, 1) == [9]
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_error_the_iterator_stays_failed(prefetch):
    source = Slow(fail_at=2)
    loader = Loader(source, prefetch=prefetch)
    assert steps(loader, 2) == [0, 1]
    with pytest.raises(RuntimeError, match="cannot read step 2") as first:
        next(loader)
    for _ in range(3):
        with pytest.raises(RuntimeError) as again:
            next(loader)
        assert again.value is first.value
    assert loader.get_state()["step"] == 2
    assert source.reads.count(2) == 1
    loader.seek(3)
    assert steps(loader, 2) == [3, 4]
    loader.close()


def test_close_is_bounded_when_a_read_never_returns():
    source = Slow(block_at=1)
    loader = Loader(source, prefetch=2)
    assert steps(loader, 1) == [0]
    wait_until(lambda: 1 in source.reads)
    begin = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - begin < 5
    assert list(loader) == []
    with pytest.raises(UserError, match="closed"):
        loader.seek(0)
    source.release.set()


def test_seek_leaves_a_blocked_read_behind():
    source = Slow(block_at=1)
    with Loader(source, prefetch=2) as loader:
        assert steps(loader, 1) == [0]
        wait_until(lambda: 1 in source.reads)
        loader.seek(7)
        assert steps(loader, 3) == [7, 8, 9]
        source.release.set()
        assert steps(loader, 3) == [10, 11, 12]


def resident_bytes():
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm") as handle:  # noqa: PTH123
        return int(handle.read().split()[1]) * 4096


def test_a_hundred_loaders_leave_no_threads_and_no_memory(data):
    def use(count, close):
        for _ in range(count):
            loader = data.loader(prefetch=3)
            next(loader)
            if close:
                loader.close()
        del loader
        gc.collect()

    use(10, close=False)
    threads, before = threading.active_count(), resident_bytes()
    use(100, close=True)
    use(100, close=False)
    wait_until(lambda: threading.active_count() <= threads)
    assert resident_bytes() - before < 20e6


def test_a_state_of_other_data_is_refused_with_the_difference(store, data):
    state = data.loader().get_state()
    other = LMData(store, seed=1, seq_len=16, batch_size=16, held_out=0.1).loader()
    with pytest.raises(UserError) as caught:
        other.set_state(state)
    message = str(caught.value)
    assert "seed: saved with 0, now 1" in message
    assert "seq_len: saved with [[0, 32]], now [[0, 16]]" in message
    assert "batch_size" not in message
    assert "allow_changes" in message and "start a new run" in message
    assert "seek" not in message  # of no use on the command line
    assert other.get_state()["step"] == 0
    # A state cut down to what every styrax state has.
    small = {name: state[name] for name in ("version", "step", "fingerprint")}
    with pytest.raises(UserError, match="expected a data state with the 'settings' behind its fingerprint"):
        other.set_state(small)
    data.loader().set_state(small)


@pytest.mark.parametrize("state", [None, 3, {}, {"step": -1}, {"step": "3"}, {"version": 2, "step": True}])
def test_what_is_no_state(data, state):
    with pytest.raises(UserError, match="expected a data state"):
        data.loader().set_state(state)


def test_a_state_of_another_version(data):
    state = {**data.loader().get_state(), "version": 99}
    with pytest.raises(UserError, match="version 99, expected 2"):
        data.loader().set_state(state)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_read_that_hangs_is_an_error_that_names_the_step(prefetch):
    source = Slow(block_at=2)
    with Loader(source, prefetch=prefetch, timeout=0.2) as loader:
        assert steps(loader, 2) == [0, 1]
        for _ in range(2):
            with pytest.raises(UserError, match=r"the batch of step 2 did not come within 0\.2 seconds"):
                next(loader)
        source.release.set()
        loader.seek(3)
        assert steps(loader, 1) == [3]
        assert loader.wait_seconds >= 0


def test_wrong_arguments(data):
    with pytest.raises(UserError, match="timeout = 0"):
        Loader(data, timeout=0)
    with pytest.raises(UserError, match="prefetch = -1"):
        data.loader(prefetch=-1)
    with pytest.raises(UserError, match="step -2"):
        data.loader(step=-2)


PROGRAM = """
    import time
    import numpy as np
    from styrax.data import Loader
    class Source:
        fingerprint, settings, num_steps = "s", {}, None
        def batch(self, step, rows=None):
            if step == BLOCK:
                time.sleep(60)
            return {"tokens": np.zeros(1)}
    loader = Loader(Source(), prefetch=4)
    for number, batch in enumerate(loader):
        if number == 2:
            END
"""


@pytest.mark.parametrize("block", [-1, 3])
@pytest.mark.parametrize("end", ["raise RuntimeError('stop here')", "break"])
def test_a_program_that_stops_in_the_loop_exits(run_python, block, end):
    begin = time.monotonic()
    done = run_python(PROGRAM.replace("BLOCK", str(block)).replace("END", end), check=False, timeout=30)
    assert time.monotonic() - begin < 25
    assert done.returncode == (0 if end == "break" else 1)
    assert ("stop here" in done.stderr) == (end != "break")
