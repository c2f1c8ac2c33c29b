"""Several real processes save one checkpoint on a shared folder, agree on what happened, and none hangs."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from styrax.checkpoint import CheckpointConfig, Store

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")]
PEERS = Path(__file__).with_name("peers.py")
HANG = 150  # seconds; in the strikes less than the 100 after which jax ends a process whose peer is gone


@pytest.fixture
def peers(env):
    """Run a task of `peers.py` on some processes; gives code, output, errors and time of the end of each."""
    started = []

    def run(task, count, directory, *, devices=2, wait_for=None, hang=HANG, **arguments):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {**env, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        processes = [
            subprocess.Popen(
                [sys.executable, PEERS, task, str(index), str(count), str(port), directory, json.dumps(arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]
        started.extend(processes)
        ended = [None] * count

        def follow(number, process):
            out, errors = process.communicate()
            ended[number] = SimpleNamespace(code=process.returncode, out=out, errors=errors)

        threads = [threading.Thread(target=follow, args=each) for each in enumerate(processes)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + hang
        for number in range(count) if wait_for is None else wait_for:
            threads[number].join(max(deadline - time.monotonic(), 0))
        late = [number for number in (range(count) if wait_for is None else wait_for) if ended[number] is None]
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        assert not late, f"{late} hang: {[(each.out, each.errors[-2000:]) for each in ended]}"
        return ended

    yield run
    for process in started:
        process.kill()


def well(ended):
    for number, each in enumerate(ended):
        assert each.code == 0 and each.out.endswith("done\n"), (number, each.code, each.out, each.errors[-3000:])


LAYOUTS = [(1, 8), (1, 1), (2, 4), (2, 3), (4, 1)]


@pytest.mark.parametrize("profile", ["local", "shared"])
def test_from_any_number_of_processes_to_any_other(profile, tmp_path, peers):
    for number, (count, devices) in enumerate([(1, 8), (2, 4)]):
        source = tmp_path / f"source-{number}"
        well(peers("save", count, source, devices=devices, profile=profile, pack_below=100))
        for to, each in LAYOUTS:
            directory = tmp_path / f"copy-{number}-{to}-{each}"
            shutil.copytree(source, directory)
            well(peers("restore", to, directory, devices=each))


def told(each):
    """The error that a process was told of."""
    text = each.out.partition("told ")[2]
    assert text, (each.code, each.out, each.errors[-3000:])
    return text


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["stage", "write", "seal"])
def test_one_raises_and_all_raise(phase, victim, tmp_path, peers):
    ended = peers("strike", 2, tmp_path / "run", victim=victim, phase=phase, how="raise", hang=60)
    assert "No space left" in ended[victim].errors or "no space is left" in ended[victim].errors
    text = told(ended[1 - victim])
    assert f"process {victim} failed: the checkpoint of step 2 cannot be written" in text
    assert "no space is left" in text
    assert [each.code for each in ended] == [1, 1]
    resumable(tmp_path / "run")


def resumable(directory):
    """One process goes on from what is left by several."""
    with CheckpointConfig().build(directory) as store:
        assert not list(directory.glob(".*"))
        found = store.resume(params=None, local=None)
        assert found.step == 1 and found["run"] == {"step": 1} and not found.passed_over
        store.save(2, {"params": found["params"]})
        store.wait()
        assert store.steps() == [1, 2] and store.verify(2) == []


@pytest.mark.parametrize("phase", ["stage", "write", "seal"])
def test_one_is_killed_and_the_others_raise(phase, tmp_path, peers):
    ended = peers("strike", 3, tmp_path / "run", devices=2, victim=1, phase=phase, how="kill", hang=60)
    assert ended[1].code == -signal.SIGKILL
    for number in (0, 2):
        text = told(ended[number])
        assert "process 1" in text
        assert ended[number].code == 1
    resumable(tmp_path / "run")


@pytest.mark.parametrize("phase", ["stage", "seal"])
def test_the_first_is_killed(phase, tmp_path, peers):
    """jax itself may end the others then, for the first is its coordinator; they must not hang."""
    ended = peers("strike", 2, tmp_path / "run", victim=0, phase=phase, how="kill", hang=60)
    assert ended[0].code == -signal.SIGKILL and ended[1].code != 0
    resumable(tmp_path / "run")


@pytest.mark.parametrize("phase", ["stage", "write"])
def test_one_is_stopped(phase, tmp_path, peers):
    ended = peers("strike", 2, tmp_path / "run", wait_for=[0], victim=1, phase=phase, how="stop", hang=90)
    text = told(ended[0])
    assert "process 1 has not answered for 25 s" in text
    assert ended[0].code == 1 and "this process ends without waiting for it" in ended[0].errors
    resumable(tmp_path / "run")


def test_nobody_waits_for_a_save_that_fails(tmp_path, peers):
    ended = peers("leave", 2, tmp_path / "run", victim=1)
    assert ended[0].code not in (0, -signal.SIGKILL)
    assert "error: the checkpoint of step 1 is lost: process 1" in ended[0].errors
    assert Store(tmp_path / "run", read_only=True).steps() == []


def test_a_folder_that_is_not_shared(tmp_path, peers):
    ended = peers("apart", 2, tmp_path / "run")
    assert [each.code for each in ended] == [1, 1]
    assert "process 1 on " in ended[1].errors and "does not see what process 0 wrote in" in ended[1].errors
    assert "all of them share" in ended[1].errors
    assert "process 1 failed" in ended[0].errors
    assert "opened" not in ended[0].out + ended[1].out


def test_damage_that_one_process_sees(tmp_path, peers):
    well(peers("save", 2, tmp_path / "run"))
    ended = peers("damage", 2, tmp_path / "run")
    well(ended)
    for each in ended:
        assert "cut off here" in each.out and "params/even is not what was saved" in each.out


def test_positions_of_iterators(tmp_path, peers):
    well(peers("position", 2, tmp_path / "run"))
    for count in (1, 3):
        ended = peers("position", count, tmp_path / "run")
        well(ended)
        for each in ended:
            assert f"each of 2 processes had a position of its own and now there are {count}" in each.out
    found = Store(tmp_path / "run", read_only=True).restore(1, {"run": None})
    assert found == {"run": {"a": 1}}


def test_what_a_caller_raises(tmp_path, peers):
    ended = peers("raising", 2, tmp_path / "run", hang=60)
    well(ended)
    for each in ended:
        first, second = [line for line in each.out.splitlines() if line.startswith("told")]
        assert "mine" in first and "step 1 cannot be written" in first
        assert "yours" in second
    assert "told CheckpointError process 1 failed: 'yours'" in ended[0].out
    assert "told KeyError 'yours'" in ended[1].out


def test_they_agree_on_the_time(tmp_path, peers):
    well(peers("due", 2, tmp_path / "run"))
