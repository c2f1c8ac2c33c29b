"""`styrax.checkpoint.diff` and its command, against trees whose differences are known."""

import json

import jax
import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError
from styrax.checkpoint.diff import Change, diff


def big_files(folder):
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def save(folder, step, items, **config):
    with CheckpointConfig(pack_below=1000, keep_last=99, **config).build(folder) as store:
        store.save(step, items)
    return folder


@pytest.fixture
def base():
    return {
        "large": np.arange(600.0).reshape(20, 30),
        "small": np.arange(6, dtype=np.float32),
        "rate": 0.5,
        "key": jax.random.key(0),
        "layers": [np.zeros(2), np.ones(2)],
        "empty": np.zeros((0, 3)),
        "nan": float("nan"),
    }


def both(tmp_path, a, b):
    save(save(tmp_path / "run", 1, a), 2, b)
    return f"{tmp_path}/run@1", f"{tmp_path}/run@2"


def test_equal_trees_do_not_differ(tmp_path, base):
    again = jax.tree.map(lambda leaf: leaf, base)
    found = diff(*both(tmp_path, {"params": base, "run": {"a": [1, {}]}}, {"params": again, "run": {"a": [1, {}]}}))
    assert found.same and not found.changes
    assert set(found.equal) == {f"params/{name}" for name in ("large", "small", "rate", "key", "empty", "nan")} | {
        "params/layers/0",
        "params/layers/1",
        "run/a/0",
        "run/a/1",
    }
    assert (found.a, found.b) == (tmp_path / "run/00000001", tmp_path / "run/00000002")


def test_every_kind_of_difference(tmp_path, base):
    other = {
        "large": base["large"].reshape(30, 20),
        "small": base["small"].astype(np.float64),
        "rate": np.float64(0.5),
        "key": jax.random.key(0, impl="rbg"),
        "layers": [np.zeros(2), np.ones(2), np.ones(3)],
        "empty": np.zeros((0, 3)),
        "new": 1,
    }
    a = {"params": base, "thing": {"x": np.ones(1)}, "old": {"y": 1}}
    b = {"params": other, "thing": {"x": 1}, "added": {"m": np.zeros(1)}}
    found = diff(*both(tmp_path, a, b))
    key = f"uint32[2] key of {jax.random.key_impl(base['key'])}"
    assert {change.path: (change.what, change.a, change.b) for change in found.changes} == {
        "params/large": ("shape", "float64[20, 30]", "float64[30, 20]"),
        "params/small": ("dtype", "float32[6]", "float64[6]"),
        "params/rate": ("kind", "float 0.5", "float64[]"),
        "params/key": ("kind", key, "uint32[4] key of rbg"),
        "params/layers/2": ("only in b", None, "float64[3]"),
        "params/nan": ("only in a", "float nan", None),
        "params/new": ("only in b", None, "int 1"),
        "thing": ("kind", "a tree of 1 leaf", "JSON"),
        "old/y": ("only in a", "1", None),
        "added/m": ("only in b", None, "float64[1]"),
    }
    assert set(found.equal) == {"params/layers/0", "params/layers/1", "params/empty"}
    back = diff(found.b, found.a)
    mirror = {"only in a": "only in b", "only in b": "only in a"}
    assert {(c.path, c.what, c.a, c.b) for c in back.changes} == {
        (c.path, mirror.get(c.what, c.what), c.b, c.a) for c in found.changes
    }


def test_values_and_their_distance(tmp_path, base):
    other = base | {"large": base["large"] + 0, "small": base["small"] * 2, "rate": 0.25, "key": jax.random.key(1)}
    other["large"][3, 4] += 7
    a, b = both(
        tmp_path, {"params": base, "run": {"a/b": [1, 2], "c": None}}, {"params": other, "run": {"a/b": [1, 3], "c": 0}}
    )
    found = diff(a, b)
    assert [(change.path, change.what, change.distance) for change in found.changes] == [
        ("params/key", "values", None),
        ("params/large", "values", None),
        ("params/rate", "values", None),
        ("params/small", "values", None),
        ("run/a%2Fb/1", "values", None),
        ("run/c", "values", None),
    ]
    assert found.changes[4] == Change(path="run/a%2Fb/1", what="values", a="2", b="3")
    seen = []
    far = {c.path: c.distance for c in diff(a, b, stats=True, progress=lambda *one: seen.append(one)).changes}
    assert far["params/large"].different == 1 and far["params/large"].max_abs == 7
    assert far["params/large"].relative == pytest.approx(7 / np.linalg.norm(base["large"]))
    assert far["params/small"].different == 5 and far["params/small"].relative == pytest.approx(1)
    assert far["params/rate"] is far["params/key"] is None
    assert dict(seen) == {"params/large": 2 * 4800, "params/small": 2 * 24}


def test_only_some(tmp_path, base):
    other = base | {"small": base["small"] + 1, "rate": 0.25}
    a, b = both(tmp_path, {"params": base, "run": {"a": 1}}, {"params": other, "run": {"a": 2}})
    assert [change.path for change in diff(a, b, only=["**/small", "run/*"]).changes] == ["params/small", "run/a"]
    assert diff(a, b, only=["params/layers/**"]).same
    with pytest.raises(CheckpointError, match=r"'params/smal' fits nothing .did you mean 'params/small'"):
        diff(a, b, only=["params/smal", "run/*"])


@pytest.mark.parametrize("change", [False, True])
def test_what_was_saved_on_other_meshes_is_read(tmp_path, change):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    data = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    devices = np.array(jax.devices()[:8])
    layouts = [
        NamedSharding(Mesh(devices.reshape(2, 4), ("x", "y")), PartitionSpec("x", "y")),
        NamedSharding(Mesh(devices.reshape(8, 1), ("x", "y")), PartitionSpec("x")),
        NamedSharding(Mesh(devices.reshape(2, 4), ("x", "y")), PartitionSpec("x", "y")),
    ]
    for step, layout in enumerate(layouts):
        save(tmp_path, step, {"params": {"w": jax.device_put(data, layout)}})
        if change:
            data = data + np.eye(64, 48, dtype=np.float32)
    seen = []
    for other, read in ((1, 1), (2, 0)):  # the same parts have digests that can be compared
        seen.clear()
        found = diff(f"{tmp_path}@0", f"{tmp_path}@{other}", progress=lambda *one: seen.append(one))
        assert found.same is not change and len(seen) == read
    far = diff(f"{tmp_path}@0", f"{tmp_path}@1", stats=True).changes
    assert [one.distance.different for one in far] == ([48] if change else [])


def test_the_command(tmp_path, base, look):
    other = base | {"small": base["small"] + np.float32(0.5), "layers": [np.zeros(2)]}
    a, b = both(tmp_path, {"params": base, "run": {"a": 1}}, {"params": other, "run": {"a": 2}})
    found = look("diff", a, b, "--stats")
    assert found.code == 1 and found.out.splitlines() == [
        "only in a  params/layers/1  float64[2]",
        "values     params/small     float32[6]  100.000% differ, max |a - b| 0.5, |a - b| / |a| 0.1651",
        "values     run/a            1 -> 2",
        "6 equal, 1 only in a, 2 differ in values",
    ]
    same = look("diff", a, tmp_path / "run/00000001")
    assert (same.code, same.out) == (0, "9 equal\n")
    record = json.loads(look("diff", a, b, "--stats", "--json").out)
    assert record["same"] is False and record["equal"] == 6 and len(record["changes"]) == 3
    assert record["changes"][1]["distance"]["max_abs"] == 0.5


def test_trouble_is_no_difference(tmp_path, base, look):
    other = base | {"large": base["large"] + 1}
    a, b = both(tmp_path, {"params": base}, {"params": other})
    for arguments, text in (
        ((a, f"{tmp_path}/run@3"), "no checkpoint of step 3"),
        ((tmp_path / "rum", b), "did you mean 'run'"),
        ((a, b, "--only", "x"), "'x' fits nothing"),
        ((a,), "the following arguments are required: B"),
    ):
        found = look("diff", *arguments)
        assert (found.code, found.out) == (2, "") and text in found.err
    for path in big_files(tmp_path / "run/00000002/orbax/params"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    found = look("diff", a, b, "--stats")
    assert found.code == 2 and "params/large" in found.err
    assert look("diff", a, b).code == 1  # what was saved there still stands in the manifest
