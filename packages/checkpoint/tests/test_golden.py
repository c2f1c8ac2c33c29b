"""Checkpoints of earlier versions are read by this one, for ever; `tools/golden/checkpoint_own.py` wrote them."""

import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from styrax.checkpoint import Store, naming

FILES = sorted((Path(__file__).with_name("golden")).glob("own-*.zip"))
KINDS = ["local-1", "local-1048576", "shared-1", "shared-1048576"]


def array(number, shape, dtype):
    count = int(np.prod(shape))
    return (np.arange(count) % 2 + number % 2).reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    shutil.unpack_archive(request.param, folder)
    return folder


def equal(got, expected):
    assert type(got) is np.ndarray and got.dtype == expected.dtype and got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def test_there_are_some():
    assert [path.stem for path in FILES] == ["own-2"]


@pytest.mark.parametrize("kind", KINDS)
def test_as_saved(kind, written):
    store = Store(written / kind, read_only=True)
    assert store.steps() == [12] and store.verify(12) == [] and store.manifest(12).metrics == {"loss": 0.25}
    names = ["dtypes", "params", "zipped", "rng", "python", "data", "run"]
    assert list(store.manifest(12).items) == names
    got = store.restore(12, dict.fromkeys(names))
    for number, (name, value) in enumerate(got["dtypes"].items()):
        equal(value, array(number, (6, 8), name))
    assert len(got["dtypes"]) == 13
    params = got["params"]
    assert list(params) == ["layers", "a.b/c", "empty", "ints"]
    assert list(params["ints"]) == [5, 11] and params["ints"][5][1] is None
    for number, layer in enumerate(params["layers"]):
        equal(layer["w"], array(number, (8, 12), "float32"))
    equal(params["a.b/c"], array(3, (4, 16), "float32"))
    equal(params["empty"], np.zeros((0, 3), np.float32))
    equal(params["ints"][5][0], array(4, (64,), "int32"))
    equal(params["ints"][11], array(6, (3,), "int8"))
    equal(got["zipped"]["w"], array(5, (32, 8), "float32"))
    python = got["python"]
    assert {name: (type(value), value) for name, value in python.items()} == {
        "n": (int, 3),
        "x": (float, 0.5),
        "c": (complex, 1 + 2j),
        "t": (str, "text"),
        "b": (bytes, b"\x00\xff"),
        "f": (np.float32, 2.5),
    }
    # The data of these keys is a fact of their algorithms, not of this package.
    assert jax.random.key_data(got["rng"]["key"]).tolist() == [0, 3]
    assert str(jax.random.key_impl(got["rng"]["keys"])) == "rbg" and got["rng"]["keys"].shape == (2,)
    assert got["data"] == {"step": 7, "seed": [1, 2]}
    assert got["run"] == {"name": "golden", "list": [1, None, {"a": True}]}


@pytest.mark.parametrize("kind", ["local-1", "shared-1"])
def test_orbax_reads_its_part(kind, written):
    folder = written / kind / "00000012"
    leaves = Store(written / kind, read_only=True).manifest(12).items["params"].leaves
    like = {
        naming.orbax_name(leaf.path): np.zeros(leaf.shape, leaf.dtype) for leaf in leaves if leaf.where == "orbax"
    }  # which Orbax needs of an array that was laid out over devices
    found = ocp.load_checkpointables(str(folder / "orbax"), {"params": like})
    np.testing.assert_array_equal(np.asarray(found["params"]["layers%2F1%2Fw"]), array(1, (8, 12), "float32"))
    np.testing.assert_array_equal(np.asarray(found["params"]["a%2Eb%252Fc"]), array(3, (4, 16), "float32"))
    zipped = ocp.load_checkpointables(str(folder / "orbax-zstd"))
    np.testing.assert_array_equal(np.asarray(zipped["zipped"]["w"]), array(5, (32, 8), "float32"))
