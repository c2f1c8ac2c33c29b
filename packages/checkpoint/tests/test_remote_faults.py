"""A bucket through every fault that object storage has: the old steps stay, no half step is listed, damage is named."""

import errno
import importlib.util
import itertools
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointError, read_manifest
from styrax.checkpoint.errors import Damaged
from styrax.checkpoint.manifest import FILE
from styrax.checkpoint.remote import Bucket

pytest.importorskip("fsspec")
spec = importlib.util.spec_from_file_location("remote_faults", Path(__file__).with_name("remote_faults.py"))
faults = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))  # one for all test files
if not hasattr(faults, "Faulty"):
    spec.loader.exec_module(faults)
Faulty, URL, CHANGES, READS = faults.Faulty, faults.URL, faults.CHANGES, faults.READS
changes, contents, make, stored, wipe = faults.changes, faults.contents, faults.make, faults.stored, faults.wipe


quick, old, new, bucket = faults.quick, faults.old, faults.new, faults.bucket


@pytest.mark.parametrize("lost", [False, True], ids=["fails", "answer lost"])
@pytest.mark.parametrize("kinds", [CHANGES, READS], ids=["changes", "reads"])
@pytest.mark.parametrize("what", ["new", "replace", "delete"])
def test_nth_request_fails(what, kinds, lost, old, new, tmp_path):
    other = make(tmp_path / "other", 4, seed=7)
    for n in itertools.count():
        wipe()
        Bucket(URL).upload(other)
        if what != "new":
            Bucket(URL).upload(old)
        count = itertools.count()

        def fail(operation, name, result=None, count=count, n=n):
            if operation in kinds and next(count) == n:
                raise OSError(errno.EIO, "503 Slow Down")
            return result

        Faulty.after, Faulty.before = (staticmethod(fail), None) if lost else (None, staticmethod(fail))
        error = None
        try:
            if what == "delete":
                Bucket(URL, attempts=1).delete(5)
            else:
                Bucket(URL, attempts=1).upload(new)
        except CheckpointError as raised:
            error = raised
        reached = next(count) > n
        Faulty.before = Faulty.after = None
        bucket = Bucket(URL)
        assert error is None or ("503 Slow Down" in str(error) and URL in str(error))
        # What is listed is whole: the old one, the new one, or none of the two; and the other step is untouched.
        assert stored(4) == contents(other)
        if 5 in bucket.steps():
            whole = {name: data for name, data in stored(5).items() if name != "UPLOAD.json"}
            assert whole in (contents(old), contents(new))
            assert bucket.verify(5) == []
        else:
            assert FILE not in stored(5)
        if error is None:
            assert bucket.steps() == ([4] if what == "delete" else [4, 5])
            assert what == "delete" or stored(5) | contents(new) == stored(5)
        # And once more, without the fault.
        if what == "delete":
            bucket.delete(5)
            assert stored(5) == {}
        else:
            bucket.upload(new)
            assert {name: data for name, data in stored(5).items() if name != "UPLOAD.json"} == contents(new)
        if not reached:
            break
    assert n >= (1 if what == "delete" else 2)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "429 Too Many Requests"), TimeoutError("read"), ConnectionResetError("gone")],
    ids=lambda error: type(error).__name__,
)
def test_a_server_that_is_busy_is_asked_again(error, old, tmp_path):
    bucket, left = Bucket(URL, attempts=4), {}

    def before(operation, name):
        with Faulty.lock:
            left[operation, name] = left.get((operation, name), 3) - 1
            if left[operation, name] >= 0:
                raise error

    Faulty.before = staticmethod(before)
    bucket.upload(old, verify="readback")
    left.clear()
    assert bucket.steps() == [5]
    bucket.download(5, tmp_path / "again")
    assert contents(tmp_path / "again" / "00000005") == contents(old)
    left.clear()
    with pytest.raises(CheckpointError, match=r"cannot list unsteady://bucket/run: .*(in a row|does not answer)"):
        Bucket(URL, attempts=3).steps()


def test_objects_that_are_listed_late(bucket, old, tmp_path):
    class Late(dict):
        def __setitem__(self, name, file):
            Faulty.hidden[name] = 3
            super().__setitem__(name, file)

    store = Faulty.store
    try:
        Faulty.store = Late()
        bucket.upload(old)
        assert bucket.steps() == [5]
        assert bucket.verify(5, mode="size") == []
        for name in Faulty.store:
            Faulty.hidden[name] = 10**9
        bucket.download(5, tmp_path / "again")
        assert contents(tmp_path / "again" / "00000005") == contents(old)
        # Nor is anything of them taken for another upload's, or left to be found by one.
        bucket.upload(make(tmp_path / "new", 5, seed=2))
        assert stored(5) == contents(tmp_path / "new" / "00000005")
    finally:
        Faulty.store = store


DAMAGES = {
    "flip": lambda data, rng: (
        bytes([*data[: (n := rng.integers(len(data)))], data[n] ^ 1 << rng.integers(8)]) + data[n + 1 :]
    ),
    "truncate": lambda data, rng: data[: rng.integers(max(len(data), 1))],
    "longer": lambda data, rng: data + b"x",
    "delete": lambda data, rng: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_and_named(damage, bucket, old, tmp_path):
    rng = np.random.default_rng(0)
    bucket.upload(old)
    good = dict(Faulty.store)
    for name, file in good.items():
        data = file.getvalue()
        for _ in range(8 if data else 1):
            bad = DAMAGES[damage](data, rng) if data or damage != "flip" else b"x"
            if bad == data:
                continue
            if bad is None:
                del Faulty.store[name]
            else:
                Faulty().pipe_file(name, bad)
            short = name.partition("00000005/")[2]
            if damage == "delete" and short == FILE:
                assert bucket.steps() == []
                with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
                    bucket.download(5, tmp_path / "again")
            else:
                assert [text.partition(":")[0] for text in bucket.verify(5)] == [short]
                with pytest.raises(Damaged) as caught:
                    bucket.download(5, tmp_path / "again")
                assert short in str(caught.value)
            assert [path.name for path in (tmp_path / "again").iterdir()] == ["LOCK"]
            Faulty.store[name] = file
    assert bucket.verify(5) == []


def test_damage_names_the_item_and_may_be_elsewhere(bucket, old, tmp_path):
    bucket.upload(old)
    for name in ("orbax/params/d/data", "aux/run.json"):
        data = bytearray(stored(5)[name])
        data[3] ^= 4
        Faulty().pipe_file(f"/bucket/run/00000005/{name}", bytes(data))
    with pytest.raises(Damaged, match=r"aux/run.json: digest .*\(item run\)\n  orbax.*data: digest .*\(item params\)"):
        bucket.download(5, tmp_path / "again")
    assert [text.partition(":")[0] for text in bucket.verify(5, items=["run"])] == ["aux/run.json"]
    assert bucket.verify(5, items=["none"]) == []


def test_what_is_damaged_on_its_way_is_read_again(bucket, old, tmp_path, monkeypatch):
    monkeypatch.setattr("styrax.checkpoint.remote.receiving.PIECE", 700)
    bucket.upload(old)
    bad = {"orbax/params/d/data": 1, "aux/run.json": 1}

    def after(operation, name, result):
        short = name.partition("/")[2]
        if operation == "cat_file" and bad.get(short, 0):
            bad[short] -= 1
            return result[:-1] + bytes([result[-1] ^ 1])
        return result

    Faulty.after, events = staticmethod(after), []
    bucket.download(5, tmp_path / "again", progress=lambda *event: events.append(event))
    assert contents(tmp_path / "again" / "00000005") == contents(old)
    total = read_manifest(old).nbytes
    assert events[-1] == ("download", total, total)
    reads = [name for operation, name in Faulty.calls if operation == "cat_file" and name.endswith("data")]
    assert len(reads) == 2 * 8


def test_a_step_that_is_replaced_while_it_is_read(bucket, old, new, tmp_path):
    bucket.upload(old)
    done = []

    def before(operation, name):
        if operation == "cat_file" and name.endswith("data") and not done:
            done.append(name)
            Faulty.before = None
            Bucket(URL).upload(new)

    Faulty.before = staticmethod(before)
    bucket.download(5, tmp_path / "again")
    assert contents(tmp_path / "again" / "00000005") == contents(new)
    assert done


def test_a_damaged_folder_is_not_uploaded(bucket, old, tmp_path):
    (old / "aux" / "run.json").write_bytes(b"123456789")
    with pytest.raises(CheckpointError, match=r"aux/run.json is damaged \(item run\), so step 5 was not up.*: digest"):
        bucket.upload(old)
    assert bucket.steps() == []
    (old / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be uploaded: MANIFEST.json: missing"):
        bucket.upload(old)


def test_a_folder_that_is_replaced_while_it_is_sent(bucket, old, new):
    def before(operation, name):
        if operation == "put_file" and name.endswith("run.json"):
            Faulty.before = None
            shutil.rmtree(old)
            shutil.copytree(new, old)

    Faulty.before = staticmethod(before)
    with pytest.raises(CheckpointError, match=r"replaced or deleted while it was uploaded"):
        bucket.upload(old)
    assert bucket.steps() == []
    bucket.upload(old)
    assert stored(5) == contents(new)


def test_what_does_not_arrive_whole_is_no_checkpoint(bucket, old):
    def after(operation, name, result):
        if operation == "put_file" and name.endswith("data"):
            Faulty.store[f"/bucket/run/{name}"].truncate(100)
        return result

    Faulty.after = staticmethod(after)
    with pytest.raises(CheckpointError, match=r"step 5 did not arrive whole in .*\n  orbax/params/d/data: 100 bytes"):
        bucket.upload(old)
    assert bucket.steps() == []
    Faulty.after = staticmethod(lambda operation, name, result: after(operation, name, result) if False else result)

    def flip(operation, name, result):
        if operation == "put_file" and name.endswith("data"):
            file = Faulty.store[f"/bucket/run/{name}"]
            file.seek(0)
            file.write(bytes([file.getvalue()[0] ^ 1]))
        return result

    Faulty.after = staticmethod(flip)
    with pytest.raises(CheckpointError, match=r"did not arrive whole in .*\n  orbax/params/d/data: digest"):
        bucket.upload(old, verify="readback")
    assert bucket.steps() == []
    Faulty.after = None
    bucket.upload(old)
    assert stored(5) == contents(old)
