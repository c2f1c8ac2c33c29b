"""What a restore may leave out, fill in and cast, and only where it is told to."""

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from styrax.checkpoint import CheckpointConfig, CheckpointError
from styrax.checkpoint.policy import castable, convert

PARAMS = {
    "embed": np.arange(40, dtype=np.float32).reshape(8, 5),
    "layers": [{"q": np.ones((3, 4), np.float32), "b": np.arange(3, dtype=np.int32)}, {"q": np.zeros(2)}],
}
ITEMS = {"params": PARAMS, "opt": {"mu": np.full(3, 2.0), "count": 4}, "run": {"step": 7}}


@pytest.fixture(scope="module", params=[1, 2**30], ids=["orbax", "packed"])
def store(request, tmp_path_factory):
    with CheckpointConfig(pack_below=request.param).build(tmp_path_factory.mktemp("policies")) as store:
        store.save(7, ITEMS)
        store.wait()
        yield store


def refused(store, like, **options):
    with pytest.raises(CheckpointError) as caught:
        store.restore(7, like, **options)
    return str(caught.value)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# Missing


def more(**extra):
    return {"params": {**PARAMS, **extra}}


@pytest.mark.parametrize("option", ["error", {}, {"params/embed": "keep"}, {"**/lora": "error", "**": "keep"}])
def test_missing_is_an_error_unless_told(store, option):
    text = refused(store, more(lora=np.ones(2)), on_missing=option)
    assert "params/lora: missing from the checkpoint" in text


@pytest.mark.parametrize("option", ["keep", {"params/lora/*": "keep"}, {"params/lora/**": "keep", "**": "error"}])
def test_missing_is_kept(store, same, option):
    lora = {"a": np.full(2, 3.0), "b": [jnp.ones(1)]} if option != {"params/lora/*": "keep"} else {"a": np.full(2, 3.0)}
    got = store.restore(7, more(lora=lora), on_missing=option)["params"]
    same(got, {**PARAMS, "lora": lora})


def test_missing_is_made_by_a_function(store, same):
    asked = []

    def make(path, leaf):
        asked.append((path, leaf.shape))
        return jnp.full(leaf.shape, 5, leaf.dtype)

    lora = {"a": jax.ShapeDtypeStruct((2, 2), jnp.bfloat16), "b": jax.ShapeDtypeStruct((), jnp.int32)}
    got = store.restore(7, more(lora=lora), on_missing={"params/lora/*": make})["params"]
    same(got["lora"], {"a": jnp.full((2, 2), 5, jnp.bfloat16), "b": jnp.int32(5)})
    assert sorted(asked) == [("params/lora/a", (2, 2)), ("params/lora/b", ())]
    resumed = store.resume(more(lora=lora), on_missing=make, on_extra="drop")
    assert resumed.kept == ("params/lora/a", "params/lora/b")
    assert sorted(resumed.left) == ["opt/count", "opt/mu"]


@pytest.mark.parametrize("wrong", [jnp.ones(3), jnp.ones((2, 2), jnp.int32), None, 3.0, "x"], ids=repr)
def test_a_function_that_makes_something_else(store, wrong):
    lora = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    text = refused(store, more(lora=lora), on_missing=lambda path, leaf: wrong)
    assert "params/lora: the function of on_missing gave " in text and "expected float32[2, 2]" in text


def test_a_function_that_raises_says_where(store):
    def make(path, leaf):
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        store.restore(7, more(lora=np.ones(1)), on_missing=make)


def test_what_is_kept_must_have_a_value(store):
    like = more(lora=jax.ShapeDtypeStruct((2,), jnp.float32), norm=jax.ShapeDtypeStruct((1,), jnp.float32))
    text = refused(store, like, on_missing="keep")
    assert "params/lora: is not read from the checkpoint and has no value" in text and "params/norm: " in text


def test_a_whole_item_may_be_missing(store, same):
    ema = {"w": np.ones(2)}
    assert "item 'emma': not in the checkpoint" in refused(store, {"params": None, "emma": ema})
    assert "did you mean 'params'" in refused(store, {"param": None})
    same(store.restore(7, {"ema": ema, "run": None}, on_missing={"ema/**": "keep"}), {"ema": ema, "run": {"step": 7}})
    assert "item 'ema'" in refused(store, {"ema": None}, on_missing="keep")


# Extra


@pytest.mark.parametrize("option", ["drop", {"params/layers/1/**": "drop", "**/b": "drop"}])
def test_extra_is_dropped(store, same, option):
    like = {"embed": PARAMS["embed"], "layers": [{"q": PARAMS["layers"][0]["q"]}]}
    text = refused(store, {"params": like})
    assert "params/layers/0/b: in the checkpoint, not asked for" in text and "params/layers/1/q: in the" in text
    same(store.restore(7, {"params": like}, on_extra=option)["params"], like)
    text = refused(store, {"params": like}, on_extra={"**/b": "drop"})
    assert "params/layers/0/b" not in text and "params/layers/1/q: in the" in text


# Only


def test_only_with_values(store, same):
    like = jax.tree.map(lambda x: np.full(x.shape, -1, x.dtype), PARAMS)
    got = store.restore(7, {"params": like}, only="params/layers/0/*")["params"]
    same(got, {"embed": like["embed"], "layers": [PARAMS["layers"][0], like["layers"][1]]})


def test_only_with_shapes_is_an_error_for_the_others(store):
    text = refused(store, {"params": abstract(PARAMS["layers"][0] | {"embed": PARAMS["embed"]})}, only=["params/embed"])
    assert "params/q: is not read from the checkpoint and has no value" in text
    assert "params/embed" not in text


def test_only_without_a_tree(store, same):
    same(store.restore(7, {"params": None}, only=["params/embed"])["params"], {"embed": PARAMS["embed"]})
    got = store.restore(7, {"params": None, "run": None}, only=["params/layers/1/q", "run"])
    same(got["params"], {"layers": [None, PARAMS["layers"][1]]})


# Casts


def test_cast(store, same):
    like = {"params": abstract(PARAMS)}
    like["params"]["embed"] = jax.ShapeDtypeStruct((8, 5), jnp.bfloat16)
    like["params"]["layers"][1]["q"] = jax.ShapeDtypeStruct((2,), jnp.float32)  # was float64
    text = refused(store, like)
    assert "params/embed: dtype float32 in the checkpoint, bfloat16 asked for" in text
    text = refused(store, like, cast="widen")
    assert "params/layers/1/q: dtype float64 in the checkpoint, float32 asked for and cast='widen'" in text
    got = store.restore(7, like, cast="any")["params"]
    same(got["embed"], jnp.asarray(PARAMS["embed"], jnp.bfloat16))
    same(got["layers"][1]["q"], jnp.zeros(2))
    wide = {"params": jax.tree.map(lambda x: np.zeros(x.shape, np.float64), PARAMS)}
    same(store.restore(7, wide, cast="widen")["params"], jax.tree.map(lambda x: x.astype(np.float64), PARAMS))
    assert "shape" in refused(store, {"params": {**PARAMS, "embed": np.zeros((5, 8))}}, cast="any")


NAMES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("uint64", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in NAMES}
BITS = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
BITS |= {"float6_e2m3fn": 6, "float6_e3m2fn": 6}


def every_value(name):
    """All values of a type of at most 16 bits."""
    dtype = DTYPES[name]
    if name == "bool":
        return np.array([False, True])
    if "int" in name:
        info = ml_dtypes.iinfo(dtype)
        return np.arange(int(info.min), int(info.max) + 1).astype(dtype)
    bits = BITS.get(name, 8 * dtype.itemsize)
    return np.arange(2**bits, dtype=f"u{dtype.itemsize}").view(dtype)


def kept(values, wanted):
    """Whether each comes through as the number that it is; compared in types that hold all of both."""
    with np.errstate(all="ignore"):
        try:
            cast = values.astype(wanted)
        except TypeError:  # ml_dtypes does not know every pair of its own
            cast = values.astype(np.float32).astype(wanted)
    if wanted.kind == "c":
        cast = cast.real if wanted == np.complex128 else cast.real.astype(np.float32)
    with np.errstate(all="ignore"):
        left, right = values.astype(np.float64), cast.astype(np.float64)
    return bool(np.all((left == right) | (np.isnan(left) & np.isnan(right))))


SMALL = [name for name in NAMES if DTYPES[name].itemsize <= 2]


@pytest.mark.parametrize("saved", SMALL)
def test_widen_against_every_value(saved):
    values = every_value(saved)
    for name, wanted in DTYPES.items():
        if wanted == np.dtype("uint64") or wanted == np.dtype("int64"):
            expected = "int" in saved or saved == "bool"
            expected = expected and (wanted.kind == "i" or not int(values.astype(np.int64).min()) < 0)
        elif wanted.kind == "b":
            expected = saved == "bool"
        else:
            expected = kept(values, wanted)
            if "int" in name and not ("int" in saved or saved == "bool"):
                expected = False  # a number with a fraction, or none at all, is no integer
        found = castable(values.dtype, wanted, "widen")
        assert expected == found, f"{saved} -> {name} {'is refused and keeps all' if expected else 'loses'} values"


@pytest.mark.parametrize("saved", ["int32", "int64", "uint32", "uint64", "float32", "float64", "complex64"])
def test_widen_of_wide_types(saved):
    wide = {
        "int32": {"int32", "int64", "float64", "complex128"},
        "int64": {"int64"},
        "uint32": {"uint32", "uint64", "int64", "float64", "complex128"},
        "uint64": {"uint64"},
        "float32": {"float32", "float64", "complex64", "complex128"},
        "float64": {"float64", "complex128"},
        "complex64": {"complex64", "complex128"},
    }
    assert {name for name, wanted in DTYPES.items() if castable(DTYPES[saved], wanted, "widen")} == wide[saved]


def test_exact_and_any():
    for saved in DTYPES.values():
        for wanted in DTYPES.values():
            assert castable(saved, wanted, "exact") == (saved == wanted)
            assert castable(saved, wanted, "any") == (saved.kind != "c" or wanted.kind == "c")


def as_wide(values):
    return values.astype(np.float32 if values.dtype.itemsize == 1 else values.dtype).astype(np.complex128)


@pytest.mark.parametrize("cast", ["widen", "any"])
def test_casts_of_every_pair(cast, tmp_path):
    """Ones, which all types hold, are ones in all others."""
    with CheckpointConfig().build(tmp_path) as store:
        store.save(1, {name: {"x": np.ones(12).astype(dtype)} for name, dtype in DTYPES.items()})
        allowed = 0
        for name, saved in DTYPES.items():
            fits = [other for other, wanted in DTYPES.items() if castable(saved, wanted, cast)]
            allowed += len(fits)
            for other in fits[:: 1 if cast == "widen" else 3]:
                got = store.restore(1, {name: {"x": np.zeros(12, DTYPES[other])}}, cast=cast)[name]["x"]
                assert got.dtype == DTYPES[other] and (as_wide(got) == 1).all(), (name, other)
        assert allowed > {"widen": 200, "any": 800}[cast]


@hypothesis.given(st.sampled_from(NAMES), st.sampled_from(NAMES), st.binary(min_size=64, max_size=64))
@hypothesis.settings(max_examples=300, deadline=None, database=None)
def test_widen_keeps_any_value(saved, wanted, data):
    if saved == "bool" or saved in BITS or not castable(DTYPES[saved], DTYPES[wanted], "widen"):
        return  # those of a few bits are tried one and all above
    values = np.frombuffer(data, DTYPES[saved])
    with np.errstate(all="ignore"):
        cast = convert(values, DTYPES[wanted])
    for left, right in zip(values, cast):
        if DTYPES[wanted].kind in "iu":
            assert int(left) == int(right)
        else:
            left, right = (complex(number) for number in (left, right))
            assert np.array_equal([left.real, left.imag], [right.real, right.imag], equal_nan=True)


def test_rounding_is_that_of_numpy(tmp_path):
    values = np.random.default_rng(0).normal(size=1000) * 1e3
    with CheckpointConfig().build(tmp_path) as store:
        store.save(1, {"a": {"x": values}})
        for name in ("float32", "bfloat16", "float16", "float8_e5m2", "int32"):
            got = store.restore(1, {"a": {"x": np.zeros(1000, DTYPES[name])}}, cast="any")["a"]["x"]
            assert got.tobytes() == values.astype(DTYPES[name]).tobytes()


def test_keys_and_python_numbers_are_never_cast(tmp_path):
    with CheckpointConfig().build(tmp_path) as store:
        store.save(1, {"a": {"key": jax.random.key(0), "n": 3}})
        for like in (
            {"key": jax.random.key(0, impl="rbg"), "n": 3},
            {"key": np.zeros(2, np.uint32), "n": 3},
            {"key": jax.random.key(0), "n": 3.0},
            {"key": jax.random.key(0), "n": np.int32(3)},
        ):
            with pytest.raises(CheckpointError, match="in the checkpoint"):
                store.restore(1, {"a": like}, cast="any")


# Arguments


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cast": "wide"}, "cast: expected 'exact', 'widen', 'any', got 'wide'"),
        ({"cast": "wident"}, "did you mean 'widen'"),
        ({"cast": None}, "cast: expected 'exact', 'widen', 'any', got None"),
        ({"on_missing": "kep"}, "on_missing: expected 'error', 'keep' or a function of path and leaf .*'kep'.*'keep'"),
        ({"on_missing": {"params/**": 3}}, "on_missing: expected .* for 'params/\\*\\*', got 3"),
        ({"on_missing": []}, "on_missing: expected"),
        ({"on_missing": {3: "keep"}}, "on_missing: .*3"),
        ({"on_extra": "keep"}, "on_extra: expected 'error', 'drop' for .*'keep'"),
        ({"on_extra": lambda path, leaf: None}, "on_extra: expected 'error', 'drop'"),
        ({"only": 3}, "only: expected"),
        ({"only": [3]}, "only: expected"),
        ({"only": "params/embd"}, "only: .*'params/embd' fits nothing.*params/embed"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_arguments_are_one_clear_error(store, options, text):
    with pytest.raises(CheckpointError, match=text):
        store.restore(7, {"params": None}, **options)


@pytest.mark.parametrize("like", [None, 3, ["params"], {3: None}], ids=repr)
def test_bad_likes_are_one_clear_error(store, like):
    with pytest.raises(CheckpointError):
        store.restore(7, like)


# Whatever is asked


@hypothesis.given(
    like=st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from(["abstract", "jax", "numpy", "scalar", "none", "wide"])
            for name in ("a", "b", "c", "d", "x")
        },
    ),
    on_missing=st.sampled_from(["error", "keep", {"t/x": "keep"}, {"t/[ab]": "keep"}]),
    on_extra=st.sampled_from(["error", "drop", {"t/a": "drop"}]),
    only=st.sampled_from([None, "t/a", ["t/*"], "**"]),
    cast=st.sampled_from(["exact", "widen", "any"]),
)
@hypothesis.settings(max_examples=150, deadline=None, database=None)
def test_no_description_ever_comes_back(mixed, like, on_missing, on_extra, only, cast):
    make = {
        "abstract": lambda: jax.ShapeDtypeStruct((3,), jnp.float32),
        "jax": lambda: jnp.zeros(3),
        "numpy": lambda: np.zeros(3, np.float32),
        "scalar": lambda: 2,
        "none": lambda: None,
        "wide": lambda: np.zeros(3),
    }
    tree = {name: make[kind]() for name, kind in like.items()}
    options = {"on_missing": on_missing, "on_extra": on_extra, "only": only, "cast": cast}
    try:
        got = mixed.restore(1, {"t": tree}, **options)["t"]
    except CheckpointError:
        return
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for leaf in jax.tree.leaves(got):
        assert isinstance(leaf, (jax.Array, np.ndarray, int)) and not isinstance(leaf, jax.ShapeDtypeStruct)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    with CheckpointConfig(pack_below=8).build(tmp_path_factory.mktemp("mixed")) as store:
        store.save(1, {"t": {"a": np.ones(3, np.float32), "b": jnp.ones(3), "c": np.float32(1), "d": 5}})
        store.wait()
        yield store
