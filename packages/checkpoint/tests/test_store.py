"""What is kept, who may write, what is told, and that arrays may be reused at once."""

import errno
import os
import shutil
import signal
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, commit
from styrax.checkpoint.pending import THREADS_OUTLIVE_MAIN
from styrax.checkpoint.snapshot import take


def small(step):
    return {"params": {"w": np.full(4, step)}, "run": {"step": step}}


def save_and_wait(store, step, items):
    store.save(step, items)
    store.wait()


def value(store, step):
    return store.restore(step, {"params": None})["params"]["w"][0]


@pytest.mark.parametrize(
    ("keep", "left"),
    [({"keep_last": 1}, [6]), ({"keep_last": 2, "keep_every": 3}, [3, 5, 6]), ({"keep_last": 9}, [1, 2, 3, 4, 5, 6])],
    ids=str,
)
def test_retention(keep, left, tmp_path):
    with CheckpointConfig(**keep).build(tmp_path) as store:
        for step in range(1, 7):
            store.save(step, small(step))
    assert Store(tmp_path, read_only=True).steps() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"{step:08d}" for step in left), "LOCK"]


def test_a_rewound_run_keeps_what_it_saves(tmp_path):
    with CheckpointConfig(keep_last=2).build(tmp_path) as store:
        for step in (10, 20, 30, 5):
            store.save(step, small(step))
        store.wait()
        assert store.steps() == [5, 20, 30]


def test_saving_a_step_again_replaces_it(tmp_path):
    with CheckpointConfig().build(tmp_path) as store:
        for number in range(3):
            store.save(4, {**small(number), "n": number})
            store.wait()
            assert store.steps() == [4] and value(store, 4) == number


def test_steps_are_read_from_disk(tmp_path):
    with Store(tmp_path) as store:
        store.save(3, small(3))
        store.wait()
        (tmp_path / "00000009").mkdir()
        (tmp_path / "12").mkdir()
        shutil.copytree(tmp_path / "00000003", tmp_path / "3")
        (tmp_path / "notes.txt").write_text("mine")
        assert store.steps() == [3] and store.latest() == 3
        shutil.rmtree(tmp_path / "00000003")
        assert store.steps() == [] and store.latest() is None
    assert (tmp_path / "notes.txt").exists()


def test_large_steps(tmp_path):
    with Store(tmp_path) as store:
        store.save(1_234_567_890, small(1))
        store.save(0, small(0))
        store.wait()
        assert store.steps() == [0, 1_234_567_890] and store.latest() == 1_234_567_890


def test_config():
    config = CheckpointConfig(every=5)
    assert [step for step in range(12) if config.should_save(step)] == [5, 10]


@pytest.mark.parametrize("pack_below", [1, 2**30])
def test_arrays_may_be_reused_at_once(pack_below, tmp_path):
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with CheckpointConfig(pack_below=pack_below, keep_last=9).build(tmp_path) as store:
        for number in range(4):
            host, device = np.full(200_000, number, np.float32), jnp.full(200_000, number, jnp.float32)
            gone = jnp.full(200_000, number, jnp.float32)
            store.save(number, {"params": {"host": host, "gone": gone, "device": device}})
            host[:] = -1
            gone.delete()
            for _ in range(3):
                device = step(device)
            jax.block_until_ready(device)
        for number in range(4):
            got = store.restore(number, {"params": None})["params"]
            assert all((leaf == number).all() for leaf in got.values())


def test_a_snapshot_holds_jax_arrays_and_copies_numpy_ones():
    """A `jax.Array` never changes, so it costs nothing; and what becomes of the array does not matter."""
    host, device = np.arange(64.0), jnp.arange(64.0)
    arrays = {"host": host, "device": device, "strided": host[::2]}
    taken = take({"item": arrays}, pack_below=1).arrays["orbax"]["item"]
    assert set(taken) == set(arrays) and all(array.flags.c_contiguous for array in taken.values())
    assert np.shares_memory(taken["device"], np.asarray(device))
    assert not np.shares_memory(taken["host"], host) and not np.shares_memory(taken["strided"], host)
    expected = np.arange(64.0, dtype=np.float32)
    device.delete()
    junk = [jnp.full(64, float(number)) for number in range(50)]
    jax.block_until_ready(junk)
    np.testing.assert_array_equal(taken["device"], expected)


@pytest.mark.parametrize("blocked", [False, True])
def test_save_returns_while_it_is_written(blocked, tmp_path, monkeypatch):
    release, real = threading.Event(), commit.seal

    def slow(*args, **kwargs):
        assert release.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(commit, "seal", slow)
    with Store(tmp_path) as store:
        store.save(1, small(1))
        assert store.steps() == []
        threading.Timer(0.2, release.set).start()
        if blocked:  # a second save waits for the first, and skips nothing
            store.save(2, small(2))
        store.wait()
        assert store.steps() == ([1, 2] if blocked else [1])


def test_restore_waits_for_the_save(tmp_path):
    with Store(tmp_path) as store:
        for step in range(5):
            store.save(step, small(step))
            assert value(store, step) == step


# Errors behind


def test_failure_is_raised_once_by_the_next_call(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        store.save(1, small(1))
        store.wait()
        monkeypatch.setattr(commit, "write_file", _raising(OSError(errno.ENOSPC, "No space left on device")))
        store.save(2, small(2))
        with pytest.raises(
            CheckpointError, match=r"step 2 cannot be written .*: no space is left \(.* free\)"
        ) as caught:
            store.wait()
        assert "Checkpoints made before are untouched; free some" in str(caught.value)
        store.wait()
        store.save(2, small(2))
        with pytest.raises(CheckpointError, match="step 2"):
            store.save(3, small(3))
        store.save(2, small(2))
        with pytest.raises(CheckpointError, match="step 2"):
            store.restore(1, {"run": None})
        monkeypatch.undo()
        assert store.steps() == [1] and value(store, 1) == 1
        assert not list(tmp_path.glob(".*"))
        store.save(2, small(2))
    assert Store(tmp_path, read_only=True).steps() == [1, 2]


def test_close_raises_and_frees_the_lock(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(commit, "seal", _raising(PermissionError(errno.EACCES, "Permission denied")))
    store.save(1, small(1))
    with pytest.raises(CheckpointError, match="this user may not write there"):
        store.close()
    store.close()
    Store(tmp_path).close()
    with pytest.raises(CheckpointError, match="is closed"):
        store.save(2, small(2))


def test_leaving_the_block_by_an_error_keeps_that_error(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "seal", _raising(RuntimeError("disk on fire")))
    with pytest.raises(KeyError, match="mine") as caught, Store(tmp_path) as store:  # noqa: PT012
        store.save(1, small(1))
        raise KeyError("mine")
    assert "disk on fire" in "".join(caught.value.__notes__)


def test_synchronous_save_raises_itself(tmp_path, monkeypatch):
    with CheckpointConfig(async_save=False).build(tmp_path) as store:
        store.save(1, small(1))
        assert store.steps() == [1]
        monkeypatch.setattr(commit, "seal", _raising(OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(CheckpointError, match=r"too many open files.*ulimit -n"):
            store.save(2, small(2))


def test_a_folder_that_went_away(tmp_path):
    with Store(tmp_path / "run") as store:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"the folder is not there \(any more\)"):
            store.save(1, small(1))


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 3 MB, and how to make it read-only."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("pack_below", [1, 2**30], ids=["orbax", "packed"])
def test_full_disk(pack_below, tmpfs):
    def items(step):
        return {"params": {"w": np.full(300_000, step, np.float32)}}

    with CheckpointConfig(pack_below=pack_below).build(tmpfs / "run") as store:
        store.save(1, items(1))
        store.save(2, items(2))
        with pytest.raises(CheckpointError, match=r"step 3 cannot be written in .*: no space is left"):
            save_and_wait(store, 3, items(3))
        assert store.steps() == [1, 2] and [value(store, step) for step in (1, 2)] == [1, 2]
        commit.retire(store.directory, [1])
        store.save(3, items(3))
        store.wait()
        assert store.steps() == [2, 3] and value(store, 3) == 3


def test_read_only_file_system(tmpfs):
    with Store(tmpfs / "run") as store:
        store.save(1, small(1))
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    with pytest.raises(CheckpointError, match="the file system is read-only"):
        Store(tmpfs / "run")
    with pytest.raises(CheckpointError, match="the file system is read-only"):
        Store(tmpfs / "new")
    assert value(Store(tmpfs / "run", read_only=True), 1) == 1


def test_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        Store(tmp_path / "missing", read_only=True)
    with pytest.raises(CheckpointError, match="checkpoints cannot be kept in"):
        Store(tmp_path / "file")
    store = Store(tmp_path, read_only=True)
    assert store.steps() == [] and store.latest() is None
    with pytest.raises(CheckpointError, match="read_only=True; open it without to save"):
        store.save(1, small(1))


# Who may write


def test_second_writer_is_refused(tmp_path, worker):
    output = tmp_path / "output"
    pid = worker.start("hold", output, directory=tmp_path / "run")
    try:
        deadline = time.monotonic() + 30
        while "held" not in (output.read_text() if output.exists() else "") and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match=f"is being written by process {pid} on host ") as caught:
            Store(tmp_path / "run")
        assert "worker.py, since 20" in str(caught.value)
        assert Store(tmp_path / "run", read_only=True).steps() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        worker.end()
    # The dead owner's lock is free, though its forked child still lives.
    with Store(tmp_path / "run") as store:
        with pytest.raises(CheckpointError, match="this very process"):
            Store(tmp_path / "run")
        store.save(1, small(1))
    Store(tmp_path / "run").close()


def test_leftovers_of_dead_writers_are_swept(tmp_path):
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, small(step))
    names = {".staging-00000003-ab12", ".trash-00000001-ab12", ".replaced-00000002-ab12"}
    for name in names:
        shutil.copytree(tmp_path / "00000001", tmp_path / name)
    (tmp_path / ".mine").mkdir()
    shutil.move(tmp_path / "00000002", tmp_path / ".replaced-00000002-cd34")
    reader = Store(tmp_path, read_only=True)
    assert reader.steps() == [1] and len(list(tmp_path.glob(".*"))) == 5
    shutil.rmtree(tmp_path / ".replaced-00000002-ab12")
    with Store(tmp_path) as store:
        assert store.steps() == [1, 2] and value(store, 2) == 2
    assert [path.name for path in tmp_path.glob(".*")] == [".mine"]


def test_reader_during_writing(tmp_path):
    """A reader polls while steps come, go and are replaced: it gets all of one or a clear error."""
    stop, failures, reads = threading.Event(), [], []

    def poll():
        reader = Store(tmp_path, read_only=True)
        while not stop.is_set():
            step = reader.latest(verified=False)
            if step is None:
                continue
            try:
                got = reader.restore(step, {"params": None, "run": None})
            except CheckpointError as error:
                if step in reader.steps() and "being replaced" not in str(error):
                    failures.append(str(error))
                continue
            reads.append(step)
            if len({got["run"]["step"], *got["params"]["w"]}) != 1:
                failures.append(got)

    with CheckpointConfig(keep_last=1).build(tmp_path) as store:
        store.save(0, small(0))
        store.wait()
        thread = threading.Thread(target=poll)
        thread.start()
        for number in range(1, 30):
            store.save(number // 4, small(number))
        store.wait()
        stop.set()
        thread.join()
    assert reads and not failures


# Time


def test_small_leaves_cost_little(tmp_path):
    items = {"params": {f"layer{n}": np.full((8, 8), n, np.float32) for n in range(200)}}
    times = {}
    for name, pack_below in (("packed", 2**20), ("orbax", 1)):
        with CheckpointConfig(pack_below=pack_below, async_save=False).build(tmp_path / name) as store:
            store.save(1, items)
            times[name] = []
            for step in (2, 3, 4):
                start = time.perf_counter()
                store.save(step, items)
                times[name].append(time.perf_counter() - start)
    assert min(times["packed"]) < min(times["orbax"]) / 3, times


@pytest.mark.skipif(not THREADS_OUTLIVE_MAIN, reason="Orbax's part is not left to the background on this Python")
def test_save_blocks_for_a_copy_only(tmp_path):
    items = {"params": {"w": np.ones((16, 2**18), np.float32)}}
    with CheckpointConfig().build(tmp_path) as store:
        blocked, total = [], []
        for step in range(4):
            start = time.perf_counter()
            store.save(step, items)
            blocked.append(time.perf_counter() - start)
            store.wait()
            total.append(time.perf_counter() - start)
    assert min(blocked[1:]) < min(total[1:]) / 2, (blocked, total)


def _raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def test_a_save_says_nothing(tmp_path, caplog):
    import logging

    before = list(logging.getLogger("absl").filters)
    with CheckpointConfig(pack_below=1).build(tmp_path) as store:
        store.save(1, {"params": {"w": np.ones(30)}, "more": {"w": np.ones(3)}}).committed()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert logging.getLogger("absl").filters == before
