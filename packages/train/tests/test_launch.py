"""Several processes of one command: heard together, ended together; and the files for clusters."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from styrax.core import UserError
from styrax.train.launch import KEPT, Ended, command_line, launch, template

TEMPLATES = ("slurm", "jobset", "skypilot")


def program(text):
    return [sys.executable, "-c", f"import os, signal, sys, time\nme = os.environ['STYRAX_PROCESS_ID']\n{text}"]


def test_all_run_with_what_they_need_and_say_who_they_are(capfd):
    text = "print('of', os.environ['STYRAX_NUM_PROCESSES'], os.environ['JAX_LOCAL_DEVICE_IDS'])"
    text += "\nsys.stderr.write('torn')"
    assert launch(program(text), 3, devices=2) == Ended(0, None, [])
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] of 3 0,1", "[1] of 3 2,3", "[2] of 3 4,5"]
    assert sorted(err.splitlines()) == ["[0] torn", "[1] torn", "[2] torn"]


def test_one_that_fails_ends_the_others_and_what_they_started(tmp_path, capfd):
    # Process 0 starts a child of its own and waits for ever; process 1 fails after both are there.
    text = f"""
import subprocess
mark = {str(tmp_path / "child")!r}
if me == "0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(mark + ".part", "w").write(f"{{os.getpid()}} {{child.pid}}")
    os.rename(mark + ".part", mark)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
while not os.path.exists(mark):
    time.sleep(0.01)
print("\\n".join(f"line {{n}}" for n in range(40)), file=sys.stderr)
sys.exit(7)
"""
    from styrax.train import launch as module

    before, module.GRACE = module.GRACE, 0.3
    try:
        ended = launch(program(text), 2)
    finally:
        module.GRACE = before
    assert (ended.code, ended.first) == (7, 1)
    assert ended.lines == [f"line {n}" for n in range(40 - KEPT, 40)]
    for pid in (tmp_path / "child").read_text().split():
        for _ in range(500):  # an orphan is reaped by the system a moment after its end
            state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
            if not state or state.startswith("Z"):
                break
            time.sleep(0.02)
        assert not state or state.startswith("Z"), state


def test_a_signal_goes_to_all_and_is_not_a_failure_of_one(tmp_path):
    text = f"""
def stop(number, frame):
    print("heard", me, flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
open({str(tmp_path)!r} + "/ready-" + me, "w").close()
time.sleep(600)
"""
    command = [sys.executable, "-c", "import sys; from styrax.core.cli import main; sys.exit(main())"]
    process = subprocess.Popen(
        [*command, "launch", "-n", "2", "--", *program(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["[0] heard 0", "[1] heard 1"]
    assert err == ""


def test_who_was_killed_is_named(tmp_path):
    text = """
if me == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    ended = []
    from styrax.train import launch as module

    before, module.GRACE = module.GRACE, 0.2
    thread = threading.Thread(target=lambda: ended.append(launch(program(text), 2)))  # outside the main thread too
    thread.start()
    thread.join(timeout=60)
    module.GRACE = before
    assert ended == [Ended(128 + signal.SIGKILL, 1, [])]


def test_a_program_that_is_not_there():
    with pytest.raises(UserError, match="no program is named 'trian'"):
        command_line(["trian"])
    with pytest.raises(UserError, match="say what to start"):
        command_line([])


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_have_the_command_and_nothing_is_left_open(name):
    text = template(name, ["train", "my run.toml", 'optim.x="y"'], 4)
    assert not re.search(r"@[A-Z_]+@", text)
    assert "train 'my run.toml'" in text


def test_the_slurm_template_is_a_script_that_gets_requeued(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(template("slurm", ["train", "my.toml"], 4))
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    # Run it with stand-ins for what Slurm has.
    for tool, code in (("srun", 130), ("scontrol", 0)):
        (tmp_path / tool).write_text(f'#!/bin/bash\necho {tool} "$@"\nexit {code}\n')
        (tmp_path / tool).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", path], capture_output=True, text=True, env=environment)
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines() == [
        "srun --kill-on-bad-exit=1 --label styrax train my.toml",
        "interrupted and saved; back into the queue",
        "scontrol requeue 17",
    ]
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", path.read_text(), re.MULTILINE))
    assert directives["nodes"] == "4"
    assert directives["signal"] == "TERM@120"  # no B: the steps get it, not the script alone
    assert "requeue" in directives


def test_the_jobset_template_is_what_jobset_documents():
    yaml = pytest.importorskip("yaml")
    whole = yaml.safe_load(template("jobset", ["train", "a.toml", 'x="1"'], 4))
    assert (whole["apiVersion"], whole["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (workers,) = whole["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    assert job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # all that a Job allows
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c", "exec styrax train a.toml 'x=\"1\"'"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    # <jobSet.name>-<replicatedJob.name>-<job-index>-<pod-index>.<subdomain>, the subdomain being the JobSet's name
    host = f"{whole['metadata']['name']}-{workers['name']}-0-0.{whole['metadata']['name']}"
    port = container["ports"][0]["containerPort"]
    assert variables["STYRAX_COORDINATOR"] == f"{host}:{port}"
    assert variables["STYRAX_NUM_PROCESSES"] == "4"
    assert all(mount["name"] in {v["name"] for v in pod["volumes"]} for mount in container["volumeMounts"])


def test_the_skypilot_template_is_what_skypilot_documents(tmp_path):
    yaml = pytest.importorskip("yaml")
    whole = yaml.safe_load(template("skypilot", [sys.executable, "-c", "import os; print(*sorted(k + '=' + v for k, v "
                                                 "in os.environ.items() if k[:7] == 'STYRAX_'))"], 2))  # fmt: skip
    assert set(whole) <= {"name", "num_nodes", "resources", "volumes", "setup", "run"}
    assert whole["num_nodes"] == 2
    recovery = whole["resources"]["job_recovery"]
    assert recovery["strategy"] in ("FAILOVER", "EAGER_NEXT_REGION")
    assert recovery["recover_on_exit_codes"] == [130]
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STYRAX_")} | nodes
    done = subprocess.run(["bash", "-c", whole["run"]], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [
        "STYRAX_CACHE=/shared/cache", "STYRAX_COORDINATOR=10.0.0.1:8476", "STYRAX_NUM_PROCESSES=2",
        "STYRAX_PROCESS_ID=1",
    ], done.stderr  # fmt: skip
