"""A bucket: what it holds, in which order it changes, and what it says when it cannot."""

import contextlib
import datetime
import errno
import importlib.util
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, read_manifest
from styrax.checkpoint.manifest import FILE, step_name
from styrax.checkpoint.remote import Bucket, objects

pytest.importorskip("fsspec")
spec = importlib.util.spec_from_file_location("remote_faults", Path(__file__).with_name("remote_faults.py"))
faults = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))  # one for all test files
if not hasattr(faults, "Faulty"):
    spec.loader.exec_module(faults)
Faulty, URL, CHANGES, READS = faults.Faulty, faults.URL, faults.CHANGES, faults.READS
changes, contents, make, stored, wipe = faults.changes, faults.contents, faults.make, faults.stored, faults.wipe


quick, old, new, bucket = faults.quick, faults.old, faults.new, faults.bucket


@pytest.mark.parametrize("place", ["faulty", "file"])
@pytest.mark.parametrize("pack_below", [1000, 2**30], ids=["orbax", "packed"])
def test_there_and_back(place, pack_below, tmp_path, same):
    items = {"params": {"w": np.arange(5000, dtype=np.float32), "b": [np.int8(3)]}, "run": {"note": "é"}, "none": {}}
    with CheckpointConfig(pack_below=pack_below).build(tmp_path / "here") as store:
        for step in (3, 12):
            store.save(step, items, metrics={"loss": 0.1 * step})
    bucket = Bucket(URL if place == "faulty" else f"file://{tmp_path}/there/")
    assert (bucket.steps(), bucket.incomplete()) == ([], [])
    for step in (12, 3):
        bucket.upload(tmp_path / "here" / step_name(step), verify="readback")
    assert bucket.steps() == [3, 12]
    assert bucket.manifest(3) == read_manifest(tmp_path / "here" / "00000003")
    assert bucket.verify(12) == bucket.verify(12, mode="size") == []
    assert bucket.download(12, tmp_path / "again") == tmp_path / "again" / "00000012"
    assert contents(tmp_path / "again" / "00000012") == contents(tmp_path / "here" / "00000012")
    same(Store(tmp_path / "again", read_only=True).restore(12, dict.fromkeys(items)), items)
    bucket.delete(3)
    bucket.delete(3)
    assert (bucket.steps(), bucket.incomplete()) == ([12], [])
    if place == "faulty":
        assert set(stored()) == {f"00000012/{name}" for name in contents(tmp_path / "here" / "00000012")}
    else:
        assert contents(tmp_path / "there") == {
            f"00000012/{name}": data for name, data in contents(tmp_path / "here" / "00000012").items()
        }


def test_the_manifest_comes_last_and_goes_first(bucket, old, new):
    bucket.upload(old)
    order = [name for operation, name in changes() if operation in ("put_file", "pipe_file")]
    last = order.index(f"00000005/{FILE}")
    assert {f"00000005/{name}" for name in contents(old)} - {f"00000005/{FILE}"} <= set(order[:last])
    assert order[last + 1 :] == []

    Faulty.calls.clear()
    bucket.upload(new)
    assert changes()[0] == ("rm_file", f"00000005/{FILE}")
    assert stored(5) == contents(new)

    Faulty.calls.clear()
    bucket.delete(5)
    assert changes()[0] == ("rm_file", f"00000005/{FILE}")
    assert stored() == {}


def test_what_is_there_is_not_sent_again(bucket, old, tmp_path):
    events = []
    bucket.upload(old, progress=lambda *event: events.append(event))
    total = read_manifest(old).nbytes
    assert events[0] == ("upload", 0, total) and events[-1] == ("upload", total, total)
    Faulty.calls.clear()
    bucket.upload(old)
    assert changes() == []
    # An object that went missing is put back, and while it is missing the step is no checkpoint.
    del Faulty.store["/bucket/run/00000005/aux/run.json"]
    bucket.upload(old)
    assert stored(5) == contents(old)


def test_an_upload_goes_on_where_another_process_left_it(bucket, old, monkeypatch):
    monkeypatch.setattr("styrax.checkpoint.remote.sending._JOURNAL_BYTES", 1)
    bucket = Bucket(URL, workers=1, attempts=1)

    def before(operation, name):
        if operation == "put_file" and name.endswith("data"):
            raise OSError("cut off")

    Faulty.before = staticmethod(before)
    with pytest.raises(CheckpointError, match=r"cannot write unsteady://bucket/run/00000005/orbax/.*data.*cut off"):
        bucket.upload(old)
    assert (bucket.steps(), bucket.incomplete()) == ([], [5])
    sent = {name for operation, name in changes() if operation == "put_file"} - {"00000005/orbax/params/d/data"}
    assert sent
    Faulty.before = None
    Faulty.calls.clear()
    Bucket(URL).upload(old)
    assert not sent & {name for operation, name in changes() if operation == "put_file"}
    assert stored(5) == contents(old)


def test_nothing_of_another_upload_of_the_same_step_is_taken_over(old, new, tmp_path):
    """All files of the two have the same names and sizes, so only the record of the upload tells them apart."""
    (old / "aux" / "leaves.bin").unlink(missing_ok=True)
    for n in range(1, 12):
        wipe()
        count = itertools.count(1)

        def before(operation, name, count=count, n=n):
            if operation in CHANGES and next(count) >= n:
                raise OSError("cut off")

        Faulty.before = staticmethod(before)
        with contextlib.suppress(CheckpointError):
            Bucket(URL, workers=1, attempts=1).upload(old)
        Faulty.before = None
        Bucket(URL).upload(new)
        assert stored(5) == contents(new)
        assert Bucket(URL).verify(5) == []


def test_sweeping_what_was_cut_off(bucket, old, new, tmp_path):
    bucket.upload(make(tmp_path / "whole", 9, seed=3))
    for step in (6, 7):
        Faulty().pipe_file(f"/bucket/run/{step_name(step)}/aux/run.json", b"half")
        Faulty().pipe_file(f"/bucket/run/{step_name(step)}/UPLOAD.json", b"{}")
    for file in Faulty.store.values():
        file.modified -= datetime.timedelta(hours=30)
    Faulty().pipe_file("/bucket/run/00000007/orbax/other", b"just now")
    assert bucket.incomplete() == [6, 7]
    assert bucket.sweep() == [6]
    assert (bucket.steps(), bucket.incomplete()) == ([9], [7])
    assert bucket.sweep(older_than=0) == [7]
    assert set(stored()) == {f"00000009/{name}" for name in contents(tmp_path / "whole" / "00000009")}

    found = []

    def before(operation, name):
        if operation == "put_file" and name.endswith("data"):
            Faulty.before = None
            time.sleep(0.001)
            found.append(bucket.sweep(older_than=0))

    Faulty.before = staticmethod(before)
    bucket.upload(old)
    assert found == [[]]
    assert stored(5) == contents(old)


def test_a_folder_in_use_is_not_downloaded_into(bucket, old, tmp_path):
    bucket.upload(old)
    with Store(tmp_path / "busy"), pytest.raises(CheckpointError, match="is being written by process"):
        bucket.download(5, tmp_path / "busy")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match=r"step 5 cannot be downloaded in .*file"):
        bucket.download(5, tmp_path / "file")


class NoCredentialsError(Exception):
    """As botocore has it."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Forbidden"), "access is denied (PermissionError: Forbidden); check the credentials"),
        (NoCredentialsError("Unable to locate"), "no credentials were found (NoCredentialsError: Unable to locate)"),
        (FileNotFoundError("The specified bucket does not exist"), "there is no such bucket; make it"),
        (OSError(errno.ENOSPC, "No space left"), "no space is left there; free some"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_say_where_why_and_what_to_do(error, message, bucket, old):
    def before(operation, name):
        raise error

    Faulty.before = staticmethod(before)
    for call in (bucket.steps, lambda: bucket.upload(old), lambda: bucket.delete(5), lambda: bucket.manifest(5)):
        Faulty.calls.clear()
        with pytest.raises(CheckpointError) as caught:
            call()
        assert f"{URL}" in str(caught.value) and message in str(caught.value)
        assert caught.value.__cause__ is error
        assert len(Faulty.calls) == 1, "an error that lasts is not tried again"


def test_what_is_no_bucket(tmp_path):
    with pytest.raises(CheckpointError, match=r"'runs/a' is no URL; expected one such as s3://"):
        Bucket("runs/a")
    with pytest.raises(CheckpointError, match="nosuch://a: "):
        Bucket("nosuch://a")
    with pytest.raises(CheckpointError, match="workers: expected an integer, 1 or more, got 0"):
        Bucket(URL, workers=0)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in unsteady://bucket/run: there are none"):
        Bucket(URL).manifest(3)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        Bucket(URL).verify(3)


def test_a_file_appears_whole_in_a_folder_too(old, tmp_path, monkeypatch):
    """`file://` has no requests that succeed or fail as one; so each file is written beside and renamed."""
    bucket, seen = Bucket(f"file://{tmp_path}/there", workers=1), []
    real = objects.Path.replace

    def replace(self, target):
        seen.append((target.name, target.exists(), self.stat().st_size))
        return real(self, target)

    monkeypatch.setattr(objects.Path, "replace", replace)
    bucket.upload(old)
    assert seen[-1] == (FILE, False, (old / FILE).stat().st_size)
    assert {name for name, _, _ in seen} >= {"data", "other", "run.json", "empty.json", "UPLOAD.json"}
    assert contents(tmp_path / "there" / "00000005") == contents(old)
