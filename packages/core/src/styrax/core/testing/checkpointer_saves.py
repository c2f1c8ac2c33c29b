"""Checks of a checkpointer: which steps there are, through overlapping saves, crashes and failures."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.testing.round_trip import Check, Factory, assert_exact, opened, save

_COPIES = 15
_LIMIT = 512 * 2**10


def _value(number: float, count: int = 2**18) -> dict[str, Any]:
    return {"params": {"w": np.full(count, number, np.float32)}}


def _new_folder(factory: Factory, folder: Path) -> None:
    with opened(factory, folder) as checkpointer:
        _lists(checkpointer, [], "a new folder")


def _order(factory: Factory, folder: Path) -> None:
    with opened(factory, folder) as checkpointer:
        for step in (2, 10, 100):
            checkpointer.save(step, _value(step, 4))
            checkpointer.wait()
        _lists(checkpointer, [2, 10, 100], "three saves")
    with opened(factory, folder) as fresh:
        _lists(fresh, [2, 10, 100], "opening the folder again")
        for step in (2, 10, 100):
            assert_exact(fresh.restore(step, {"params": None}), _value(step, 4), f"step {step}")


def _alone(factory: Factory, folder: Path) -> None:
    items = {"params": {"w": np.ones(3)}, "opt_state": [np.zeros(2, np.int8)], "run": {"step": 1}}
    save(factory, folder, 1, items)
    with opened(factory, folder) as fresh:
        for name, value in items.items():
            assert_exact(fresh.restore(1, {name: None}), {name: value}, f"item {name} alone")


def _twice(factory: Factory, folder: Path) -> None:
    save(factory, folder, 1, _value(1, 4))
    with opened(factory, folder) as fresh:
        first = fresh.restore(1, {"params": None})["params"]["w"]
        if isinstance(first, np.ndarray) and first.flags.writeable:
            first[:] = -1
        assert_exact(fresh.restore(1, {"params": None}), _value(1, 4), "restored again, the first result changed")


def _overlap(factory: Factory, folder: Path) -> None:
    with opened(factory, folder) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _value(step, 2**20))
    with opened(factory, folder) as fresh:
        _lists(fresh, [1, 2, 3], "three saves with no wait between them")
        assert_exact(fresh.restore(2, {"params": None}), _value(2, 2**20), "step 2")


def _close_waits(factory: Factory, folder: Path) -> None:
    checkpointer = factory(folder)
    checkpointer.save(1, _value(1, 2**20))
    checkpointer.close()
    with opened(factory, folder) as fresh:
        _lists(fresh, [1], "save and close")
        assert_exact(fresh.restore(1, {"params": None}), _value(1, 2**20), "step 1")


def _close_twice(factory: Factory, folder: Path) -> None:
    checkpointer = factory(folder)
    checkpointer.save(1, _value(1, 4))
    checkpointer.close()
    checkpointer.close()


def _after_close(factory: Factory, folder: Path) -> None:
    checkpointer = factory(folder)
    checkpointer.close()
    if _errors(lambda: checkpointer.save(1, _value(1, 4)), checkpointer.wait, checkpointer.close):
        return
    with opened(factory, folder) as fresh:
        _lists(fresh, [1], "a save after close that raised nothing")


def _lower(factory: Factory, folder: Path) -> None:
    with opened(factory, folder) as checkpointer:
        checkpointer.save(5, _value(5, 4))
        checkpointer.wait()
        if _errors(lambda: checkpointer.save(3, _value(3, 4)), checkpointer.wait):
            return
        _lists(checkpointer, [3, 5], "a save of step 3 after step 5 that raised nothing")
        assert_exact(checkpointer.restore(3, {"params": None}), _value(3, 4), "step 3")


def _replaced(factory: Factory, folder: Path) -> None:
    with opened(factory, folder) as checkpointer:
        checkpointer.save(1, _value(1))
        checkpointer.wait()
        refused = _errors(lambda: checkpointer.save(1, _value(2)), checkpointer.wait)
        _lists(checkpointer, [1], "saving step 1 again")
        got = checkpointer.restore(1, {"params": None})
    assert_exact(got, _value(1 if refused else 2), f"step 1, saved again {'with' if refused else 'without'} an error")


def _disk(factory: Factory, folder: Path) -> None:
    with opened(factory, folder) as checkpointer:
        checkpointer.save(1, _value(1, 4))
        checkpointer.wait()
        copy = folder.with_name("copy")
        with opened(factory, copy) as other:
            _lists(other, [], "a new folder")
            for path in folder.iterdir():
                target = copy / path.name
                _ = shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
            _lists(other, [1], "copying a checkpoint into the folder")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _lists(checkpointer, [], "deleting everything in the folder")


def _crash(factory: Factory, folder: Path) -> None:
    def work(checkpointer: Any, photograph: Callable[[], None], done: list[int]) -> None:
        for step in (1, 2, 3):
            checkpointer.save(step, _value(step))
            photograph()
            checkpointer.wait()
            done.append(step)

    for copy, done in _copies(factory, folder, work):
        with opened(factory, copy) as survivor:
            steps = survivor.steps()
            assert steps == [1, 2, 3][: max(done, len(steps))], (
                f"steps() after a crash during the saves of 1 to 3, of which {done} had been waited for: got {steps}"
            )
            for step in steps:
                _restores(survivor, step, (step,), "listed after a crash during a save")
            survivor.save(9, _value(9, 4))
            survivor.wait()
            _lists(survivor, [*steps, 9][-3:], "a crash and one more save", last=3)


def _crash_replacing(factory: Factory, folder: Path) -> None:
    save(factory, folder, 1, _value(1))

    def work(checkpointer: Any, photograph: Callable[[], None], done: list[int]) -> None:
        for number in (2, 3):
            _errors(lambda number=number: checkpointer.save(1, _value(number)))
            photograph()
            _errors(checkpointer.wait)

    for copy, _ in _copies(factory, folder, work):
        with opened(factory, copy) as survivor:
            _lists(survivor, [1], "a crash while step 1 was saved again")
            _restores(survivor, 1, (1, 2, 3), "after a crash while it was saved again,")


def _failed(factory: Factory, folder: Path) -> None:
    with _failing(factory, folder) as (checkpointer, errors):
        errors += _errors(checkpointer.close)
        assert errors, "a save that could not be written raised nothing in save, wait and close"


def _failed_unlisted(factory: Factory, folder: Path) -> None:
    with _failing(factory, folder) as (checkpointer, _):
        _lists(checkpointer, [1], "a save of step 2 that could not be written")
        _errors(checkpointer.close)
    with opened(factory, folder) as fresh:
        _lists(fresh, [1], "a save of step 2 that could not be written, and opening the folder again")
        assert_exact(fresh.restore(1, {"params": None}), _value(1, 4), "step 1")


def _failed_goes_on(factory: Factory, folder: Path) -> None:
    with _failing(factory, folder) as (checkpointer, _):
        checkpointer.save(2, _value(2, 4))
        checkpointer.wait()
        _lists(checkpointer, [1, 2], "a save of step 2 that failed, and one that did not")
        assert_exact(checkpointer.restore(2, {"params": None}), _value(2, 4), "step 2")
        checkpointer.close()


@contextlib.contextmanager
def _failing(factory: Factory, folder: Path) -> Iterator[tuple[Any, list[Exception]]]:
    """Save step 1, and step 2 while no file may grow beyond a limit, as on a full disk."""
    import resource

    checkpointer, errors = factory(folder), []
    try:
        checkpointer.save(1, _value(1, 4))
        checkpointer.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        random = np.random.default_rng(0).integers(0, 256, 4 * _LIMIT).astype(np.uint8)  # cannot be compressed
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT, hard))
        try:
            errors += _errors(lambda: checkpointer.save(2, {"params": {"w": random}}), checkpointer.wait)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        yield checkpointer, errors
    finally:
        _errors(checkpointer.close)


def _copies(factory: Factory, folder: Path, work: Callable[..., None]) -> list[tuple[Path, int]]:
    """Copy the folder, while a checkpointer works in it, as a crash at that moment would leave it.

    Args:
        factory: Opens the checkpointer.
        folder: Its folder.
        work: `work(checkpointer, photograph, done)` saves; `photograph()` copies, besides the copies that a thread
            makes all the while; what is appended to `done` has been waited for.

    Returns:
        Each copy, and the length of `done` before it was made.
    """
    copies: list[tuple[Path, int]] = []
    done: list[int] = []
    lock, stop = threading.Lock(), threading.Event()

    def photograph() -> None:
        with lock:
            copy, before = folder.with_name(f"crash-{len(copies)}"), len(done)
            if _still(folder, copy):
                copies.append((copy, before))

    def watch() -> None:
        while not stop.wait(0.002) and len(copies) < _COPIES:
            photograph()

    with opened(factory, folder) as checkpointer:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            work(checkpointer, photograph, done)
        finally:
            stop.set()
            watcher.join()
    photograph()
    return copies


def _still(source: Path, target: Path) -> bool:
    """Copy a folder; false if it never stood still that long."""
    for _ in range(20):
        before = _listing(source)
        try:
            shutil.copytree(source, target)
        except (shutil.Error, OSError):
            before = None
        if before is not None and before == _listing(source):
            return True
        shutil.rmtree(target, ignore_errors=True)
    return False


def _listing(folder: Path) -> dict[Path, tuple[int, int, int]] | None:
    try:
        stats = {path: path.stat() for path in folder.rglob("*")}
    except OSError:
        return None
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}


def _restores(checkpointer: Any, step: int, numbers: tuple[float, ...], what: str) -> None:
    try:
        got = checkpointer.restore(step, {"params": None})["params"]["w"]
    except Exception as error:
        raise AssertionError(f"step {step}, {what} does not restore: {error}") from error
    right = any(np.array_equal(got, _value(number)["params"]["w"]) for number in numbers)
    assert right, f"step {step}, {what} restores other values than were saved"


def _lists(checkpointer: Any, expected: list[int], after: str, last: int | None = None) -> None:
    got = checkpointer.steps()
    got = got[-last:] if last else got
    assert got == expected, f"steps() after {after}: got {got}, expected {expected}"


def _errors(*calls: Callable[[], Any]) -> list[Exception]:
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    return errors


SAVES: dict[str, Check] = {
    "a new folder has no steps": _new_folder,
    "steps in order, there again when reopened": _order,
    "one item alone": _alone,
    "what was restored may be changed": _twice,
    "a save while another runs is not dropped": _overlap,
    "a save of a lower step is not dropped": _lower,
    "a step saved again is the old or the new one": _replaced,
    "close waits": _close_waits,
    "close may be called twice": _close_twice,
    "a save after close is not lost in silence": _after_close,
    "steps are read from the disk": _disk,
    "a crash during a save": _crash,
    "a crash while a step is saved again": _crash_replacing,
    "a failed save is raised": _failed,
    "a failed save is not listed": _failed_unlisted,
    "a failed save does not hinder the next": _failed_goes_on,
}
