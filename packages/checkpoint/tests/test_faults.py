"""Every operation of a save fails once; and nothing gets its name before it is on the disk."""

import contextlib
import errno
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, storage

OPERATIONS = [
    "make_folder",
    "make_file",
    "sync_file",
    "sync_folder",
    "rename",
    "remove_file",
    "remove_folder",
    "measure",
]
LAYERS = {
    "storage": [(storage, name) for name in OPERATIONS],
    # What lies below it, and whatever goes past it; of all that Orbax does only some.
    "system": [
        *((os, name) for name in ("fsync", "open")),
        *((Path, name) for name in ("rename", "write_bytes", "mkdir", "open", "unlink", "rmdir")),
    ],
}
# Step, and how many stay.
ACTIONS = {"replace": (1, 3), "new": (2, 3), "retention": (2, 1)}
KINDS = {"packed": {}, "files": {"pack_below": 1}, "shared": {"pack_below": 1, "profile": "shared"}}


def items(number):
    return {"params": {"w": np.full(40, number), "v": [np.full((2, 3), number, np.int8)]}, "run": {"number": number}}


def number_of(store, step):
    assert store.verify(step) == []
    got = store.restore(step, {"params": None, "run": None})
    assert {*got["params"]["w"], *got["params"]["v"][0].flat} == {got["run"]["number"]}
    return got["run"]["number"]


def fail_nth(patch, layer, n, code):
    """Make the n-th call of a layer fail; gives a counter of them."""
    count = itertools.count()
    for owner, name in LAYERS[layer]:
        real = getattr(owner, name)

        def call(*args, real=real, **kwargs):
            if next(count) == n:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)
    return count


def every_call_fails(action, layer, code, options, folder, monkeypatch, each=1):
    """Let every call of a save fail in turn, until none is left to fail; gives how many made it fail."""
    step, keep = ACTIONS[action]
    config, before = CheckpointConfig(keep_last=keep, **options), threading.active_count()
    errors = 0
    for n in itertools.count(step=each):
        directory = folder / str(n)
        with config.build(directory) as store:
            store.save(1, items(0)).committed()
            error = None
            with monkeypatch.context() as patch:
                count = fail_nth(patch, layer, n, code)
                try:
                    store.save(step, items(1)).committed()
                except CheckpointError as raised:
                    error = raised
            assert error is None or (f"step {step} " in str(error) and error.__cause__ not in (None, error))
            # The old one is there, or the new one in its place: never neither, never a mix.
            found = {each: number_of(store, each) for each in store.steps()}
            if action == "retention":
                assert found in ({1: 0}, {1: 0, 2: 1}, {2: 1})
            else:
                assert found[1] in ({0, 1} if step == 1 else {0})
            assert error or found[step] == 1
            assert store.latest() == max(found)
        with config.build(directory) as store:
            assert {each: number_of(store, each) for each in store.steps()} == found
            assert not list(directory.glob(".*"))
            with monkeypatch.context() as patch, contextlib.suppress(CheckpointError):
                fail_nth(patch, layer, n, code)
                store.save(step, items(1)).committed()
            store.save(step, items(2)).committed()  # the same store goes on
            assert number_of(store, step) == 2
        if options.get("pack_below") is None:  # Orbax keeps threads of its own
            assert threading.active_count() == before
        errors += error is not None
        if next(count) <= n:
            return errors
    raise AssertionError


@pytest.mark.parametrize(("layer", "action"), [*(("storage", action) for action in ACTIONS), ("system", "replace")])
def test_nth_call_fails(layer, action, tmp_path, monkeypatch):
    options = {"async_save": action == "new"}
    code = errno.EIO if layer == "storage" else errno.ENOSPC
    assert every_call_fails(action, layer, code, options, tmp_path, monkeypatch) > 8


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_call_fails_in_every_way(layer, kind, async_save, tmp_path, monkeypatch):
    for code in (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EMFILE):
        for action in ACTIONS:
            folder = tmp_path / f"{code}-{action}"
            options = {"async_save": async_save, **KINDS[kind]}
            each = {"packed": 1, "files": 3, "shared": 9}[kind]
            assert every_call_fails(action, layer, code, options, folder, monkeypatch, each) > 3


@pytest.mark.parametrize("pack_below", [1, 2**30], ids=["orbax", "packed"])
def test_everything_is_synced_before_the_rename(pack_below, tmp_path, monkeypatch):
    synced, renamed, fsync, rename = {}, [], os.fsync, Path.rename

    def recording_fsync(fd):
        fsync(fd)
        stat = os.fstat(fd)
        synced[stat.st_ino] = stat.st_mtime_ns

    def recording_rename(path, target):
        if path.name.startswith(".staging"):
            for each in [path, *path.rglob("*")]:
                stat = each.stat()
                assert synced.get(stat.st_ino) == stat.st_mtime_ns, f"{each} was not synced after its last change"
            renamed.append(path)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    with CheckpointConfig(pack_below=pack_below).build(tmp_path / "run") as store:
        for step in (1, 2, 2):
            store.save(step, items(step))
            store.wait()
            root = (tmp_path / "run").stat()
            assert step != 1 or synced[root.st_ino] == root.st_mtime_ns
    assert len(renamed) == 3
