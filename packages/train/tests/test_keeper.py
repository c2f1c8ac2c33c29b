"""Processes of a launcher that is killed: real ones, by a real SIGKILL."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from styrax.train.keeper import alive, listen

LAUNCHER = """
import sys
from styrax.train import launch
launch.SAVING = float(sys.argv[1])
launch.launch(sys.argv[2:], 2)
"""


def program(text):
    start = "import os, signal, subprocess, sys, time\nme = os.environ['STYRAX_PROCESS_ID']\n"
    return [sys.executable, "-c", start + text]


def gone(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return not state or state.startswith("Z")  # nobody may be there to reap it


def until(condition):
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("did not come")


@pytest.fixture
def launched(tmp_path):
    """Starts a launcher of two processes, and gives it and the pids that they write into files, when they are there."""
    started = []

    def start(text, files, grace=60.0):
        text = f"""
def say(pid):
    mark = {str(tmp_path)!r} + f"/pid-{{pid}}"
    open(mark, "w").close()
{text}"""
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(grace), *program(text)], stdout=subprocess.PIPE, text=True
        )
        until(lambda: process.poll() is not None or len(list(tmp_path.glob("pid-*"))) == files)
        assert process.poll() is None
        started.extend(int(path.name[4:]) for path in tmp_path.glob("pid-*"))
        return process, list(started)

    yield start
    for pid in started:  # only what a failed test has left
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_they_end_as_by_sigterm_and_may_still_speak(launched, tmp_path):
    # Much more than a pipe holds: nobody reads it but the keeper, and nothing of it may fail.
    process, pids = launched(
        f"""
def stop(number, frame):
    for _ in range(100):
        print("x" * 10_000, flush=True)
        print("x" * 10_000, file=sys.stderr, flush=True)
    open({str(tmp_path)!r} + f"/saved-{{me}}", "w").write(signal.Signals(number).name)
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
say(os.getpid())
time.sleep(600)
""",
        files=2,
    )
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, pids)))
    assert [(tmp_path / f"saved-{number}").read_text() for number in "01"] == ["SIGTERM", "SIGTERM"]


def test_who_does_not_hear_is_killed_with_what_it_started(launched):
    process, pids = launched(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # ignores it too
say(os.getpid())
say(child.pid)
time.sleep(600)
""",
        files=4,
        grace=0.3,
    )
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, pids)))


def test_what_is_left_of_one_that_ended_is_ended_too(launched):
    # Process 1 ends at once and leaves a child in its group, which the launcher lets run while process 0 does.
    process, pids = launched(
        """
if me == "1":
    say(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    sys.exit()
say(os.getpid())
time.sleep(600)
""",
        files=2,
    )
    assert not any(map(gone, pids))
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, pids)))


def heard(*words):
    ours, theirs = socket.socketpair()
    found = []
    thread = threading.Thread(target=lambda: found.extend(listen(theirs)))
    thread.start()
    with ours:
        for word in words:
            ours.sendall(word)
    thread.join(timeout=30)
    theirs.close()
    return found


def test_a_launcher_that_is_done_has_nothing_ended():
    assert heard(b"+71\n+", b"72\n", b"-71\n") == [{72}, []]
    assert heard(b"+71\n+72\n", b"done\n") == [set(), []]
    assert heard() == [set(), []]


def test_a_group_is_there_as_long_as_anybody_is_in_it():
    text = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print(1, flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", text], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.read(1)
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert alive(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    assert not alive(2**22 + 1)  # above any number that a system gives
