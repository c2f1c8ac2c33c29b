"""The fingerprint of a schema, and statistics of arrays, against values that were worked out by other means."""

import math

import jax
import ml_dtypes
import numpy as np
import pytest
import xxhash

from styrax.checkpoint import CheckpointError, Store, measure, read_manifest
from styrax.checkpoint.schema import fingerprint


def by_hand(*lines):
    """The fingerprint of lines that were written by hand."""
    return xxhash.xxh3_128_hexdigest("".join(line + "\n" for line in lines).encode())


@pytest.fixture
def tree():
    return {
        "w": jax.numpy.zeros((3, 4), "bfloat16"),
        "layers": [{"b": np.zeros(2, np.int8)}, {"b": np.zeros((0, 2), ml_dtypes.int4)}],
        "odd/ké": np.float16(1),
        "rate": 0.5,
        "name": "x",
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
    }


LINES = (
    r'["params","key","key",[2],"uint32","fry"]',
    r'["params","keys","key",[3,4],"uint32","rbg"]',
    r'["params","layers/0/b","array",[2],"int8",""]',
    r'["params","layers/1/b","array",[0,2],"int4",""]',
    r'["params","name","python",[],"str",""]',
    r'["params","odd%2Fk\u00e9","scalar",[],"float16",""]',
    r'["params","rate","python",[],"float",""]',
    r'["params","w","array",[3,4],"bfloat16",""]',
)
OPT = '["opt","","array",[5],"float32",""]'


def test_a_checkpoint_and_what_it_was_made_of_have_one_fingerprint(tree, tmp_path):
    items = {"params": tree, "opt": np.zeros(5, np.float32), "run": {"step": 1}}
    with Store(tmp_path) as store:
        store.save(1, items)
    manifest = read_manifest(tmp_path / "00000001")
    lines = [line.replace('"fry"', f'"{jax.random.key_impl(tree["key"])}"') for line in LINES]
    assert fingerprint(manifest) == by_hand(OPT, *lines) == fingerprint(items)
    assert fingerprint(manifest, items=["params"]) == by_hand(*lines) == fingerprint({"params": tree})
    assert fingerprint(manifest, items=["run"]) == by_hand() == fingerprint({})
    abstract = jax.eval_shape(lambda: {name: tree[name] for name in ("w", "key", "keys")})
    assert fingerprint({"params": tree | abstract}) == fingerprint({"params": tree})


@pytest.mark.parametrize(
    "change",
    [
        {"w": jax.ShapeDtypeStruct((4, 3), "bfloat16")},
        {"w": jax.ShapeDtypeStruct((3, 4), "float16")},
        {"rate": np.float64(0.5)},
        {"rate": 1},
        {"odd/ké": np.zeros((), np.float16)},
        {"key": jax.random.key(0, impl="rbg")},
        {"key": np.zeros(2, np.uint32)},
        {"more": np.zeros(1)},
    ],
)
def test_any_change_changes_it(tree, change):
    assert fingerprint({"params": tree | change}) != fingerprint({"params": tree})
    assert fingerprint({"params": tree | {"rate": 0.25}}) == fingerprint({"params": tree})


def test_what_has_no_shape_is_named():
    with pytest.raises(CheckpointError, match=r"(?s)params/a: is object.*params/b/0: is type"):
        fingerprint({"params": {"a": object(), "b": [int], "c": np.zeros(1)}})
    with pytest.raises(CheckpointError, match=r"no item 'param' .did you mean 'params'.*there are params"):
        fingerprint({"params": {"a": np.zeros(1)}}, items=["param"])


def arrays():
    noise = np.random.default_rng(0)
    floats = noise.normal(size=(30, 7))
    floats[3, :3] = np.nan, np.inf, -np.inf
    floats[5] = 0
    yield "float64", floats
    yield "float32", floats.astype(np.float32)
    yield "bfloat16", floats.astype(ml_dtypes.bfloat16)
    yield "float8_e5m2", floats.astype(ml_dtypes.float8_e5m2)
    yield "float4_e2m1fn", noise.normal(size=40).astype(ml_dtypes.float4_e2m1fn)
    yield "int4", noise.integers(-8, 8, 40).astype(ml_dtypes.int4)
    yield "uint8", noise.integers(0, 256, (5, 8)).astype(np.uint8)
    yield "int64", noise.integers(-(2**63), 2**63 - 1, 40)
    yield "bool", noise.integers(0, 2, 40).astype(bool)
    yield "complex64", np.stack([floats, floats[::-1]], -1).astype(np.float32).view(np.complex64)[..., 0]
    yield "huge", np.array([1e300, -1e300, 1e300, 5.0])
    yield "scalar", np.array(3.5)
    yield "empty", np.zeros((0, 3))
    yield "nothing finite", np.array([np.nan, np.inf])


ARRAYS = list(arrays())


@pytest.fixture(params=[2**18, 11])
def piece(request, monkeypatch):
    monkeypatch.setattr(measure, "_PIECE", request.param)


@pytest.mark.parametrize("array", [array for _, array in ARRAYS], ids=[name for name, _ in ARRAYS])
@pytest.mark.usefixtures("piece")
def test_statistics(array):
    found = measure.summarize(array)
    numbers = [complex(x) if array.dtype.kind == "c" else x + 0 for x in array.reshape(-1).tolist()]
    sizes = [abs(x) if isinstance(x, complex) else x for x in numbers]
    finite = [x for x in sizes if math.isfinite(x)]
    assert found.count == len(numbers)
    assert found.zeros == sum(x == 0 for x in numbers)
    assert found.nans == sum(x != x for x in numbers)
    assert found.infs == sum(math.isinf(x) for x in sizes)
    if not finite:
        assert (found.min, found.max, found.mean, found.std) == (None,) * 4
        return
    assert found.min == pytest.approx(min(finite), rel=1e-15) and found.max == pytest.approx(max(finite), rel=1e-15)
    if array.dtype.kind in "iub":
        assert (found.min, found.max) == (min(finite), max(finite))
    mean = math.fsum(x / len(finite) for x in finite)
    assert found.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert found.std == pytest.approx(math.hypot(*(x - mean for x in finite)) / math.sqrt(len(finite)), rel=1e-9)


def changed(array):
    other = array.copy()
    flat = other.reshape(-1)
    flat[1:4] = flat[4:7][::-1]
    return other


@pytest.mark.parametrize(
    "array", [array for _, array in ARRAYS if array.size > 6], ids=[name for name, array in ARRAYS if array.size > 6]
)
@pytest.mark.usefixtures("piece")
def test_distance(array):
    other = changed(array)
    found = measure.compare(array, other)
    size = array.dtype.itemsize
    left, right = (np.ascontiguousarray(a).tobytes() for a in (array, other))
    differ = sum(left[at : at + size] != right[at : at + size] for at in range(0, len(left), size))
    assert (found.count, found.different, found.fraction) == (array.size, differ, differ / array.size)
    convert = complex if array.dtype.kind == "c" else (lambda x: x)
    pairs = [tuple(map(convert, pair)) for pair in zip(array.reshape(-1).tolist(), other.reshape(-1).tolist())]
    finite = [(x, y) for x, y in pairs if math.isfinite(abs(x)) and math.isfinite(abs(y))]
    assert found.max_abs == pytest.approx(max(abs(x - y) for x, y in finite), rel=1e-12)
    norm = math.hypot(*(abs(x - y) for x, y in finite)) / math.hypot(*(abs(x) for x, _ in finite))
    assert found.relative == pytest.approx(norm, rel=1e-9)
    assert found.nans == tuple(sum(pair[side] != pair[side] for pair in pairs) for side in (0, 1))
    assert found.infs == tuple(sum(math.isinf(abs(pair[side])) for pair in pairs) for side in (0, 1))
    assert measure.compare(array, array).different == 0


def test_distances_at_the_edge():
    least, most = np.array([-(2**63)]), np.array([2**63 - 1])
    assert measure.compare(least, most).max_abs == 2**64 - 1
    assert measure.compare(np.array([1e300]), np.array([-1e300])).relative == 2.0
    zero = np.zeros(3)
    assert measure.compare(zero, zero).relative == 0.0 and measure.compare(zero, zero + 1).relative == math.inf
    assert measure.compare(zero, -zero).different == 3 and measure.compare(zero, -zero).max_abs == 0.0
    nothing = measure.compare(np.zeros((0, 2)), np.zeros((0, 2)))
    assert (nothing.fraction, nothing.max_abs, nothing.relative) == (0.0, None, None)
    cast = measure.compare(np.array([1.0, 1.1]), np.array([1.0, 1.1], ml_dtypes.bfloat16))
    assert cast.different == 1 and cast.max_abs == pytest.approx(abs(1.1 - 1.1015625))


def test_a_module_is_the_tree_of_its_variables():
    nnx = pytest.importorskip("flax.nnx")
    lines = ('["model","bias","array",[4],"float32",""]', '["model","kernel","array",[3,4],"float32",""]')
    module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    assert fingerprint({"model": module}) == by_hand(*lines)
    abstract = nnx.eval_shape(lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    assert fingerprint({"model": abstract}) == by_hand(*lines)
