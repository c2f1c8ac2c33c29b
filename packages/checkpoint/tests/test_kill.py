"""Whatever instant a writer is killed at, what was acknowledged is there, and nothing unfinished is listed."""

import os
import random
import shutil
import signal
import time

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, Store, formats

# Task of the worker, and its arguments.
MODES = {
    "async": ("loop", {}),
    "sync": ("loop", {"async_save": False}),
    "replace": ("loop", {"same": True}),
    "retention": ("loop", {"keep_last": 1, "pack_below": 1, "leaves": 20}),
    "packed": ("loop", {"pack_below": 2**30}),
    "sweep": ("sweep", {}),
    "export": ("export", {}),
    "export a folder": ("export", {"name": "out"}),
    "import": ("import_", {}),
}


def survivors(directory, worker_module, same):
    """Open the folder as the next run does, load every listed step; gives step -> generation."""
    with CheckpointConfig().build(directory) as store:
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
        found = {}
        for step in store.steps():
            assert store.verify(step) == []
            run = store.restore(step, {"run": None})["run"]
            assert run["step"] == step
            expected = worker_module.items(step, run["generation"], run["leaves"])
            same(store.restore(step, {"params": expected["params"]})["params"], expected["params"])
            found[step] = run["generation"]
        assert store.latest() == max(found, default=None)
        return found


def acknowledged(path):
    """Read what the worker wrote down; a torn last line was not acknowledged."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines if line.endswith("\n") and line != "begun\n"]


class Saves:
    """What a folder must hold after each kill of `loop`."""

    def __init__(self, directory, arguments, worker_module, same):
        self.directory, self.module, self.same = directory, worker_module, same
        self.keep, self.replaces = arguments.get("keep_last", 3), arguments.get("same", False)
        self.found = {}
        self.safe = {}

    def check(self, acked):
        found = survivors(self.directory, self.module, self.same)
        if self.replaces:  # generations begin again with each worker
            newest = dict(acked)
            assert found.keys() >= self.found.keys() | newest.keys()
            assert all(found[step] >= generation for step, generation in newest.items())
        else:
            self.safe |= dict(acked)
            assert max(found, default=0) >= max(self.safe, default=0)
            for step, generation in self.safe.items():
                if step > max(found) - self.keep:
                    assert found[step] == generation
            assert all(found.get(step, generation) == generation for step, generation in self.found.items())
        self.found = found


class Sweeps:
    """Whole checkpoints get their names back, and all else goes."""

    def __init__(self, directory, arguments, worker_module, same):
        self.directory, self.module, self.same = directory, worker_module, same
        with worker_module.config(keep_last=9).build(directory) as store:
            for step in range(1, 4):
                store.save(step, worker_module.items(step))

    def check(self, acked):
        reader = Store(self.directory, read_only=True)
        assert 1 in reader.steps() and all(reader.verify(step) == [] for step in reader.steps())
        assert survivors(self.directory, self.module, self.same) == dict.fromkeys(range(1, 4), 0)


class Exports:
    """A file is whole, the last acknowledged or the one after it."""

    def __init__(self, directory, arguments, worker_module, same):
        directory.mkdir()
        self.path = directory / arguments.get("name", "out.safetensors")
        self.before = 0

    def check(self, acked):
        path, least = self.path, max((number for _, number in acked), default=0)
        if self.path.suffix == "" and not path.exists():
            # A folder cannot be exchanged at once: the old one is beside it, by another name.
            path = next(iter(path.parent.glob(".out-*-old")), path)
        if path.exists():
            arrays = dict(formats.read(path))
            assert len(arrays) == 20
            (number,) = {int(value) for array in arrays.values() for value in np.unique(array.load())}
            assert number in (least, least + 1) or (not least and number == self.before)
            self.before = number
        else:
            assert not acked and self.before == 0
        if path != self.path and path.exists():
            path.rename(self.path)
        for left in self.path.parent.glob(".out*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


class Imports:
    """Every step is one import."""

    def __init__(self, directory, arguments, worker_module, same):
        self.directory = directory
        self.found = {}

    def check(self, acked):
        found = {}
        with CheckpointConfig().build(self.directory) as store:
            assert not list(self.directory.glob(".*"))
            for step in store.steps():
                assert store.verify(step) == []
                params = store.restore(step, {"params": None})["params"]
                (found[step],) = {*params["large"], *params["small"]}
                assert (len(params["large"]), len(params["small"])) == (9000, 9)
            assert store.latest() == max(found, default=None)
        assert found.keys() >= self.found.keys()
        assert all(found[step] >= number for step, number in dict(acked).items())
        self.found = found


CHECKS = {"loop": Saves, "sweep": Sweeps, "export": Exports, "import_": Imports}


def kill_often(count, mode, tmp_path, worker, worker_module, same):
    """Kill as many workers, every other one before anything of it need be safe; gives how much was safe."""
    draw = random.Random(mode)
    directory, acks, output = tmp_path / "run", tmp_path / "acks", tmp_path / "output"
    task, arguments = MODES[mode]
    checks = CHECKS[task](directory, arguments, worker_module, same)
    safe, took = 0, 0.1
    for number in range(count):
        acks.unlink(missing_ok=True)
        pid = worker.start(task, output, directory=directory, acks=acks, **arguments)
        deadline = time.monotonic() + 30
        while not acks.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        if number % 2:
            time.sleep(draw.uniform(0, 1.5 * took))
        else:
            begun = time.monotonic()
            while not acknowledged(acks) and time.monotonic() < deadline:
                time.sleep(0.001)
            took = time.monotonic() - begun
            time.sleep(draw.uniform(0, took))
        os.kill(pid, signal.SIGKILL)
        assert worker.end() == -signal.SIGKILL, output.read_text()
        acked = acknowledged(acks)
        safe += len(acked)
        checks.check(acked)
    return safe


@pytest.mark.parametrize("mode", MODES)
def test_some_random_kills(mode, tmp_path, worker, worker_module, same):
    assert kill_often(2, mode, tmp_path, worker, worker_module, same) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_many_random_kills(mode, tmp_path, worker, worker_module, same):
    assert kill_often(200, mode, tmp_path, worker, worker_module, same) >= 100


# Point -> the steps that are listed after it, when step 3 is saved with keep_last=2 (or 2 again).
POINTS = {
    "after_staging": [1, 2],
    "mid_arrays": [1, 2],
    "after_arrays": [1, 2],
    "before_seal": [1, 2],
    "before_manifest": [1, 2],
    "after_manifest": [1, 2],
    "before_rename": [1, 2],
    "mid_replace": [1],
    "after_rename": [1, 2, 3],
    "mid_retention": [2, 3],
    "mid_trash": [2, 3],
}


@pytest.mark.parametrize("point", POINTS)
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
    assert reader.steps() == POINTS[point]
    if point == "mid_replace":
        # And the next one is killed as it puts the old one back.
        env = {"STYRAX_CHECKPOINT_KILL": "mid_sweep"}
        assert worker.run("loop", output, env, directory=directory, acks=acks) == -signal.SIGKILL
        assert reader.steps() == [1, 2]
    found = survivors(directory, worker_module, same)
    assert sorted(found) == ([1, 2] if point == "mid_replace" else POINTS[point])
