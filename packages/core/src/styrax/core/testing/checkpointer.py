"""Conformance of a `Checkpointer`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.testing.compare import assert_same


def check_checkpointer(factory: Callable[[Path], Any]) -> None:
    """Check that what was saved comes back bit for bit, and that nothing unfinished is ever offered.

    - items of nested arrays (float32, bfloat16, integers, booleans, scalars) and of plain JSON round trip,
      into a fresh checkpointer; `None` gives an item as it was saved; `{}` is an item too;
    - any single item can be restored alone;
    - after `save` returns, the arrays may be changed or deleted without harm;
    - `steps` lists complete steps in order, and is empty for a new folder;
    - at no moment during a save would a crash leave a folder that lists a step which does not restore;
    - an item or a step that does not exist gives an error that names it.

    Args:
        factory: `factory(directory)` opens a checkpointer on a folder, which may not exist yet.

    Raises:
        AssertionError: The checkpointer breaks one of these.
    """
    for check in (_round_trip, _reuse, _crash, _missing):
        with tempfile.TemporaryDirectory() as folder:
            check(factory, Path(folder) / "checkpoints")


def _arrays(seed: int) -> dict[str, Any]:
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    return {
        "embed": {"kernel": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)},
        "layers": [
            {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16), "count": jnp.asarray(7, jnp.int32)},
            {"key": jnp.asarray([1, 2**32 - 1], jnp.uint32), "mask": jnp.asarray([True, False])},
        ],
    }


def _abstract(tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _round_trip(factory: Callable[[Path], Any], folder: Path) -> None:
    run = {"step": 1, "rate": 0.1, "name": "é/☃", "on": True, "off": None, "list": [1, [2, {"a": 3.5}]]}
    saved = {step: {"params": _arrays(step), "run": {**run, "step": step}, "empty": {}} for step in (1, 12)}
    checkpointer = factory(folder)
    assert checkpointer.steps() == [], f"steps() of a new folder: got {checkpointer.steps()}, expected []"
    for step in (1, 12):
        checkpointer.save(step, saved[step])
    checkpointer.wait()
    assert checkpointer.steps() == [1, 12], f"steps(): got {checkpointer.steps()}, expected [1, 12]"
    checkpointer.close()

    fresh = factory(folder)
    assert fresh.steps() == [1, 12], f"steps() after reopening: got {fresh.steps()}, expected [1, 12]"
    for step, items in saved.items():
        like = {"params": _abstract(items["params"]), "run": None, "empty": {}}
        got = fresh.restore(step, like)
        assert set(got) == set(like), f"restore: got items {sorted(got)}, expected {sorted(like)}"
        assert_same(got["params"], items["params"], f"params of step {step}")
        assert got["run"] == items["run"], f"JSON item: got {got['run']}, expected {items['run']}"
        assert not got["empty"], f"empty item: got {got['empty']}, expected {{}}"
        for name, abstract in like.items():
            alone = fresh.restore(step, {name: abstract})
            assert list(alone) == [name], f"restore of {name!r} alone: got items {sorted(alone)}"
        as_saved = fresh.restore(step, {"params": None})["params"]
        assert_same(as_saved, items["params"], f"params of step {step} as saved (like=None)")
    fresh.close()


def _reuse(factory: Callable[[Path], Any], folder: Path) -> None:
    import jax
    import jax.numpy as jnp

    host, device = np.arange(250_000, dtype=np.float32), jnp.arange(250_000, dtype=jnp.float32)
    expected = {"host": host.copy(), "device": host.copy()}
    checkpointer = factory(folder)
    checkpointer.save(3, {"params": {"host": host, "device": device}})
    host[:] = -1.0
    device.delete()
    del device
    junk = [jnp.full(250_000, float(n)) for n in range(4)]  # likely to land in the freed buffer
    jax.block_until_ready(junk)
    checkpointer.wait()
    got = checkpointer.restore(3, {"params": _abstract(expected)})["params"]
    checkpointer.close()
    assert_same(got, expected, "arrays changed and deleted after save returned")


def _crash(factory: Callable[[Path], Any], folder: Path) -> None:
    import jax.numpy as jnp

    checkpointer = factory(folder)
    saved, copies = {}, []
    for step in range(1, 5):
        saved[step] = {"params": {"w": jnp.full((512, 512), float(step))}}
        checkpointer.save(step, saved[step])
        copy = folder.with_name(f"crash-{step}")
        if _snapshot(folder, copy):
            copies.append(copy)
    checkpointer.close()
    for copy in copies:
        survivor = factory(copy)
        for step in survivor.steps():
            what = f"{copy.name}: step {step}, listed after a crash during a save,"
            try:
                got = survivor.restore(step, {"params": _abstract(saved[step]["params"])})["params"]
            except Exception as error:
                raise AssertionError(f"{what} does not restore: {error}") from error
            assert_same(got, saved[step]["params"], what)
        survivor.close()


def _snapshot(source: Path, target: Path) -> bool:
    """Copy a folder as a crash at one moment would leave it; false if it never stood still that long."""
    for _ in range(20):
        before = _listing(source)
        try:
            shutil.copytree(source, target)
        except (shutil.Error, FileNotFoundError):
            before = None
        if before is not None and before == _listing(source):
            return True
        shutil.rmtree(target, ignore_errors=True)
    return False


def _listing(folder: Path) -> dict[Path, tuple[int, int]] | None:
    try:
        return {path: ((stat := path.stat()).st_size, stat.st_mtime_ns) for path in folder.rglob("*")}
    except FileNotFoundError:
        return None


def _missing(factory: Callable[[Path], Any], folder: Path) -> None:
    checkpointer = factory(folder)
    checkpointer.save(5, {"run": {"a": 1}})
    checkpointer.wait()
    for step, name, wrong in ((5, "absent-item", "absent-item"), (77, "run", "77")):
        message = got = None
        try:
            got = checkpointer.restore(step, {name: None})
        except (ValueError, KeyError, FileNotFoundError) as error:
            message = str(error)
        assert message is not None, f"restore of a missing {wrong} gave {got}, expected an error"
        assert wrong in message, f"the error for a missing {wrong} does not name it: {message}"
    checkpointer.close()
