"""Whatever instant a writer is killed at, what was acknowledged is there, and nothing unfinished is listed."""

import os
import random
import signal
import time

import pytest

from styrax.checkpoint import CheckpointConfig, Store

POINTS = ["after_arrays", "before_manifest", "after_manifest", "before_rename", "after_rename", "mid_trash"]


def survivors(directory, worker_module, same):
    """Open the folder as the next run does, load every listed step; gives step -> generation."""
    with CheckpointConfig().build(directory) as store:
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
        found = {}
        for step in store.steps():
            assert store.verify(step) == []
            run = store.restore(step, {"run": None})["run"]
            assert run["step"] == step
            expected = worker_module.items(step, run["generation"])
            same(store.restore(step, {"params": expected["params"]})["params"], expected["params"])
            found[step] = run["generation"]
        assert store.latest() == max(found, default=None)
        return found


def acknowledged(path):
    """Read what the worker wrote down; a torn last line was not acknowledged."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]


MODES = {
    "async": {},
    "sync": {"async_save": False},
    "replace": {"same": True},
    "retention": {"keep_last": 1, "keep_every": 5},
    "packed": {"pack_below": 2**30},
}


@pytest.mark.parametrize("mode", MODES)
def test_random_kills(mode, tmp_path, worker, worker_module, same):
    draw = random.Random(mode)
    directory, acks, output = tmp_path / "run", tmp_path / "acks", tmp_path / "output"
    safe = 0
    for _ in range(3):
        acks.unlink(missing_ok=True)
        pid = worker.start("loop", output, directory=directory, acks=acks, **MODES[mode])
        deadline = time.monotonic() + 30
        while not acknowledged(acks) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert worker.end() == -signal.SIGKILL, output.read_text()
        acked = acknowledged(acks)
        assert acked, output.read_text()
        safe += len(acked)
        found = survivors(directory, worker_module, same)
        if mode == "replace":
            for step, generation in acked:
                assert found[step] >= generation
            continue
        assert max(found) >= acked[-1][0]
        newest = max(found) - MODES[mode].get("keep_last", 3)
        for step, generation in acked:
            if step > newest:
                assert found[step] == generation
        for step, _ in acked:
            assert step in found or step % MODES[mode].get("keep_every", step + 1)
    assert safe >= 3


@pytest.mark.parametrize("point", [*POINTS, "mid_replace"])
def test_kill_points(point, tmp_path, worker, worker_module, same):
    directory, acks, output = tmp_path / "run", tmp_path / "acks", tmp_path / "output"
    with worker_module.config(keep_last=2).build(directory) as store:
        for step in (1, 2):
            store.save(step, worker_module.items(step))
    env = {"STYRAX_CHECKPOINT_KILL": point}
    replace = {"same": True} if point == "mid_replace" else {}
    code = worker.run("loop", output, env, directory=directory, acks=acks, keep_last=2, **replace)
    assert code == -signal.SIGKILL, output.read_text()

    # Before the next writer opens the folder, a reader sees whole checkpoints only.
    reader = Store(directory, read_only=True)
    assert all(reader.verify(step) == [] for step in reader.steps())
    assert reader.steps() == {"after_rename": [1, 2, 3], "mid_trash": [2, 3], "mid_replace": [1]}.get(point, [1, 2])
    found = survivors(directory, worker_module, same)
    assert sorted(found) == {"after_rename": [1, 2, 3], "mid_trash": [2, 3]}.get(point, [1, 2])
