"""A process that reads while another writes, replaces and deletes; and disks that fill up or go away meanwhile."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store

LIKE = {"params": None, "run": None}


def whole(found):
    """Tell whether all of it was saved at once: the numbers of every part say the same step and generation."""
    run, params = found["run"], found["params"]
    wanted = np.float32(run["step"] + run["generation"] / 1000)
    parts = [params["large"] == wanted, params["small"][0] == run["step"]]
    parts += [params["small"][1]["a.b"] == np.float32(run["generation"])]
    return all(bool(np.all(part)) for part in parts)


def read_for(seconds, store):
    """Restore what is listed, again and again; gives how often, and which (step, generation) were seen."""
    seen, count, end = set(), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for step in store.steps():
            try:
                found = store.restore(step, LIKE)
            except CheckpointError as error:
                # It was deleted between the listing and the reading, or is replaced faster than it can be read.
                if not any(text in str(error) for text in ("no checkpoint of step", "being replaced")):
                    raise
                continue
            assert found["run"]["step"] == step and whole(found)
            seen.add((step, found["run"]["generation"]))
            count += 1
    return count, seen


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False], ids=["replaced", "deleted"])
@pytest.mark.parametrize("pack_below", [1, 65536], ids=["files", "packed"])
def test_a_reader_sees_the_old_or_the_new(same, pack_below, tmp_path, worker):
    """As a server does that loads weights while they are trained."""
    directory, acks = tmp_path / "run", tmp_path / "acks"
    pid = worker.start(
        "loop", tmp_path / "output", directory=directory, acks=acks, same=same, pack_below=pack_below, keep_last=2
    )
    try:
        deadline = time.monotonic() + 30
        while acks.read_bytes().count(b"\n") < 4 if acks.exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        count, seen = read_for(6, Store(directory, read_only=True))
    finally:
        os.kill(pid, signal.SIGKILL)
        ended = worker.end()
    assert ended == -signal.SIGKILL
    assert count > 20 and len(seen) > 5


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 20 MB that can be taken away."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("pack_below", [1, 2**30], ids=["files", "packed"])
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_of_20_mb_fills_up(pack_below, background, tmpfs):
    """Every save that does not fit fails and says so, what is there stays, and there is room again after a deletion."""
    config = CheckpointConfig(pack_below=pack_below, async_save=background, keep_last=99)
    failed, kept = [], {}
    with config.build(tmpfs / "run") as store:
        for step in range(1, 12):
            tree = {"w": np.full(600_000, step, np.float32)}
            try:
                store.save(step, {"params": tree}).committed()
                kept[step] = step
            except CheckpointError as error:
                if "no space is left" not in str(error):
                    raise
                failed.append(step)
        assert len(failed) > 2 and len(kept) > 4
        assert store.steps() == sorted(kept)
        for step in kept:
            assert float(store.restore(step, {"params": None})["params"]["w"][-1]) == step
    again = Store(tmpfs / "run", CheckpointConfig(keep_last=2, pack_below=pack_below))
    with again as store:
        store.save(99, {"params": {"w": np.full(1000, 99, np.float32)}}).committed()
        assert store.steps()[-1] == 99 and len(store.steps()) == 2
        assert store.verify(99) == []


@pytest.mark.slow
def test_a_disk_that_goes_away(tmpfs):
    store = CheckpointConfig().build(tmpfs / "run")
    store.save(1, {"params": {"w": np.ones(1000, np.float32)}}).committed()
    subprocess.run(["umount", "-l", str(tmpfs)], check=True)
    with pytest.raises(CheckpointError, match=r"the folder is not there|cannot be written"):
        store.save(2, {"params": {"w": np.ones(1000, np.float32)}}).committed()
