"""SIGKILL at any instant, and the run that comes out is the one that was never killed."""

import random
import shutil
import time

import pytest
from support import assert_same_run


def events(run):
    path = run / "events.jsonl"
    return path.read_text() if path.exists() else ""


class Phases:
    """Conditions to wait for before the kill, by name; each is true at some instant of a start."""

    def __init__(self, run, before):
        self.run, self.starts, self.compiles = run, before.count('"start"'), before.count('"compile"')

    def restore(self):
        return (self.run / "config.toml").exists() and events(self.run).count('"start"') == self.starts

    def compile(self):
        text = events(self.run)
        return text.count('"start"') > self.starts and text.count('"compile"') == self.compiles

    def log(self):
        return events(self.run).count('"compile"') > self.compiles

    def save(self):
        folder = self.run / "checkpoints"
        return self.log() and folder.exists() and any(p.name.startswith(".") for p in folder.iterdir() if p.is_dir())


def kill_until_done(styrax, config, run, seed, kills):
    """Start, wait for a phase and a random moment, kill, repeat; at last let it end. Returns kills by phase."""
    rng, done = random.Random(seed), {}
    for number in range(kills):
        phase = ("restore", "compile", "save", "log")[number % 4]
        process = styrax.start("train", config, "--run", run)
        reached, limit = getattr(Phases(run, events(run)), phase), time.monotonic() + 60
        while process.poll() is None and not reached() and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(rng.random() * (0.1 if phase == "save" else 0.6))
        alive = process.poll() is None
        process.kill()
        _, err = process.communicate()
        assert alive or process.returncode == 0, err
        if not alive:
            break
        done[phase] = done.get(phase, 0) + 1
    styrax("train", config, "--run", run)
    return done


def test_killed_runs_end_as_the_uninterrupted_one(styrax):
    config = styrax.config(train__steps=60, checkpoint__every=2, train__eval_every=20)
    styrax("train", config, "--run", styrax.folder / "straight")
    done = kill_until_done(styrax, config, styrax.folder / "run", seed=1, kills=4)
    assert sum(done.values()) >= 3
    assert_same_run(styrax.folder / "run", styrax.folder / "straight")


@pytest.mark.slow
def test_twenty_five_kills(styrax):
    config = styrax.config(train__steps=400, checkpoint__every=1, train__eval_every=50)
    straight = styrax.folder / "straight"
    styrax("train", config, "--run", straight)
    total: dict[str, int] = {}
    for seed in range(20):
        run = styrax.folder / f"run-{seed}"
        for phase, count in kill_until_done(styrax, config, run, seed, kills=26).items():
            total[phase] = total.get(phase, 0) + count
        assert_same_run(run, straight)
        shutil.rmtree(run)
        if sum(total.values()) >= 25:
            break
    print(f"kills by phase: {total}")
    assert sum(total.values()) >= 25
    assert total.keys() == {"restore", "compile", "save", "log"}
