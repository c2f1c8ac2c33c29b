"""Checks of a checkpointer: damage on the disk gives an error, or the right values all the same."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.testing.round_trip import Check, Factory, abstract, assert_exact, restore, save

_PAGE = 4096


def _flip(data: bytearray, draw: random.Random) -> None:
    where = draw.randrange(8 * len(data))
    data[where // 8] ^= 1 << where % 8


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _zero(data: bytearray, draw: random.Random) -> None:
    start = _PAGE * draw.randrange(-(-len(data) // _PAGE))
    length = len(data[start : start + _PAGE])
    data[start : start + length] = bytes(length)


def _items() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(40, 50)).astype(np.float32), "b": rng.integers(0, 99, 300).astype(np.int8)}
    return {"params": params, "run": {"step": 1, "note": "written by the check"}}


def _damaged(damage: Callable[[bytearray, random.Random], None] | None, times: int) -> Check:
    """Give the check that damages each file, some times, on a copy each, and restores everything."""

    def check(factory: Factory, folder: Path) -> None:
        items, draw = _items(), random.Random(0)
        like = {"params": abstract(items["params"]), "run": None}
        save(factory, folder, 1, items)
        assert_exact(restore(factory, folder, 1, like), items, "undamaged")
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        wrong, tried = [], 0
        for name in files:
            before = (folder / name).read_bytes()
            for _ in range(times if before else 0):
                copy = folder.with_name("copy")
                shutil.copytree(folder, copy)
                if damage is None:
                    (copy / name).unlink()
                else:
                    data = bytearray(before)
                    damage(data, draw)
                    if data == before:
                        shutil.rmtree(copy)
                        continue
                    (copy / name).write_bytes(data)
                tried += 1
                if _silent(factory, copy, like, items):
                    wrong.append(str(name))
                shutil.rmtree(copy)
        assert not wrong, (
            f"{len(wrong)} of {tried} times wrong values were restored without a word; damaged were "
            f"{', '.join(sorted(set(wrong)))}"
        )

    return check


def _silent(factory: Factory, folder: Path, like: Any, items: Any) -> bool:
    try:
        got = restore(factory, folder, 1, like)
    except Exception:  # any error will do: nothing was given
        return False
    try:
        assert_exact(got, items, "restored")
    except AssertionError:
        return True
    return False


DAMAGE: dict[str, Check] = {
    "a flipped bit is found": _damaged(_flip, 3),
    "a shortened file is found": _damaged(_truncate, 2),
    "a zeroed page is found": _damaged(_zero, 1),
    "a deleted file is found": _damaged(None, 1),
}
