"""Real processes: they train as one does, stop together, end when one dies, and go on in any number."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import arrays, assert_same_run, lines

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")]
PROMPT = 60.0  # seconds within which the rest of a job has ended when one process has


class Job:
    """``styrax launch`` of the tiny run, with what it said in a file."""

    def __init__(self, styrax, config, run, processes, devices):
        self.run, self._said = run, (styrax.folder / f"{run.name}-said.txt").open("w+")
        self.process = styrax.start(
            "launch", "-n", processes, "--devices-per-process", devices, "--", "train", config, "--run", run,
            out=self._said,
        )  # fmt: skip

    def children(self):
        """Pids of the processes of the job, in order of their numbers; those that are there by now."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)]
        listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return sorted(int(line.split()[0]) for line in listed if "keeper.py" not in line)

    def reach(self, step):
        """Wait until a step was logged."""
        while not any(f'"step": {step},' in line for line in self.logged()):
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)

    def logged(self):
        path = self.run / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def end(self, within=300.0):
        return self.process.wait(timeout=within)

    def said(self):
        self._said.seek(0)
        return self._said.read()


def losses(run):
    return np.array([line["loss"] for line in lines(run)])


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def running(pids):
    """Those that have not ended; nobody may be there to reap what has lost its parent."""
    listed = [subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True) for pid in pids]
    return [pid for pid, each in zip(pids, listed) if each.stdout.strip() and each.stdout.strip()[0] != "Z"]


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_several_processes_have_the_curve_of_one(styrax, processes, devices):
    config = styrax.config(train__steps=12, train__sample_prompt='"def "', train__sample_tokens=5)
    styrax("train", config, "--run", "one", devices=4)
    job = Job(styrax, config, styrax.folder / "several", processes, devices)
    assert job.end() == 0, job.said()
    one, several = lines(styrax.folder / "one"), lines(styrax.folder / "several")
    assert [line["step"] for line in one] == [line["step"] for line in several]
    for a, b in zip(one, several):
        assert a.keys() == b.keys()
        np.testing.assert_allclose([*b.values()], [*a.values()], rtol=2e-4, atol=1e-6)
    names = {path.name for path in (styrax.folder / "one").iterdir()}
    assert {path.name for path in (styrax.folder / "several").iterdir()} == names
    assert len(json.loads((styrax.folder / "several" / "versions.json").read_text())) == 1  # one process wrote it
    assert "[0] step 12/12" in job.said()
    assert "[1] step" not in job.said()
    assert next((styrax.folder / "several" / "samples").iterdir()).read_text().startswith("def ")


LONG = {"train__steps": 300, "checkpoint__every": 1000, "train__eval_every": 0}


@pytest.fixture(scope="module")
def straight(here):
    """The run of two processes that was left alone."""
    job = Job(here, here.config(**LONG), here.folder / "straight", 2, 1)
    assert job.end() == 0, job.said()
    return job.run


@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_on_any_process_saves_everywhere(styrax, straight, number):
    config = styrax.config(**LONG)
    job = Job(styrax, config, styrax.folder / "run", 2, 1)
    job.reach(20)
    pids = job.children()
    os.kill(pids[number], signal.SIGTERM)
    assert job.end(PROMPT) == 130, job.said()
    assert f"[0] SIGTERM: saved at step {lines(job.run)[-1]['step']}" in job.said()
    assert alive(pids) == []
    again = Job(styrax, config, job.run, 2, 1)
    assert again.end() == 0, again.said()
    assert_same_run(job.run, straight)


def test_all_save_and_end_when_the_launcher_is_killed(styrax, straight):
    config = styrax.config(**LONG)
    job = Job(styrax, config, styrax.folder / "run", 2, 1)
    job.reach(20)
    pids = job.children()
    assert len(pids) == 2
    job.process.kill()
    job.end()
    deadline = time.monotonic() + PROMPT
    while running(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(pids) == []
    assert 20 <= arrays(job.run)[0] == lines(job.run)[-1]["step"] < 300  # nothing but the signal saves there
    again = Job(styrax, config, job.run, 2, 1)
    assert again.end() == 0, again.said()
    assert_same_run(job.run, straight)


def test_a_stop_file_ends_all(styrax):
    config = styrax.config(train__steps=100000, checkpoint__every=1000000, train__eval_every=0)
    job = Job(styrax, config, styrax.folder / "run", 2, 1)
    job.reach(5)
    (job.run / "STOP").touch()
    assert job.end(PROMPT) == 0, job.said()
    assert "STOP was found" in job.said()
    assert not (job.run / "STOP").exists()


def test_processes_with_other_data_refuse_to_train(styrax):
    """Started by hand, as on two machines of which one has another file."""
    from styrax.core.distributed import reserved_port

    one = styrax.config("one.toml", train__steps=5)
    two = styrax.config("two.toml", train__steps=5, data__sources=json.dumps([str(styrax.folder / "other")]))
    (styrax.folder / "other").mkdir()
    for path in styrax.corpus.iterdir():
        (styrax.folder / "other" / path.name).write_text(path.read_text().replace("a", "b"))
    with reserved_port() as port:
        started = []
        for number, config in enumerate((one, two)):
            environment = styrax.environment() | {
                "STYRAX_COORDINATOR": f"127.0.0.1:{port}", "STYRAX_NUM_PROCESSES": "2",
                "STYRAX_PROCESS_ID": str(number),
            }  # fmt: skip
            command = [styrax.executable, "train", config, "--run", "run", "checkpoint.every=1000"]
            started.append(
                subprocess.Popen(command, cwd=styrax.folder, env=environment, text=True, stderr=subprocess.PIPE)
            )
        said = [process.communicate(timeout=120)[1] for process in started]
    assert all(process.returncode for process in started)
    assert any("do not have the same config, data" in text for text in said), said


def kill_and_restart(styrax, config, run, rng, kills, shapes):
    """Start the job again and again, each time killing one of its processes at some moment; gives what happened."""
    happened, straight = [], 0
    while len(happened) < kills and straight < 3:
        processes, devices = shapes[len(happened) % len(shapes)]
        job = Job(styrax, config, run, processes, devices)
        moment = rng.uniform(0.2, 14.0)
        deadline = time.monotonic() + moment
        while time.monotonic() < deadline and job.process.poll() is None:
            time.sleep(0.02)
        pids = job.children()
        if job.process.poll() is not None or len(pids) < processes:
            job.end()
            straight += 1
            continue
        victim = rng.randrange(processes)
        os.kill(pids[victim], signal.SIGKILL)
        begin = time.monotonic()
        code = job.end(PROMPT)
        took = time.monotonic() - begin
        assert alive(pids) == []
        if code == 0:  # the victim had just ended
            break
        assert f"process {victim} of {processes} was ended by SIGKILL" in job.said(), job.said()
        happened.append((round(moment, 2), victim, len(job.logged()), round(took, 2)))
    return happened


def test_ten_kills_and_the_run_is_the_one_that_was_not_killed(styrax):
    seed = int(os.environ.get("STYRAX_TEST_SEED", time.time_ns() % 2**32))
    print(f"STYRAX_TEST_SEED={seed}")
    rng = random.Random(seed)
    config = styrax.config(train__steps=800, checkpoint__every=20, train__eval_every=0)
    straight = Job(styrax, config, styrax.folder / "straight", 2, 1)
    assert straight.end() == 0, straight.said()
    happened, number = [], 0
    while len(happened) < 10 and number < 10:
        run = styrax.folder / f"run-{number}"
        happened += kill_and_restart(styrax, config, run, rng, 10 - len(happened), [(2, 1)])
        last = Job(styrax, config, run, 2, 1)
        assert last.end() == 0, last.said()
        assert_same_run(run, straight.run)
        number += 1
    print("moment, victim, steps logged, seconds until the rest had ended:", happened)
    assert len(happened) == 10


def test_other_numbers_of_processes_go_on_with_the_same_data(styrax):
    config = styrax.config(train__steps=40, checkpoint__every=5, train__eval_every=0)
    styrax("train", config, "--run", "one", devices=4)
    run = styrax.folder / "run"
    for (processes, devices), step in (((4, 1), 12), ((2, 1), 24)):
        job = Job(styrax, config, run, processes, devices)
        job.reach(step)
        os.kill(job.children()[-1], signal.SIGKILL)
        assert job.end(PROMPT) != 0
    last = Job(styrax, config, run, 1, 4)
    assert last.end() == 0, last.said()
    assert [line["step"] for line in lines(run)] == list(range(1, 41))
    np.testing.assert_allclose(losses(run), losses(styrax.folder / "one"), rtol=2e-3)
    assert arrays(run)[1]["data"] == arrays(styrax.folder / "one")[1]["data"]
