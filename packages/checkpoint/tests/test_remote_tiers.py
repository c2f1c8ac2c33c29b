"""Two places: saves are as fast as the folder, uploads follow, and either place can fail without a loss."""

import importlib.util
import logging
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store
from styrax.checkpoint.manifest import FILE, step_name
from styrax.checkpoint.remote import Bucket, BucketStore, Mirror, TieredStore
from styrax.checkpoint.retention import Best
from styrax.core.protocols import Checkpointer

pytest.importorskip("fsspec")
spec = importlib.util.spec_from_file_location("remote_faults", Path(__file__).with_name("remote_faults.py"))
faults = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))  # one for all test files
if not hasattr(faults, "Faulty"):
    spec.loader.exec_module(faults)
Faulty, URL, wipe = faults.Faulty, faults.URL, faults.wipe

PACKED = CheckpointConfig(pack_below=2**30)


quick = faults.quick


class Gate:
    """Holds uploads back until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Event()
        monkeypatch.setattr(Faulty, "before", staticmethod(self))

    def __call__(self, operation, name):
        if operation == "put_file":
            self.reached.set()
            assert self.open.wait(60)


def items(step):
    return {"params": {"w": np.full(50, step, np.float32)}, "run": {"step": step}}


def tiered(folder, config=PACKED, **mirror):
    return TieredStore(folder, Mirror(**{"url": URL, "attempts": 2, **mirror}), config)


def holds(store, *steps):
    for step in steps:
        found = store.restore(step, {"params": None, "run": None})
        assert found["run"] == {"step": step}
        np.testing.assert_array_equal(found["params"]["w"], np.full(50, step, np.float32))


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def spoil_object(step, name="aux/leaves.bin"):
    file = Faulty.store[f"/bucket/run/{step_name(step)}/{name}"]
    file.seek(7)
    file.write(b"?!?")


def fail(monkeypatch, *kinds, step=""):
    def before(operation, name):
        if operation in kinds and name.startswith(step):
            raise OSError("503 Slow Down")

    monkeypatch.setattr(Faulty, "before", staticmethod(before))


QUICK = [
    "steps in order, there again when reopened",
    "a step saved again is the old or the new one",
    "close waits",
    "a missing step is refused",
    "a failed save does not hinder the next",
]
# It deletes everything in the folder and expects no steps; the other place still has them.
ONE_PLACE = "steps are read from the disk"
# Object storage has no rename: while a step is replaced in a bucket alone there is a moment with neither of the two.
RENAMES = ("a crash while a step is saved again",)


@pytest.mark.parametrize("names", [QUICK, pytest.param(None, marks=pytest.mark.slow)], ids=["quick", "all"])
@pytest.mark.parametrize("places", ["both", "bucket"])
def test_conformance(places, names):
    testing = pytest.importorskip("styrax.core.testing.checkpointer")
    config = CheckpointConfig(keep_last=100)

    def factory(folder):
        if places == "both":
            return TieredStore(folder / "local", f"file://{folder}/remote", config)
        return BucketStore(f"file://{folder}", config)

    left_out = RENAMES if places == "bucket" else (ONE_PLACE,)
    names = [name for name in names or testing.CHECKS if name not in left_out]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short = [str(outcome) for outcome in testing.report_checkpointer(factory, names) if not outcome.passed]
    assert not short, short


def test_a_save_does_not_wait_for_its_upload(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with tiered(tmp_path / "a", CheckpointConfig(pack_below=2**30, keep_last=1)) as store:
        assert isinstance(store, Checkpointer)
        tickets = [store.save(step, items(step)) for step in (1, 2, 3, 4)]
        tickets[-1].committed()
        store.wait()
        # One is on its way, and what waits is not deleted by the folder's own retention.
        assert gate.reached.wait(60)
        assert store.bucket.steps() == []
        assert store.uploads.waiting() == set(store.local.steps()) >= {4}
        holds(store, 4)
        with pytest.raises(CheckpointError, match=r"step 4 is not uploaded after 0\.01 s; it goes on"):
            tickets[-1].uploaded(0.01)
        assert store.uploaded(0.01) is False
        gate.open.set()
        assert tickets[-1].uploaded() is True
        assert store.uploaded() is True
        assert set(store.bucket.steps()) >= {3, 4}
        store.save(5, items(5))
    assert store.local.steps() == [5]
    assert max(store.bucket.steps()) == 5
    with pytest.raises(CheckpointError, match="closed"):
        store.save(6, items(6))
    store.close()


def test_the_newest_goes_first_and_what_is_given_up_is_told(tmp_path, monkeypatch, caplog):
    gate = Gate(monkeypatch)
    with caplog.at_level(logging.WARNING), tiered(tmp_path / "a", keep_last=2, keep_every=4) as store:
        store.save(1, items(1)).committed()
        assert gate.reached.wait(60)
        for step in (4, 5, 6, 7, 8, 9):
            store.save(step, items(step))
        store.wait()
        assert set(store.local.steps()) >= store.uploads.waiting()
        gate.open.set()
        store.uploaded()
        assert store.uploads.uploaded == [1, 9, 8, 4]
        assert sorted(store.uploads.skipped) == [5, 6, 7]
        assert store.bucket.steps() == [4, 8, 9]
    for step in (5, 6, 7):
        assert f"step {step} will not be uploaded to {URL}: newer ones were saved" in caplog.text


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"every": 3, "keep_last": 5}, [3, 6]),
        ({"keep_last": 1, "keep_best": Best(metric="loss")}, [4, 6]),
        ({"temporary": True, "keep_last": 9}, [1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=str,
)
def test_what_the_bucket_keeps(mirror, expected, tmp_path):
    losses = {1: 9, 2: 8, 3: 7, 4: 1, 5: 6, 6: 5}
    with tiered(tmp_path / "a", **mirror) as store:
        for step, loss in losses.items():
            store.save(step, items(step), metrics={"loss": loss}).uploaded()
        assert store.save(7, items(7), temporary=True).uploaded() is ("temporary" in mirror)
    assert store.bucket.steps() == expected
    assert all(store.bucket.verify(step) == [] for step in expected)


def test_a_fresh_machine_goes_on_from_the_bucket(tmp_path):
    with tiered(tmp_path / "a") as store:
        for step in (3, 7):
            store.save(step, items(step)).uploaded()
    with tiered(tmp_path / "b") as other:
        assert (other.steps(), other.local.steps()) == ([3, 7], [])
        assert other.latest(verified=False) == 7
        with pytest.warns(UserWarning, match=r"step 7 comes from unsteady://bucket/run: it is not in .*/b"):
            assert other.latest() == 7
        assert other.local.steps() == [7]
        with pytest.warns(UserWarning, match="step 3 comes from"):
            holds(other, 3, 7)
        assert sorted(other.fetched) == [3, 7] and other.skipped == {}
        with pytest.raises(CheckpointError, match="no checkpoint of step 5 in unsteady://bucket/run: there are 3, 7"):
            other.restore(5, {"run": None})
        assert other.save(8, items(8)).uploaded()
    assert Bucket(URL).steps() == [3, 7, 8]
    with tiered(tmp_path / "c") as third, pytest.warns(UserWarning, match="step 8 comes from"):
        resumed = third.resume(params={"w": np.empty(50, np.float32)})
    assert (resumed.step, resumed["run"]) == (8, {"step": 8})
    np.testing.assert_array_equal(resumed["params"]["w"], np.full(50, 8, np.float32))


@pytest.mark.parametrize("where", ["aux/leaves.bin", "aux/run.json", FILE, "manifest missing"])
def test_a_damaged_folder_is_healed_from_the_bucket(where, tmp_path):
    with tiered(tmp_path / "a") as store:
        for step in (1, 2):
            store.save(step, items(step))
    for step in (1, 2):
        path = tmp_path / "a" / step_name(step)
        (path / FILE).unlink() if where == "manifest missing" else spoil(path / where)
    with tiered(tmp_path / "a") as store:
        with pytest.warns(UserWarning, match="step 2 comes from .*damaged|step 2 comes from .*missing|digest"):
            assert store.latest() == 2
        with pytest.warns(UserWarning, match="step 1 comes from"):
            holds(store, 2, 1)
        assert sorted(store.fetched) == [1, 2]
        assert "".join(store.fetched[2])
        assert store.skipped.keys() <= {1}
        assert store.local.verify(1) == store.local.verify(2) == []


def test_what_is_damaged_in_both_places_is_passed_over(tmp_path):
    with tiered(tmp_path / "a") as store:
        for step in (1, 2, 3):
            store.save(step, items(step)).uploaded()
    for step in (2, 3):
        spoil(tmp_path / "a" / step_name(step) / "aux" / "leaves.bin")
        spoil_object(step)
    with tiered(tmp_path / "a") as store:
        with pytest.warns(UserWarning, match="step 3 is damaged in every place"):
            assert store.latest() == 1
        assert sorted(store.skipped) == [2, 3]
        assert "params/w" in store.skipped[3][0] and URL in store.skipped[3][-1]
        with pytest.raises(CheckpointError, match=r"step 3 in unsteady://bucket/run is damaged:\n  aux/leaves"):
            store.restore(3, {"params": None})
        holds(store, 1)
    strict = CheckpointConfig(pack_below=2**30, on_corrupt="error")
    with warnings.catch_warnings(), tiered(tmp_path / "a", strict) as store:
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="the checkpoint of step 3 is damaged:"):
            store.latest()
    spoil(tmp_path / "a" / "00000001" / "aux" / "run.json")
    spoil_object(1)
    with warnings.catch_warnings(), tiered(tmp_path / "a") as store:
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="are damaged, so there is none to resume from"):
            store.latest()


def test_a_good_folder_is_not_replaced_by_a_damaged_bucket(tmp_path):
    with tiered(tmp_path / "a") as store:
        store.save(1, items(1))
    spoil_object(1)
    with warnings.catch_warnings(), tiered(tmp_path / "a") as store:
        warnings.simplefilter("error")
        assert store.latest() == 1
        holds(store, 1)
        with pytest.raises(CheckpointError, match="not asked for"):
            store.restore(1, {"params": {"other": np.zeros(3)}})
        assert store.fetched == {}


def test_read_only_changes_nothing(tmp_path):
    with tiered(tmp_path / "a") as store:
        for step in (1, 2):
            store.save(step, items(step)).uploaded()
    spoil(tmp_path / "a" / "00000002" / "aux" / "leaves.bin")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    Faulty.calls.clear()
    for folder in ("a", "none"):
        store = TieredStore(tmp_path / folder, URL, PACKED, read_only=True)
        with pytest.warns(UserWarning, match="step 2 comes from"):
            assert store.latest() == 2
        assert store.steps() == [1, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            holds(store, 2)
        assert store.verify(1) == []
        assert store.manifest(1).step == 1
        with pytest.raises(CheckpointError, match="read_only"):
            store.save(3, items(3))
        assert store.resume(params=None).step == 2
        store.close()
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == before
    assert not (tmp_path / "none").exists()
    assert faults.changes() == []


def test_an_upload_that_fails_is_raised_by_the_next_call_and_tried_again(tmp_path, monkeypatch):
    with tiered(tmp_path / "a") as store:
        fail(monkeypatch, "put_file", step="00000001")
        assert store.save(1, items(1)).uploaded() is False
        with pytest.raises(CheckpointError, match=r"cannot write unsteady://bucket/run/00000001/.*503 Slow"):
            store.save(2, items(2))
        store.local.wait()
        assert store.local.steps() == [1, 2]
        store.uploads.wait()
        assert store.bucket.steps() == [2]
        # It was tried again after step 2, in vain, and that is told, too; a third time would be the last.
        with pytest.raises(CheckpointError, match="503 Slow Down"):
            store.wait()
        store.wait()
        monkeypatch.setattr(Faulty, "before", None)
        store.save(3, items(3))
        assert store.uploaded()
        assert store.bucket.steps() == [1, 2, 3]


def test_an_outage_can_be_only_logged(tmp_path, monkeypatch, caplog):
    fail(monkeypatch, "put_file")
    store = tiered(tmp_path / "a", on_error="log", keep_last=2)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            store.save(step, items(step))
            store.uploaded()
    assert "step 3 is not uploaded: cannot write" in caplog.text
    # What the bucket would not keep is not waited for, however long the outage.
    assert store.uploads.waiting() == {2, 3}
    with pytest.raises(CheckpointError) as caught:
        store.close()
    for text in (f"not everything is in {URL}", "step 2: cannot write", "step 3: ", "uploaded when a store is opened"):
        assert text in str(caught.value)
    monkeypatch.setattr(Faulty, "before", None)
    with tiered(tmp_path / "a", keep_last=2) as store:
        store.uploaded()
        assert store.bucket.steps()[-2:] == [2, 3]


def test_a_step_that_was_given_up_is_told_at_the_end_and_uploaded_by_the_next_store(tmp_path, monkeypatch):
    fail(monkeypatch, "put_file", step="00000001")
    store = tiered(tmp_path / "a", on_error="log")
    for step in (1, 2, 3):
        store.save(step, items(step))
        store.uploaded()
    assert list(store.uploads.skipped) == [1] and store.uploads.waiting() == set()
    with pytest.raises(CheckpointError, match=r"not everything is in .*\n  step 1: cannot write"):
        store.close()
    monkeypatch.setattr(Faulty, "before", None)
    with tiered(tmp_path / "a") as store:
        store.uploaded()
        assert store.bucket.steps() == [1, 2, 3]


def test_close_has_a_limit(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    store = tiered(tmp_path / "a", close_timeout=0.05)
    store.save(1, items(1)).committed()
    with pytest.raises(CheckpointError, match=r"not everything is in .* after 0.05 s \(close_timeout\):\n  step 1: it"):
        store.close()
    gate.open.set()
    with tiered(tmp_path / "a") as store:
        store.uploaded()
        assert store.bucket.steps() == [1]


def test_a_step_that_is_saved_again_is_uploaded_again(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with tiered(tmp_path / "a") as store:
        store.save(5, items(1)).committed()
        assert gate.reached.wait(60)
        store.save(5, items(5)).committed()
        gate.open.set()
        store.uploaded()
        assert store.bucket.steps() == [5]
    with tiered(tmp_path / "b") as other, pytest.warns(UserWarning, match="comes from"):
        holds(other, 5)


def test_a_bucket_that_cannot_be_reached(tmp_path, monkeypatch):
    with tiered(tmp_path / "a") as store:
        store.save(1, items(1))
    fail(monkeypatch, "ls")
    with pytest.raises(CheckpointError, match="cannot list unsteady://bucket/run"):
        tiered(tmp_path / "a")
    # The lock was given back.
    with pytest.warns(UserWarning, match=r"only .* is looked at"):
        store = tiered(tmp_path / "a", on_error="log")
    with pytest.warns(UserWarning, match=r"only .* is looked at"):
        assert store.latest() == 1
    holds(store, 1)
    monkeypatch.setattr(Faulty, "before", None)
    store.close()


@pytest.mark.parametrize("end", ["", "raise RuntimeError('its own')"])
@pytest.mark.parametrize("works", [True, False])
def test_a_program_that_ends_without_close(works, end, tmp_path, run_python):
    place = tmp_path / "there"
    if not works:
        place.write_text("a file, and no folder")
    code = f"""
import numpy as np
from styrax.checkpoint.remote import TieredStore, Mirror, errors
errors.WAIT = 0.001
store = TieredStore({str(tmp_path / "a")!r}, Mirror(url="file://{place}", on_error="log"))
store.save(7, {{"params": {{"w": np.ones(1000)}}}})
{end}
"""
    result = run_python(code)
    assert result.returncode == (0 if works and not end else 1), result.stderr
    assert ("error: a checkpoint is not uploaded: step 7: cannot " in result.stderr) is not works
    assert Store(tmp_path / "a", read_only=True).steps() == [7]
    if works:
        assert Bucket(f"file://{place}").verify(7) == []


def test_where_no_thread_can_start_any_more(tmp_path, monkeypatch):
    """Some versions of Python start no thread while they end; then the end itself uploads."""
    real = threading.Thread.start

    def start(self):
        if self.name.startswith(("checkpoint-upload", "checkpoint-remote")):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        real(self)

    store = tiered(tmp_path / "a")
    monkeypatch.setattr(threading.Thread, "start", start)
    store.save(1, items(1)).committed()
    assert store.uploads.waiting() == {1}
    store.uploads.finish()
    assert store.uploads.lost() == []
    monkeypatch.undo()
    store.close()
    assert store.bucket.steps() == [1]
    assert store.bucket.verify(1) == []


def test_a_bucket_alone(tmp_path, monkeypatch):
    with BucketStore(URL, PACKED) as store:
        for step in (1, 2, 3, 4):
            ticket = store.save(step, items(step))
        ticket.committed()
        assert store.steps() == [2, 3, 4]
        holds(store, 4)
        holds(store, 2)
        fail(monkeypatch, "put_file")
        with pytest.raises(CheckpointError, match="step 5 is not uploaded: cannot write"):
            store.save(5, items(5)).committed()
        with pytest.raises(CheckpointError, match="cannot write"):
            store.wait()
        monkeypatch.setattr(Faulty, "before", None)
        store.save(6, items(6)).committed()
    assert store.bucket.steps()[-1] == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = BucketStore(URL, read_only=True)
        assert reader.latest() == 6
        holds(reader, 6)


def test_an_upload_that_fails_at_once_is_for_its_own_ticket_to_say(tmp_path, monkeypatch):
    """Even one that has failed before `save` returns; only what failed before is told by `save` itself."""
    store = BucketStore(URL, PACKED)
    fail(monkeypatch, "put_file")
    save = store.local.save

    def slow(step, *rest, **named):
        ticket = save(step, *rest, **named)
        ticket.committed()
        assert store.uploads.wait(step, 30)
        return ticket

    monkeypatch.setattr(store.local, "save", slow)
    with pytest.raises(CheckpointError, match="step 1 is not uploaded: cannot write"):
        store.save(1, items(1)).committed()
    with pytest.raises(CheckpointError, match=r"^cannot write"):
        store.save(2, items(2))
    with pytest.raises(CheckpointError, match="not everything is in"):
        store.close()


def test_the_mirror_in_a_file():
    from styrax.core.config import build

    mirror = build(Mirror, {"url": "s3://b/r", "keep_every": 1000, "keep_best": {"metric": "loss"}})
    assert (mirror.keep_last, mirror.keep_every, mirror.keep_best) == (3, 1000, Best())
    with pytest.raises(ValueError, match="url: 'runs/a' is no URL"):
        Mirror(url="runs/a")
    with pytest.raises(ValueError, match="keep_last"):
        Mirror(url="s3://b", keep_last=0)
