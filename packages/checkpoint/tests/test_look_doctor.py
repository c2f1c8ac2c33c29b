"""`styrax checkpoint doctor`: each thing that can be wrong with a folder is found, and a sound one is called so."""

import collections
import dataclasses
import datetime
import json
import os
import re
import shutil
import socket
import subprocess

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, host
from styrax.checkpoint.commit import publish
from styrax.checkpoint.doctor import examine
from styrax.checkpoint.manifest import read_manifest


@pytest.fixture(autouse=True)
def plain_disk(tmp_path, monkeypatch):
    """The tests' folder may lie on anything; here it is an ordinary disk."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text("22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(host, "_MOUNTS", mounts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    with CheckpointConfig(keep_last=99).build(folder) as store:
        for step in (1, 2, 3):
            store.save(step, {"params": {"w": np.full(50, step), "b": np.ones(2)}})
    return folder


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def one(directory, subject, **options):
    """The only finding about a subject."""
    (found,) = [finding for finding in examine(directory, **options) if finding.subject == subject]
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def rewrite(directory, step, **changes):
    """Give a checkpoint another manifest."""
    folder = directory / f"{step:08d}"
    manifest = dataclasses.replace(read_manifest(folder), **changes)
    (folder / "MANIFEST.json").unlink()
    staging = directory / f".staging-{step:08d}-00"
    folder.rename(staging)
    publish(staging, manifest)


def test_a_sound_folder(directory, look):
    for deep in (False, True):
        assert {finding.severity for finding in examine(directory, deep=deep)} == {"ok"}
    found = look("doctor", directory.parent / "run")
    assert found.code == 0 and found.out.endswith("0 problems, 0 notes\n")
    record = json.loads(look("doctor", directory, "--json").out)
    assert record["problems"] == 0 and record["findings"][0] == {
        "severity": "ok",
        "subject": "file system",
        "text": "ext4",
        "cure": "",
    }
    assert "every digest fits" in one(directory, "damaged", deep=True).text


def test_an_empty_folder(tmp_path, look):
    (tmp_path / "new").mkdir()
    assert one(tmp_path / "new", "fallback").text == "there is no checkpoint yet"
    assert one(tmp_path / "new", "lock").text == "nobody has ever written here"
    assert look("doctor", tmp_path / "new").code == 0
    assert list((tmp_path / "new").iterdir()) == []
    assert "is not a folder" in look("doctor", tmp_path / "none").err
    with pytest.raises(CheckpointError, match="is not a folder"):
        examine(tmp_path / "none")


def test_damage_of_sizes_and_of_bytes(directory, look):
    flip(directory / "00000003/aux/leaves.bin")
    assert look("doctor", directory).code == 0
    found = look("doctor", directory, "--deep")
    assert found.code == 1 and "step 3: aux/leaves.bin: digest" in found.out and "(leaf params/b)" in found.out
    assert one(directory, "fallback", deep=True).text == "step 3 is not whole: a run would go on from step 2"
    (directory / "00000002/aux/leaves.bin").write_bytes(b"")
    assert one(directory, "damaged").text.startswith("step 2: aux/leaves.bin: 0 bytes, expected ")
    assert one(directory, "fallback").severity == "ok"  # by their sizes, steps 3 and 1
    for step in (1, 3):
        (directory / f"{step:08d}/aux/leaves.bin").unlink()
    assert one(directory, "fallback").text.startswith("none of 3 checkpoints")
    assert look("doctor", directory).code == 1


def test_steps_without_a_manifest(directory):
    (directory / "00000002/MANIFEST.json").unlink()
    found = one(directory, "incomplete")
    assert found.severity == "problem" and "missing in 00000002" in found.text


def test_one_checkpoint_is_no_fallback(directory, look):
    look("rm", directory, "--keep-last", 1)
    found = one(directory, "fallback")
    assert found.severity == "note" and "keep_last" in found.cure


def test_space(directory, monkeypatch):
    nbytes = read_manifest(directory / "00000003").nbytes
    usage = collections.namedtuple("usage", "free")
    for free, severity in ((nbytes - 1, "problem"), (2 * nbytes, "note"), (3 * nbytes, "ok")):
        monkeypatch.setattr("styrax.checkpoint.doctor.shutil.disk_usage", lambda path, free=free: usage(free))
        assert one(directory, "space").severity == severity
    monkeypatch.setattr(host, "free_inodes", lambda path: 1)
    found = one(directory, "space")
    assert found.severity == "problem" and found.text.startswith("1 more files can be made")


def test_who_may_write(directory, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "this user may not write here" in one(directory, "writable").text
    monkeypatch.setattr(host, "read_only", lambda path: True)
    found = one(directory, "writable")
    assert found.severity == "problem" and "read only" in found.text


def test_a_lock_that_is_held_is_seen_and_not_taken(directory, monkeypatch):
    assert one(directory, "lock").severity == "ok" and "had it last" in one(directory, "lock").text
    with CheckpointConfig().build(directory):
        (directory / ".staging-00000004-0123456789abcdef").mkdir()
        monkeypatch.setattr("fcntl.flock", lambda *args: pytest.fail("the lock was touched"))
        found = one(directory, "lock")
        assert found.severity == "note"
        assert found.text.startswith(f"held by process {os.getpid()} on host {socket.gethostname()} (")
        lines = host._LOCKS.read_text().replace(f" {os.getpid()} ", " 1 ").splitlines()
        ours = [line for line in lines if line.split()[5].endswith(f":{(directory / 'LOCK').stat().st_ino}")]
        elsewhere = directory.parent / "locks"
        for text, held in (
            (ours[0], True),
            (re.sub(r" \w+:\w+:", " ff:ff:", ours[0]), False),  # another device, another process
            (re.sub(r" 1 \w+:\w+:", f" {os.getpid()} ff:ff:", ours[0]), True),  # as on overlay
            (ours[0].replace("FLOCK", "-> FLOCK"), False),
        ):
            elsewhere.write_text(text + "\n")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(host, "_LOCKS", elsewhere)
                assert host.lock_state(directory).held is held
        left = one(directory, "leftovers")
        assert "the writer that holds the lock" in left.text and left.cure == ""


def test_a_lock_of_the_dead_and_of_other_machines(directory, monkeypatch):
    owner = json.loads((directory / "LOCK").read_text())
    with subprocess.Popen(["true"]) as process:
        dead = process.pid
    for changes, severity, text in (
        ({"pid": dead}, "ok", f"free; process {dead} on host {owner['host']} had it last, and has ended"),
        ({"boot": "another"}, "ok", "and has ended"),
        ({"host": "far-away"}, "note", "on host far-away .*which cannot be asked from here"),
    ):
        (directory / "LOCK").write_text(json.dumps(owner | changes))
        found = one(directory, "lock")
        assert found.severity == severity and re.search(text, found.text)
    (directory / "LOCK").write_text("{")
    assert one(directory, "lock").text == "free"
    monkeypatch.setattr(host, "_LOCKS", directory / "none")  # as on a system that does not list its locks
    (directory / "LOCK").write_text(json.dumps(owner))
    assert "which still runs" in one(directory, "lock").text


def test_leftovers(directory):
    (directory / ".trash-00000009-0123456789abcdef").mkdir()
    (directory / ".trash-00000009-0123456789abcdef/a").write_bytes(b"x" * 1500)
    found = one(directory, "leftovers")
    assert found.severity == "note" and "1.5 kB, of writers that were killed" in found.text
    (directory / ".trash-00000009-0123456789abcdef/a").unlink()
    (directory / ".trash-00000009-0123456789abcdef").rmdir()
    (directory / "00000003").rename(directory / ".replaced-00000003-0123456789abcdef")
    found = one(directory, "leftovers")
    assert found.severity == "problem" and "has lost its name" in found.text and "gc" in found.cure


def test_what_does_not_belong(directory):
    (directory / "notes.txt").touch()
    (directory / "00000002/aux/extra").touch()
    (directory / "123").mkdir()
    found = one(directory, "foreign")
    assert found.severity == "note" and found.text.startswith("123, notes.txt, 00000002/aux/extra do not belong")


def test_the_clock(directory):
    future = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    rewrite(directory, 2, created=future.strftime("%Y-%m-%dT%H:%M:%SZ"))
    found = one(directory, "clock")
    assert found.severity == "note" and found.text.startswith("step 2 was made in the future")
    rewrite(directory, 2, created="once upon a time")
    assert one(directory, "clock").severity == "ok"


def test_versions(directory):
    writer = read_manifest(directory / "00000003").writer
    rewrite(directory, 3, writer={**writer, "versions": {"numpy": "99.1", "jax": "0.0.1", "no-such-thing": "1"}})
    found = one(directory, "versions")
    assert found.severity == "note"
    assert f"numpy 99.1, here {np.__version__}; no-such-thing 1, here not installed" in found.text
    assert "jax" not in found.text


@pytest.mark.parametrize(
    ("mounts", "severity", "text"),
    [
        ("30 22 0:9 / {} rw - tmpfs tmpfs rw", "note", "tmpfs: it is memory"),
        ("30 22 0:9 / {} rw shared:5 - fuse.gcsfuse b rw", "problem", "fuse.gcsfuse: a bucket"),
        ("30 22 0:9 / {} rw - fuse.sshfs b rw", "note", "fuse.sshfs: what fsync and rename do"),
        ("30 22 0:9 / {} rw - xfs b rw\n31 30 0:9 / {}/more rw - tmpfs b rw", "ok", "xfs"),
        ("30 22 0:9 / {} rw - tmpfs b rw\n31 22 0:9 / {} rw - xfs b rw", "ok", "xfs"),  # mounted over it
        ("30 22 0:9 / /elsewhere rw - tmpfs b rw\nnonsense", "ok", "ext4"),
    ],
)
def test_file_systems(tmp_path, mounts, severity, text):
    folder = tmp_path / "a b"
    folder.mkdir()
    place = str(folder).replace(" ", "\\040")
    with host._MOUNTS.open("a") as handle:
        handle.write(mounts.replace("{}", place) + "\n")
    found = one(folder, "file system")
    assert found.severity == severity and found.text.startswith(text)


def test_a_system_that_does_not_list_its_mounts(directory, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_MOUNTS", tmp_path / "none")
    assert one(directory, "file system").text == "of unknown type"
