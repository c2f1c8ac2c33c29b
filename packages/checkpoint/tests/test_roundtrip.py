"""Whatever can be saved comes back exactly, packed by us or written by Orbax."""

import collections
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store
from styrax.checkpoint.snapshot import orbax_name

WAYS = {"packed": {"pack_below": 2**30}, "orbax": {"pack_below": 1}}


@pytest.fixture(params=WAYS)
def store(request, tmp_path):
    with CheckpointConfig(keep_last=100, **WAYS[request.param]).build(tmp_path / "run") as store:
        yield store


def there_and_back(store, tree, like="itself"):
    step = max(store.steps(), default=0) + 1
    store.save(step, {"item": tree})
    return store.restore(step, {"item": tree if like == "itself" else like})["item"]


def test_keys_that_collide_in_orbax(store, same):
    x = np.arange(3.0)
    tree = {
        "a": {"b": x, "0": x + 1, "b/c": x + 2, "": x + 3},
        "a.b": x + 4,
        "a/b": x + 5,
        "a%2Fb": x + 6,
        "a.0": [x + 7, (x + 8,)],
        "": {"": x + 9},
        "é ☃\n\ud800": x + 10,
        "0": {0: x + 11, 10: x + 12, 2: x + 13},
        "flags": {False: x + 14, True: x + 15},
        "pairs": {(1, "a"): x + 16, (1, "b.c"): x + 17},
        "metrics": x + 18,
    }
    same(there_and_back(store, tree), tree)
    same(there_and_back(store, tree, None), tree)


@pytest.mark.parametrize("name", ["metrics", "state", "AUTO", "default", "a.b-c", "_CHECKPOINT_METADATA", "0"])
def test_item_names(name, store, same):
    items = {name: {"w": np.ones(3)}, "other": [np.zeros(2, np.int8)], f"{name}2": {"json": 1}}
    store.save(1, items)
    same(store.restore(1, dict.fromkeys(items)), items)


def test_leaves_of_every_kind(store, same):
    tree = {
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(20.0)[::-3],
        "jax": jnp.linspace(0, 1, 5),
        "scalars": (np.float32(1.5), np.int64(-3), np.bool_(True), jnp.bfloat16(2.5), np.float64(math.nan)),
        "python": [1, -(2**70), 0.1, math.nan, -math.inf, True, False, 1 + 2j, complex(0, math.inf), "text ☃", ""],
        "zero": (np.empty((0, 3), np.float32), jnp.zeros((2, 0), jnp.bfloat16), np.array(7)),
        "key": jax.random.key(3),
    }
    same(there_and_back(store, tree), tree)


def test_containers(store, same):
    tree = {"empty": [{}, [], (), None, {"a": None}], "z": 1, "a": (np.ones(1), [np.ones(2)]), "m": {2: "x", 1: "y"}}
    same(there_and_back(store, tree), tree)
    got = there_and_back(store, tree, None)
    same(got, tree)
    assert list(got) == list(tree) and list(got["m"]) == [2, 1]


@pytest.mark.parametrize(
    "value", [{}, [], None, 3, "text", [1, {"a": [None, True]}], {"x": 1e300, "y": -0.0}], ids=repr
)
def test_json_items(value, store):
    assert there_and_back(store, value, None) == value
    assert there_and_back(store, value) == value


def test_json_keeps_what_python_can_tell_apart(store):
    got = there_and_back(store, {"nan": math.nan, "inf": -math.inf, "one": 1, "float": 1.0, "true": True}, None)
    assert math.isnan(got["nan"]) and got["inf"] == -math.inf
    assert [type(got[name]) for name in ("one", "float", "true")] == [int, float, bool]
    # What JSON would change is kept as a tree instead.
    assert there_and_back(store, {"a": (1, 2)}, None) == {"a": (1, 2)}
    assert there_and_back(store, {1: "x"}, None) == {1: "x"}


Pair = collections.namedtuple("Pair", "left right")


def test_other_containers_come_back_as_asked_or_as_dictionaries(store, same):
    tree = {"pair": Pair(np.ones(2), [np.zeros(3)]), "ordered": collections.OrderedDict(b=np.ones(1), a=np.ones(2))}
    same(there_and_back(store, tree), tree)
    got = there_and_back(store, tree, None)
    same(got["pair"], {"left": np.ones(2), "right": [np.zeros(3)]})
    assert list(got["ordered"]) == ["b", "a"]


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "bfloat16", "complex64", "complex128", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"),
    *("float6_e2m3fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3b11fnuz"),
]


def test_dtypes(store, same):
    tree = {name: np.array([[0, 1, 1], [1, 0, 1]]).astype(np.dtype(name)) for name in DTYPES}
    same(there_and_back(store, tree), tree)
    device = {
        name: jnp.asarray(tree[name]) for name in ("bool", "bfloat16", "float16", "int4", "float8_e5m2", "uint32")
    }
    same(there_and_back(store, device), device)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys(impl, store, same):
    key = jax.random.key(7, impl=impl)
    tree = {"one": key, "many": jax.random.split(key, (2, 3)), "legacy": jax.random.PRNGKey(1), "none": key[None][:0]}
    same(there_and_back(store, tree), tree)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    got = there_and_back(store, tree, abstract)
    same(got, tree)
    same(there_and_back(store, tree, None)["many"], tree["many"])
    assert jax.random.uniform(got["one"]) == jax.random.uniform(key)


def test_what_it_is_restored_as(store):
    saved = {"a": np.arange(4.0, dtype=np.float32), "b": jnp.arange(4.0), "c": np.float32(2), "d": jnp.float32(2)}
    store.save(1, {"item": saved})
    for like, kinds in (
        (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), [jax.Array] * 4),
        (lambda x: jnp.zeros(x.shape, x.dtype), [jax.Array] * 4),
        (lambda x: np.zeros(x.shape, x.dtype), [np.ndarray] * 4),
    ):
        got = store.restore(1, {"item": jax.tree.map(like, saved)})["item"]
        for leaf, kind in zip(got.values(), kinds):
            assert isinstance(leaf, kind) and not isinstance(leaf, jax.ShapeDtypeStruct)
    got = store.restore(1, {"item": None})["item"]
    assert [type(leaf) for leaf in got.values()] == [np.ndarray, np.ndarray, np.float32, np.ndarray]
    got["a"][0] = 7  # nobody else's memory


def test_restores_one_item_without_the_others(tmp_path):
    with CheckpointConfig(pack_below=1).build(tmp_path) as store:
        store.save(1, {"params": {"w": np.ones(4)}, "opt_state": {"m": np.zeros(4)}, "run": {"step": 1}})
        store.wait()
        for path in [*(tmp_path / "00000001/orbax/opt_state").rglob("*"), tmp_path / "00000001/aux/run.json"]:
            if path.is_file():
                path.write_bytes(b"")
        assert list(store.restore(1, {"params": None})) == ["params"]
        with pytest.raises(CheckpointError, match="is damaged"):
            store.restore(1, {"opt_state": None})


def test_nnx(store, same):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
            self.value = nnx.Param(jnp.ones(2))

    model = Model(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    same(there_and_back(store, params), params)
    abstract = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(1))), nnx.Param)
    same(there_and_back(store, params, abstract), params)
    pure = there_and_back(store, params, None)
    np.testing.assert_array_equal(pure["layers"][0]["kernel"], params["layers"][0]["kernel"][...])
    empty = nnx.state(model, nnx.BatchStat)
    assert not jax.tree.leaves(there_and_back(store, empty)) and there_and_back(store, {}, empty) == empty


names = st.text(max_size=3) | st.sampled_from(["a", "a.b", "a/b", "0", "%", "value"])
leaves = st.one_of(
    hnp.arrays(st.sampled_from([np.float32, np.int8, np.uint64, np.bool_]), hnp.array_shapes(min_dims=0, min_side=0)),
    st.sampled_from([np.float32(0.1), np.int64(5), 3, 0.5, True, "x", None]),
)
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.dictionaries(names, children, max_size=3),
        st.dictionaries(st.integers(-9, 99), children, max_size=3),
        st.lists(children, max_size=3),
        st.tuples(children, children),
    ),
    max_leaves=8,
)


@hypothesis.given(trees)
@hypothesis.settings(max_examples=40, deadline=None, database=None)
def test_any_tree(tmp_path_factory, tree):
    import shutil

    directory = tmp_path_factory.mktemp("tree")
    with CheckpointConfig(async_save=False).build(directory) as store:
        store.save(1, {"item": tree})
        got = store.restore(1, {"item": None})["item"]
    shutil.rmtree(directory)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(tree)):
        assert type(left) is type(right)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
        assert np.asarray(left).dtype == np.asarray(right).dtype and np.shape(left) == np.shape(right)


@hypothesis.given(st.lists(st.text(max_size=4), min_size=2, max_size=2, unique=True))
@hypothesis.settings(max_examples=200, deadline=None, database=None)
def test_names_in_orbax_never_collide(paths):
    assert orbax_name(paths[0]) != orbax_name(paths[1])
    assert not set("./") & set(orbax_name(paths[0]))


def test_stock_orbax_reads_the_arrays(tmp_path):
    from orbax.checkpoint import v1 as ocp

    with Store(tmp_path, CheckpointConfig(pack_below=1)) as store:
        store.save(3, {"params": {"layer": {"w": np.arange(4.0)}}})
        store.wait()
        got = ocp.load_checkpointables(str(tmp_path / "00000003/orbax"))
    np.testing.assert_array_equal(got["params"]["layer%2Fw"], np.arange(4.0))


def test_bytes_and_text(store, same):
    tree = {
        "bytes": [b"", b"\0\xff" * 9, bytes(range(256))],
        "text": ["", "a\0b", "\u2028 \U0001f600", "\ud800", "x" * 5000],
        "big": [2**63, -(2**64), 10**400, 0, -1],
        "floats": [5e-324, 1.7976931348623157e308, -0.0, 0.1 + 0.2],
    }
    same(there_and_back(store, tree), tree)
    same(there_and_back(store, tree, None), tree)


SCALARS = [*("bool", "int8", "uint64", "float16", "float64", "complex64", "complex128", "bfloat16", "int4", "uint4")]
SCALARS += ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


def test_scalars_of_numpy(store, same):
    tree = {name: np.ones((), np.dtype(name))[()] for name in SCALARS}
    assert all(isinstance(value, np.generic) for value in tree.values())
    same(there_and_back(store, tree), tree)
    same(there_and_back(store, tree, None), tree)


def test_nothing_at_all(store, same):
    for tree in ({}, [], (), None, {"a": {}}, [(), {}], {"a": np.empty((3, 0, 2), np.int8)}, {"a": jnp.zeros((0,))}):
        same(there_and_back(store, tree), tree)
    store.save(99, {})
    store.wait()
    assert store.restore(99, {}) == {} and store.manifest(99).items == {}
    assert store.verify(99) == []


@pytest.mark.parametrize("profile", ["local", "shared", "object"])
def test_profiles(profile, tmp_path, same):
    tree = {f"{size}": np.arange(size, dtype=np.uint8) for size in (10, 2**20 - 1, 2**20, 2**22, 2**23)}
    packed = {"local": 2, "shared": 3, "object": 4}[profile]
    with CheckpointConfig(profile=profile).build(tmp_path) as store:
        same(there_and_back(store, tree), tree)
        assert [leaf.where for leaf in store.manifest(1).items["item"].leaves].count("packed") == packed
        assert store.verify(1) == []


@pytest.mark.parametrize("profile", ["local", "shared"])
def test_large_arrays_in_chunks(profile, tmp_path, monkeypatch, same):
    from styrax.checkpoint import arrays

    monkeypatch.setattr(arrays, "_CHUNKED_ABOVE", 2**16)
    monkeypatch.setattr(arrays, "_CHUNK", 2**14)
    draw = np.random.default_rng(0)
    tree = {
        "wide": draw.normal(size=(33, 1001)).astype(np.float32),
        "cube": draw.normal(size=(6, 40, 200)).astype(np.float32),
        "prime": draw.integers(0, 255, 99_991).astype(np.uint8),  # Orbax would make a piece of each byte
        "device": jnp.asarray(draw.normal(size=(300, 77)), jnp.bfloat16),
        "small": np.arange(9),
    }
    with CheckpointConfig(profile=profile, pack_below=1, compress=("more",)).build(tmp_path) as store:
        store.save(1, {"item": tree, "more": tree})
        for like in (tree, None):
            for name, found in store.restore(1, {"item": like, "more": like}).items():
                for path, value in tree.items():
                    assert found[path].dtype == value.dtype, name
                    assert np.asarray(found[path]).tobytes() == np.asarray(value).tobytes(), (name, path)
        assert store.verify(1) == []
        if profile == "local":  # one file a chunk
            count = {path: len(list((tmp_path / "00000001/orbax/item" / path).glob("[0-9]*"))) for path in tree}
            assert count == {"wide": 1, "cube": 16, "prime": 1, "device": 1, "small": 1}


@pytest.mark.parametrize("profile", ["local", "shared"])
def test_stock_orbax_reads_what_is_compressed(profile, tmp_path):
    from orbax.checkpoint import v1 as ocp

    x = np.tile(np.arange(16, dtype=np.float32), 4096)
    items = {"params": {"w": x, "n": {"b": x[:9].astype(jnp.bfloat16)}}, "opt": {"m": x + 1}}
    with CheckpointConfig(pack_below=1, compress=("params",), profile=profile).build(tmp_path) as store:
        store.save(3, items)
        store.wait()
        found = store.restore(3, {"params": items["params"], "opt": None})
        assert found["params"]["w"].tobytes() == x.tobytes() and store.verify(3) == []
    folder = tmp_path / "00000003"
    squeezed, plain = (ocp.load_checkpointables(str(folder / name)) for name in ("orbax-zstd", "orbax"))
    np.testing.assert_array_equal(squeezed["params"]["w"], x)
    np.testing.assert_array_equal(squeezed["params"]["n%2Fb"], x[:9].astype(jnp.bfloat16))
    np.testing.assert_array_equal(plain["opt"]["m"], x + 1)
    sizes = [sum(path.stat().st_size for path in (folder / name).rglob("*")) for name in ("orbax-zstd", "orbax")]
    assert sizes[0] < sizes[1] / 4
    with CheckpointConfig(pack_below=1, compress=("prams",)).build(tmp_path) as store:
        store.save(4, items)  # an item of that name may come later


NO_DEVICES = """
import sys
import numpy as np
from styrax.checkpoint import CheckpointConfig, Store
from styrax.core.cli import main

directory = sys.argv[1]
store = Store(directory, read_only=True)
assert store.steps() == [1] and store.verify(1) == [] and store.latest() == 1
want = {"w": np.zeros((9, 5), np.float32), "b": np.zeros(3, np.int8), "s": np.float32(0), "n": 3, "t": np.zeros(4)}
for like in (want, None):
    got = store.restore(1, {"params": like, "run": None})
    assert got["run"] == {"a": 1} and got["params"]["n"] == 7 and got["params"]["s"] == 2
    assert (got["params"]["w"] == 1).all() and (got["params"]["b"] == 2).all() and (got["params"]["t"] == 3).all()
assert store.resume(params=None).step == 1
for command in (["list", directory], ["show", directory, "1"], ["verify", directory]):
    assert main(["checkpoint", *command]) == 0
with CheckpointConfig().build(directory) as store:
    store.save(2, {"params": want})
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"pack_below": 1}], ids=str)
def test_without_devices(changes, tmp_path, run_python):
    with CheckpointConfig(**changes).build(tmp_path) as store:
        w = jnp.ones((9, 5))
        params = {"w": w, "b": np.full(3, 2, np.int8), "s": np.float32(2), "n": 7, "t": np.full(4, 3.0)}
        store.save(1, {"params": params, "run": {"a": 1}})
    done = run_python(NO_DEVICES, tmp_path, env={"JAX_PLATFORMS": "none-such"})
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_orbax_needs_devices_and_says_so(tmp_path, run_python):
    """What lies in one file with others, or compressed, is read by Orbax, which asks jax for its devices."""
    with CheckpointConfig(pack_below=1, profile="shared").build(tmp_path) as store:
        store.save(1, {"params": {"w": jnp.ones((9, 5))}, "run": {"a": 1}})
    code = """
import sys
from styrax.checkpoint import CheckpointError, Store

store = Store(sys.argv[1], read_only=True)
assert store.latest() == 1 and store.restore(1, {"run": None}) == {"run": {"a": 1}}
for call in (lambda: store.restore(1, {"params": None}), lambda: store.resume(params=None)):
    try:
        call()
    except CheckpointError as error:
        assert "cannot be read, though its files are what was saved: RuntimeError: Unable to init" in str(error), error
    else:
        raise AssertionError("it needs no devices any more")
"""
    done = run_python(code, tmp_path, env={"JAX_PLATFORMS": "none-such"})
    assert done.returncode == 0, done.stderr[-2000:]
