"""A program that ends without `close`: the save is committed, or the exit code and stderr say that it is lost."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, commit, saving

ENDS = {"fall": 0, "exit": 0, "raise": 1, "interrupt": -signal.SIGINT, "handled": 143}


def committed(directory, mb=1):
    store = Store(directory, read_only=True)
    assert store.steps() == [7]
    got = store.restore(7, {"params": None})["params"]["w"]
    np.testing.assert_array_equal(got, np.arange(mb * 250_000, dtype=np.float32))


@pytest.mark.parametrize("pack", [False, True], ids=["orbax", "packed"])
@pytest.mark.parametrize("end", ENDS)
def test_commits(end, pack, tmp_path, worker):
    output = tmp_path / "output"
    code = worker.run("one", output, directory=tmp_path / "run", end=end, pack=pack, mb=8)
    assert code == ENDS[end], output.read_text()
    committed(tmp_path / "run", mb=8)
    assert ("the program's own error" in output.read_text()) == (end == "raise")


@pytest.mark.parametrize("end", ["fall", "raise"])
def test_is_loud_about_a_lost_save(end, tmp_path, worker):
    output = tmp_path / "output"
    assert worker.run("one", output, directory=tmp_path / "run", end=end, fail="ENOSPC") == 1
    assert "error: the checkpoint of step 7 is lost: " in output.read_text()
    assert "no space is left" in output.read_text()
    assert Store(tmp_path / "run", read_only=True).steps() == []


def test_tells_once(tmp_path, worker):
    output = tmp_path / "output"
    assert worker.run("one", output, directory=tmp_path / "run", end="collect", fail="EACCES") == 0
    assert "told: the checkpoint of step 7 cannot be written" in output.read_text()
    assert "lost" not in output.read_text()


def test_forked_child_does_not_answer_for_its_parent(tmp_path, worker):
    output = tmp_path / "output"
    assert worker.run("one", output, directory=tmp_path / "run", end="fall", fork=True, mb=8) == 0, output.read_text()
    committed(tmp_path / "run", mb=8)


def test_interrupted_twice(tmp_path, worker):
    """Who interrupts the wait for a save too, gets out at once, and is told."""
    output = tmp_path / "output"
    assert worker.run("one", output, directory=tmp_path / "run", end="twice", slow=2, pack=True) == 130
    lost = f"error: the checkpoint of step 7 is lost: interrupted while it was written to {tmp_path / 'run'}"
    assert lost in output.read_text()
    assert Store(tmp_path / "run", read_only=True).steps() == []


@pytest.mark.parametrize(("end", "code"), [("terminate", -signal.SIGTERM), ("os._exit", 3)])
def test_ends_that_no_program_can_wait_in(end, code, tmp_path, worker):
    output = tmp_path / "output"
    assert worker.run("one", output, directory=tmp_path / "run", end=end, slow=2, pack=True) == code
    assert Store(tmp_path / "run", read_only=True).steps() == []
    Store(tmp_path / "run").close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["LOCK"]


def test_a_wait_that_was_interrupted_can_be_taken_up(tmp_path, monkeypatch):
    go, write = threading.Event(), commit.write_file
    monkeypatch.setattr(commit, "write_file", lambda *args: go.wait(30) and write(*args))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Store(tmp_path) as store:
            ticket = store.save(7, {"run": {"a": 1}})
            for wait in (ticket.committed, store.wait):
                timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    wait()
                timer.join()
                assert not ticket.done
                with pytest.raises(CheckpointError, match="it goes on"):
                    ticket.committed(timeout=0.01)
            go.set()
            ticket.committed()
            assert store.steps() == [7]
    finally:
        go.set()
        signal.signal(signal.SIGINT, before)


def test_starts_no_thread_where_none_can_start(tmp_path, monkeypatch):
    """From Python 3.12.0 to 3.12.1 that is so when the main thread has ended."""
    for module in (commit, saving):
        monkeypatch.setattr(module, "THREADS_OUTLIVE_MAIN", False)
    start, names, go, publish = threading.Thread.start, [], threading.Event(), saving.Writer._publish
    monkeypatch.setattr(threading.Thread, "start", lambda self: (names.append(self.name), start(self))[1])
    monkeypatch.setattr(saving.Writer, "_publish", lambda *args: go.wait(30) and publish(*args))
    with CheckpointConfig(pack_below=1000).build(tmp_path) as store:
        store.save(7, {"params": {"w": np.ones(1000), "b": np.ones(3)}, "run": {"a": 1}})
        names.clear()
        go.set()
        store.wait()
        assert names == [] and store.steps() == [7]


def test_fresh_interpreters(tmp_path, run_python, worker_module):
    """The same without a fork.

    `STYRAX_CHECKPOINT_PYTHONS` names more interpreters and `STYRAX_CHECKPOINT_SOURCES` what to put on their
    path, both separated like a path.
    """
    source = open(worker_module.__file__).read()  # noqa: PTH123, SIM115
    cases = [(sys.executable, None, "fall", False)]
    for python in filter(None, os.environ.get("STYRAX_CHECKPOINT_PYTHONS", "").split(os.pathsep)):
        env = {"PYTHONPATH": os.environ.get("STYRAX_CHECKPOINT_SOURCES", "")}
        cases += [(python, env, end, pack) for end in ENDS for pack in (False, True)]
    for number, (python, env, end, pack) in enumerate(cases):
        directory = tmp_path / str(number)
        task = json.dumps({"task": "one", "directory": str(directory), "end": end, "pack": pack, "mb": 8})
        try:
            done = run_python(source, task, env=env, python=python)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{python} {end} {pack}: hangs; {error.stdout} {error.stderr}") from None
        assert done.returncode == ENDS[end], (python, end, pack, done.stdout, done.stderr)
        committed(directory, mb=8)
