"""`styrax checkpoint rm` and `gc`: what goes, what stays, and what is left when they are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, Store, verify

STEPS = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm")
    with CheckpointConfig(keep_last=99).build(folder) as store:
        for step in STEPS:
            store.save(step, {"params": {"w": np.full(50, step), "b": np.ones(2)}})
    return folder


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def there(directory):
    return [int(path.name) for path in sorted(directory.glob("0*"))]


def size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def damage(path):
    path = path / "aux/leaves.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (("10",), [20, 30, 40]),
        (("00000010", "30"), [20, 40]),
        (("10:30",), [30, 40]),
        ((":20",), [20, 30, 40]),
        (("15:",), [10]),
        (("latest",), [10, 20, 30]),
        (("--keep-last", "1"), [40]),
        (("10:", "--keep-last", "2"), [30, 40]),
        (("--keep-last", "9"), [10, 20, 30, 40]),
        (("10:", "--force"), []),
        (("--keep-last", "0", "--force"), []),
    ],
)
def test_what_goes(directory, look, arguments, left):
    freed = sum(size(directory / f"{step:08d}") for step in STEPS if step not in left)
    dry = json.loads(look("rm", directory, *arguments, "--dry-run", "--json").out)
    assert there(directory) == list(STEPS)
    found = look("rm", directory, *arguments, "--json")
    assert found.code == 0 and there(directory) == left
    record = json.loads(found.out)
    assert record["deleted"] == dry["deleted"] == [step for step in STEPS if step not in left]
    assert record["bytes"] == dry["bytes"] == freed
    assert {path.name for path in directory.iterdir()} == {"LOCK", *(f"{step:08d}" for step in left)}
    with Store(directory) as store:  # whoever comes next finds all in order
        assert store.latest() == (left[-1] if left else None)


def test_in_words(directory, look):
    nbytes = size(directory / "00000010") + size(directory / "00000020")
    text = look("rm", f"{directory}@10", "20").out
    lines = text.splitlines()
    assert [line.rsplit(", ", 1)[0] for line in lines] == [
        "deleted step 10",
        "deleted step 20",
        "deleted 2 checkpoints",
    ]
    assert lines[-1].endswith(f"{nbytes / 1000:.1f} kB")
    assert look("rm", directory / "00000030", "--dry-run").out.startswith("would delete step 30, ")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "name what to delete"),
        (("50",), 1, "no checkpoint of step 50 in .*: there are 10, 20, 30, 40; nothing was deleted"),
        (("10", "11:20"), 1, "no checkpoint of step 11:20"),
        (("1O",), 2, "no step '1O'"),
        ((":",), 2, "no range ':'"),
        (("1:2:3",), 2, "no "),
        (("--keep-last", "-1"), 2, "--keep-last: expected"),
        (("10:",), 1, "step 40 is the last good checkpoint in .*: no other stays"),
        (("10:", "--dry-run"), 1, "step 40 is the last good checkpoint"),
    ],
)
def test_what_does_not_go(directory, look, arguments, code, text):
    found = look("rm", directory, *arguments)
    assert (found.code, found.out) == (code, "") and there(directory) == list(STEPS)
    for part in text.split(".*"):
        assert part in found.err


def test_what_stays_must_be_good(directory, look):
    for step in (10, 20):
        damage(directory / f"{step:08d}")
    found = look("rm", directory, "30:")
    assert found.code == 1 and "step 40 is the last good checkpoint" in found.err
    assert "those that stay (20, 10) are damaged" in found.err
    assert look("rm", directory, "40").code == 0  # 30 is good
    (directory / "00000030/MANIFEST.json").unlink()
    assert look("rm", directory, "10:").code == 0 and there(directory) == []  # nothing was good any more


def test_a_writer_that_lives_is_named(directory, look):
    with CheckpointConfig().build(directory):
        found = look("rm", directory, "10")
        assert found.code == 1 and f"is being written by process {os.getpid()} on host" in found.err
        assert look("rm", directory, "10", "--dry-run").code == 0
        assert there(directory) == list(STEPS)
    assert look("rm", directory, "10").code == 0


def test_rm_that_is_killed_leaves_nothing_in_part(directory, look, env):
    command = [sys.executable, "-m", "styrax.core.cli", "checkpoint", "rm", directory, "10", "20"]
    done = subprocess.run(command, env={**env, "STYRAX_CHECKPOINT_KILL": "mid_trash"}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert there(directory) == [30, 40]  # both were renamed before the first was touched
    trash = sorted(directory.glob(".trash-*"))
    assert [path.name.split("-")[1] for path in trash] == ["00000010", "00000020"]
    nbytes = sum(map(size, trash))
    dry = look("gc", directory, "--dry-run", "--json")
    assert json.loads(dry.out)["bytes"] == nbytes and len(list(directory.glob(".trash-*"))) == 2
    found = look("gc", directory)
    assert found.code == 0 and f"{nbytes / 1000:.1f} kB freed" in found.out
    assert {path.name for path in directory.iterdir()} == {"LOCK", "00000030", "00000040"}
    assert look("gc", directory).out == f"nothing was left behind in {directory}\n"


def test_gc_puts_back_what_was_being_replaced(directory, look):
    (directory / "00000040").rename(directory / ".replaced-00000040-0123456789abcdef")
    shutil.copytree(directory / "00000030", directory / ".staging-00000050-0123456789abcdef")
    dry = json.loads(look("gc", directory, "--dry-run", "--json").out)
    assert [one["fate"] for one in dry["found"]] == ["put back", "delete"]
    found = look("gc", directory.parent / "run")
    assert found.out.startswith(f"put back {directory}/.replaced-00000040-0123456789abcdef, ")
    assert there(directory) == list(STEPS) and verify(directory / "00000040") == []
    assert {path.name for path in directory.iterdir()} == {"LOCK", *(f"{step:08d}" for step in STEPS)}


def test_gc_takes_nothing_from_a_writer_that_lives(directory, look):
    with CheckpointConfig().build(directory):
        (directory / ".staging-00000050-0123456789abcdef").mkdir()
        found = look("gc", directory)
        assert found.code == 1 and f"process {os.getpid()}" in found.err
        assert (directory / ".staging-00000050-0123456789abcdef").is_dir()


def test_gc_needs_no_lock_where_nobody_saves(tmp_path, look):
    assert look("gc", tmp_path).code == 0 and list(tmp_path.iterdir()) == []


def old(path):
    for one in (*(path.rglob("*") if path.is_dir() else ()), path):
        os.utime(one, (time.time() - 7200,) * 2)


def test_gc_of_exports(tmp_path, look):
    hexed = "0123456789abcdef"
    shards = {name: tmp_path / name for name in (f".m-{hexed}", f".lost-{hexed}-old", f".had-{hexed}-old")}
    for folder in shards.values():
        folder.mkdir()
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "had").mkdir()
    files = [tmp_path / f".a.safetensors-{hexed}", tmp_path / f".b.npz-{hexed}", tmp_path / f".live.npz-{hexed}"]
    others = [tmp_path / f".cache-{hexed}", tmp_path / ".a.npz-0123", tmp_path / f"a.npz-{hexed}"]
    for path in (*files, *others):
        path.write_bytes(b"x" * 10)
    strange = tmp_path / f".venv-{hexed}"
    strange.mkdir()
    (strange / "pyvenv.cfg").touch()
    for path in (*shards.values(), *files[:2], *others, strange):
        old(path)
    found = look("gc", tmp_path)
    assert found.code == 0 and "an export may be going on" in found.out and "40 B freed" in found.out
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"had", "lost", files[2].name, strange.name, *(path.name for path in others)}
    assert (tmp_path / "lost/model-00001-of-00002.safetensors").read_bytes() == b"x" * 10


def test_an_export_that_is_killed_is_swept(directory, look, run_python, tmp_path):
    code = """
import os, sys
import numpy as np
from styrax.checkpoint import formats
def leave(path, nbytes):
    os.kill(os.getpid(), 9)
formats.write(sys.argv[1], {"w": np.ones(3)}, progress=leave)
"""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("m.safetensors", "m.npz", "m"):
        assert run_python(code, out / name).returncode == -signal.SIGKILL
    assert len(list(out.iterdir())) == 3
    assert "an export may be going on" in look("gc", out).out and len(list(out.iterdir())) == 3
    for path in out.iterdir():
        old(path)
    assert look("gc", out).code == 0 and list(out.iterdir()) == []
