"""Every system call of a save fails once; and nothing gets its name before it is on the disk."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError

CALLS = [(os, "fsync"), (Path, "rename"), (Path, "write_bytes"), (Path, "mkdir"), (Path, "open")]


def items(number):
    return {"params": {"w": np.full(40, number), "v": [np.full((2, 3), number, np.int8)]}, "run": {"number": number}}


def number_of(store, step):
    assert store.verify(step) == []
    got = store.restore(step, {"params": None, "run": None})
    assert {*got["params"]["w"], *got["params"]["v"][0].flat} == {got["run"]["number"]}
    return got["run"]["number"]


@pytest.mark.parametrize("step", [1, 2], ids=["replace", "new"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_nth_call_fails(step, code, tmp_path, monkeypatch):
    for n in itertools.count():
        directory = tmp_path / str(n)
        with CheckpointConfig(async_save=False).build(directory) as store:
            store.save(1, items(0))
            count = itertools.count()
            with monkeypatch.context() as patch:
                for owner, name in CALLS:
                    real = getattr(owner, name)

                    def call(*args, real=real, count=count, n=n, **kwargs):
                        if next(count) == n:
                            raise OSError(code, os.strerror(code))
                        return real(*args, **kwargs)

                    patch.setattr(owner, name, call)
                error = None
                try:
                    store.save(step, items(1))
                except CheckpointError as raised:
                    error = raised
            assert error is None or (f"step {step} " in str(error) and isinstance(error.__cause__, OSError))
            # The old one is there, or the new one in its place: never neither, never a mix.
            found = {each: number_of(store, each) for each in store.steps()}
            assert 1 in found and found[1] in ({0, 1} if step == 1 else {0})
            assert error or found[step] == 1
        with CheckpointConfig(async_save=False).build(directory) as store:
            assert {each: number_of(store, each) for each in store.steps()} == found
            assert not list(directory.glob(".*"))
            store.save(step, items(2))
            assert number_of(store, step) == 2
        if next(count) <= n:
            break
    assert n > 12


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
