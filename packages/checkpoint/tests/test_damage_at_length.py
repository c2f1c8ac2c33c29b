"""Many flips, zeroed pages, truncations and deletions over every file of checkpoints of every layout."""

import random
import shutil

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, verify
from styrax.checkpoint.manifest import FILE

LAYOUTS = {
    "local": {"pack_below": 2000},
    "shared": {"pack_below": 2000, "profile": "shared"},
    "zipped": {"pack_below": 2000, "compress": ("params",)},
    "packed": {"pack_below": 2**30},
}
EACH = 32  # of each damage on each layout: 128 in all


def items():
    draw = np.random.default_rng(5)
    return {
        "params": {f"large{n}": draw.normal(size=(40, 50)).astype(np.float32) for n in range(4)},
        "more": {f"small{n}": draw.integers(0, 99, 30) for n in range(4)},
        "run": {"step": 1, "text": "x" * 300},
    }


def spread(tree):
    """Lay the large ones out over eight devices."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec("y", "x"))
    return {**tree, "params": {name: jax.device_put(value, where) for name, value in tree["params"].items()}}


def flip(data, draw):
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def zero(data, draw):
    at = draw.randrange(0, len(data), 4096)
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


def truncate(data, draw):
    del data[draw.randrange(len(data)) :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", [flip, zero, truncate, None], ids=["flip", "zero", "truncate", "delete"])
def test_nothing_damaged_comes_back(damage, layout, tmp_path):
    draw, saved, whole = random.Random(f"{layout} {damage}"), items(), tmp_path / "whole"
    many = layout in ("local", "shared") and _eight()
    with CheckpointConfig(**LAYOUTS[layout]).build(whole) as store:
        store.save(1, spread(saved) if many else saved)
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.parent != whole]
    names = [name for name in names if (whole / name).stat().st_size]
    refused = 0
    for number in range(max(EACH, len(names))):
        name = names[number % len(names)]
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        data = bytearray((copy / name).read_bytes())
        before = bytes(data)
        if damage is None:
            (copy / name).unlink()
        else:
            damage(data, draw)
            (copy / name).write_bytes(data)
        if damage is None or data != before:
            inside = name.relative_to("00000001").as_posix()
            problems = verify(copy / "00000001")
            assert len(problems) == 1 and problems[0].startswith(f"{inside}: ")
            if inside.startswith("aux/leaves"):
                assert "(leaf " in problems[0] or "(padding" in problems[0]
            if inside.startswith("orbax/params/large"):
                assert f"(leaf params/{inside.split('/')[2]})" in problems[0]
            refused += not unharmed(copy, saved, gone=inside == FILE and damage is None)
        shutil.rmtree(copy)
    assert refused > 5


def unharmed(directory, saved, gone):
    """Restore: the very same or an error, never anything else."""
    store = Store(directory, read_only=True)
    assert not gone or store.steps() == []
    try:
        found = store.restore(1, dict.fromkeys(saved))
    except CheckpointError:
        return False
    assert found["run"] == saved["run"]
    for item in ("params", "more"):
        for path, value in saved[item].items():
            assert found[item][path].dtype == value.dtype and found[item][path].tobytes() == value.tobytes(), path
    return True


def _eight():
    import jax

    return len(jax.devices()) == 8
