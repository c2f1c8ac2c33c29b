"""Grain's pipelines under what breaks them."""

import collections
import json
import threading
import time

import grain
import numpy as np
import pytest

from styrax.core import UserError
from styrax.core.testing import check_iterator
from styrax.data import iterate, window_shuffle


def numbers(n=20):
    return grain.MapDataset.range(n).seed(3).shuffle().batch(3)


def test_conformance():
    check_iterator(lambda: iterate(numbers()), batches=4)


def test_elements_are_grains_own():
    with iterate(numbers()) as guarded:
        got = [batch.tolist() for batch in guarded]
        assert list(guarded) == []
    assert got == [batch.tolist() for batch in numbers()]
    with iterate(numbers().to_iter_dataset(), threads=1) as guarded:
        assert [batch.tolist() for batch in guarded] == got


def test_resume_at_every_element():
    expected = [batch.tolist() for batch in numbers()]
    for start in range(len(expected) + 1):
        with iterate(numbers(), name="n") as one:
            for _ in range(start):
                next(one)
            state = json.loads(json.dumps(one.get_state()))
        with iterate(numbers(), name="n") as other:
            other.set_state(state)
            assert other.get_state() == state
            assert [batch.tolist() for batch in other] == expected[start:]


def test_the_state_of_another_pipeline_is_refused():
    state = iterate(numbers(), name="one").get_state()
    with iterate(numbers(), name="two") as other, pytest.raises(UserError, match=r"name: saved with 'one', now 'two'"):
        other.set_state(state)
    with iterate(numbers(), name="one") as same:
        for wrong in (None, {}, {"version": 9, "grain": {}}, {**state, "workers": 2}):
            with pytest.raises(UserError, match=r"expected a state|workers: saved with 2, now 0"):
                same.set_state(wrong)


def broken(index):
    if index == 7:
        raise ValueError("record 7 is broken")
    return index


def test_after_an_error_it_stays_failed():
    with iterate(grain.MapDataset.range(20).map(broken), threads=2) as records:
        assert [next(records) for _ in range(7)] == list(range(7))
        for _ in range(3):
            with pytest.raises(ValueError, match="record 7 is broken"):
                next(records)
        with pytest.raises(ValueError, match="record 7"):
            records.get_state()


def test_a_read_that_hangs():
    release = threading.Event()

    def slow(index):
        if index == 2:
            release.wait(60)
        return index

    records = iterate(grain.MapDataset.range(5).map(slow), timeout=0.5)
    assert [next(records), next(records)] == [0, 1]
    with pytest.raises(UserError, match=r"gave nothing within 0\.5 seconds"):
        next(records)
    begin = time.monotonic()
    records.close()
    assert time.monotonic() - begin < 30
    release.set()


@pytest.mark.parametrize("length", [1, 7, 10, 12])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_window_shuffle_is_a_permutation_within_windows(length, window):
    for seed in range(5):
        got = list(window_shuffle(grain.MapDataset.range(length), window=window, seed=seed))
        assert collections.Counter(got) == collections.Counter(range(length))
        assert all(got[i] // window == i // window for i in range(length))
    assert list(window_shuffle(grain.MapDataset.range(64), window=64, seed=0)) != list(range(64))


WORKERS = """
    import os, sys, time
    import grain
    from styrax.data import iterate

    def work(index):
        if index == 9 and sys.argv[1:] == ["dies"]:
            os._exit(CODE)
        return index

    if __name__ == "__main__":
        sys.argv = ["program", *ARGS]
        with iterate(grain.MapDataset.range(24).map(work), workers=2, timeout=120) as records:
            print(list(records))
"""


@pytest.mark.slow
def test_workers_without_absl_give_every_record(python_program):
    done = python_program(WORKERS.replace("ARGS", "[]").replace("CODE", "0"))
    assert json.loads(done.stdout) == list(range(24))


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_dies_is_an_error(python_program, code):
    program = WORKERS.replace('index == 9 and sys.argv[1:] == ["dies"]', "index == 9").replace("CODE", str(code))
    done = python_program(program.replace("ARGS", "[]"), check=False)
    assert done.returncode == 1
    assert "worker" in done.stderr.lower()
    assert done.stdout == ""


@pytest.fixture
def python_program(tmp_path, python_env):
    """Run a program from a file, since workers import it again."""
    import subprocess
    import sys
    import textwrap

    def run(code, check=True):
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, file], env=python_env, capture_output=True, text=True, timeout=180, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def test_wrong_numbers():
    with pytest.raises(UserError, match=r"workers = -1(.|\n)*threads = -2(.|\n)*timeout = 0"):
        iterate(numbers(), workers=-1, threads=-2, timeout=0)
    with pytest.raises(UserError, match="window = 0"):
        window_shuffle(grain.MapDataset.range(3), window=0, seed=0)


def test_the_first_elements_need_no_more_reads():
    reads = []

    def seen(index):
        reads.append(index)
        return np.int64(index)

    with iterate(grain.MapDataset.range(1000).map(seen)) as records:
        next(records)
    assert reads == [0]
