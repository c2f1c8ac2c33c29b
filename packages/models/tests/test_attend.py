"""The contract of attention, for every implementation: values and gradients against float64, and what is refused."""

import functools
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.models import DecoderConfig, Runtime
from styrax.models.attention import Call, blocked, get, register, registry, splash
from styrax.models.encoder_block import segment_mask
from styrax.models.layers.attend import attend
from styrax.models.layers.mask import Mask, document_mask, document_positions

# Splash has no compiled form on a CPU; step by step it is the same kernel. cuDNN has neither, so it cannot run here.
INTERPRETED = "splash-interpreted"
register(
    INTERPRETED,
    functools.partial(splash.attend, interpret=True),
    supports=lambda call: splash.supports(replace(call, platform="tpu")),
)
HEAD_BY_HEAD = "blocked-by-head"


def head_by_head(*args, **options):
    """What is for long rows, in blocks that do not divide them."""
    with mock.patch.multiple(blocked, _LONG=1, _LONG_BLOCK=48):
        return blocked.attend(*args, **options)


@pytest.fixture(autouse=True, scope="module")
def head_by_head_is_known():
    """Here alone: messages elsewhere list who can do a call."""
    with mock.patch.dict(registry._registered):
        register(HEAD_BY_HEAD, head_by_head)
        yield


QUICK = ["reference", "blocked", HEAD_BY_HEAD, "jax.nn"]
EVERY = [*QUICK, pytest.param(INTERPRETED, marks=pytest.mark.slow)]
SEQ = 128  # what splash has as its least; two blocks of the blocked one


@dataclass(frozen=True, kw_only=True)
class Case:
    kv_heads: int = 2
    value_dim: int = 8
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    segments: bool = False
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    seq: int = SEQ
    head_dim: int = 8
    heads: int = 4


CASES = {
    "causal": Case(),
    "both ways": Case(causal=False),
    "documents": Case(segments=True),
    "documents both ways": Case(segments=True, causal=False),
    "window": Case(window=5),
    "window of documents": Case(window=5, segments=True),
    "chunk": Case(chunk=6),
    "chunk of documents": Case(chunk=6, segments=True),
    "cap": Case(softcap=0.7, segments=True),
    "sinks": Case(sinks=True, segments=True),
    "one key head": Case(kv_heads=1, scale=0.6),
    "as many key heads": Case(kv_heads=4),
    "narrow values": Case(value_dim=3, segments=True),
    "all": Case(value_dim=3, segments=True, window=9, softcap=0.7, sinks=True, scale=0.3, kv_heads=1),
}


def ids_of(seq=SEQ):
    """Documents of many lengths, with padding before, between and after; and a row that is one document."""
    first = [0] * 2 + [1] * 20 + [2] * 45 + [0] * 3 + [7] * (seq - 75) + [0] * 5
    return np.array([first, [3] * seq], "int32")


def places_of(ids):
    return np.array(
        [
            [t - next(s for s in range(t + 1) if (row[s : t + 1] == row[t]).all()) for t in range(len(row))]
            for row in ids
        ]
    )


def allowed_of(case, ids):
    """Say it of each pair by itself."""
    place = places_of(ids)
    out = np.zeros((*ids.shape, ids.shape[1]), bool)
    for b, t, s in np.ndindex(out.shape):
        out[b, t, s] = (
            ids[b, t] == ids[b, s] != 0
            and (not case.causal or s <= t)
            and (case.window is None or t - s < case.window)
            and (case.chunk is None or place[b, t] // case.chunk == place[b, s] // case.chunk)
        )
    return out


def inputs(case, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (2, case.seq, case.heads, case.head_dim),
        "key": (2, case.kv_heads, case.seq, case.head_dim),
        "value": (2, case.kv_heads, case.seq, case.value_dim),
        "back": (2, case.seq, case.heads, case.value_dim),
    }
    arrays = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    if case.sinks:
        arrays["sinks"] = rng.normal(size=case.heads).astype("float32")
    return arrays


def in_float64(case, allowed, arrays):
    """Values and gradients, by the formulas of both."""
    query, key, value, back = (arrays[name].astype("float64") for name in ("query", "key", "value", "back"))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    out = {"out": np.zeros_like(back), **{name: np.zeros(array.shape) for name, array in arrays.items()}}
    for b, h in np.ndindex(2, case.heads):
        k = h * case.kv_heads // case.heads
        q, keys, values = query[b, :, h], key[b, k], value[b, k]
        scores = scale * q @ keys.T
        bend = np.ones_like(scores)
        if case.softcap is not None:
            bend = 1 - np.tanh(scores / case.softcap) ** 2
            scores = case.softcap * np.tanh(scores / case.softcap)
        powers = np.exp(scores) * allowed[b]
        sink = np.exp(arrays["sinks"][h].astype("float64")) if case.sinks else 0.0
        total = powers.sum(-1, keepdims=True) + sink
        weights = np.divide(powers, total, out=np.zeros_like(powers), where=allowed[b].any(-1, keepdims=True))
        out["out"][b, :, h] = weights @ values
        d_weights = back[b, :, h] @ values.T
        mean = (d_weights * weights).sum(-1, keepdims=True)
        d_scores = weights * (d_weights - mean) * bend * scale
        out["query"][b, :, h] = d_scores @ keys
        out["key"][b, k] += d_scores.T @ q
        out["value"][b, k] += weights.T @ back[b, :, h]
        if case.sinks:
            out["sinks"][h] += -(sink / total * mean)[allowed[b].any(-1)].sum()
    return out


def mask_of(case, ids):
    given = jnp.asarray(ids) if case.segments else None
    if not case.causal:
        return segment_mask(ids.shape[1], given)
    place = document_positions(ids.shape[1], given)
    return document_mask(ids.shape[1], given).within(place, place, window=case.window, chunk=case.chunk)


@functools.cache
def compiled(name, case):
    def run(mask, arrays):
        back, given = arrays["back"], {key: arrays[key] for key in arrays if key != "back"}

        def loss(given):
            out = attend(**given, mask=mask, scale=case.scale, softcap=case.softcap, implementation=name)
            return jnp.where(out == 0, 0, out * back).sum(), out

        grads, out = jax.grad(loss, has_aux=True)(given)
        return {"out": out, **grads}

    return jax.jit(run)


def computed(name, case, mask, arrays):
    """The same by an implementation."""
    return jax.tree.map(np.asarray, compiled(name, case)(mask, arrays))


def can(name, case):
    call = Call(
        platform="cpu", dtype="float32", seq=case.seq, keys=case.seq, heads=case.heads, kv_heads=case.kv_heads,
        head_dim=case.head_dim, value_dim=case.value_dim, causal=case.causal, window=case.window, chunk=case.chunk,
        segments=case.segments, softcap=case.softcap, sinks=case.sinks,
    )  # fmt: skip
    return get(name).supports(call)


def check(name, case):
    ids = ids_of() if case.segments else np.ones((2, SEQ), "int32")
    mask, arrays = mask_of(case, ids), inputs(case)
    if reasons := can(name, case):
        with pytest.raises(UserError) as caught:
            computed(name, case, mask, arrays)
        assert all(reason in str(caught.value) for reason in reasons)
        return
    got, expected = computed(name, case, mask, arrays), in_float64(case, allowed_of(case, ids), arrays)
    for part in ("out", "query", "key", "value", *(["sinks"] if case.sinks else [])):
        np.testing.assert_allclose(got[part], expected[part], atol=2e-5, rtol=2e-5, err_msg=part)
    # Padding sees nothing and is not seen: not nearly, but not at all.
    assert (got["out"][ids == 0] == 0).all()
    assert (got["query"][ids == 0] == 0).all()
    assert (got["key"].swapaxes(1, 2)[ids == 0] == 0).all()
    assert (got["value"].swapaxes(1, 2)[ids == 0] == 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EVERY)
def test_values_and_gradients_against_float64(name, case):
    check(name, CASES[case])


def test_long_rows_keep_no_table_for_the_gradient():
    """What stays until the backward pass grows with the row, not with its square."""

    def kept(seq):
        shapes = jax.ShapeDtypeStruct((1, seq, 2, 4), "float32"), jax.ShapeDtypeStruct((1, 2, seq, 4), "float32")
        back = jax.eval_shape(lambda q, k: jax.vjp(lambda *a: attend(*a, k, mask=document_mask(seq)), q, k)[1], *shapes)
        return sum(leaf.size for leaf in jax.tree.leaves(back) if leaf.dtype == jnp.float32)

    assert kept(4 * blocked._LONG) == 4 * kept(blocked._LONG)
    assert kept(blocked._LONG // 4) > kept(blocked._LONG)  # as the short ones do


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_just_long_enough_against_float64(dtype):
    case = Case(seq=blocked._LONG, kv_heads=1, heads=2, segments=True)
    ids = ids_of(case.seq)
    arrays = {key: array.astype(dtype) for key, array in inputs(case).items()}
    wide = {key: np.asarray(array, "float64") for key, array in arrays.items()}
    got, expected = computed("auto", case, mask_of(case, ids), arrays), in_float64(case, allowed_of(case, ids), wide)
    limit = {"float32": 2e-5, "bfloat16": 3e-2}[dtype]
    for part in ("out", "query", "key", "value"):
        assert got[part].dtype == dtype
        np.testing.assert_allclose(got[part].astype("float64"), expected[part], atol=limit, rtol=limit, err_msg=part)


def test_splash_step_by_step_against_float64():
    """The one that is not slow: all that it can do, at once."""
    check(INTERPRETED, CASES["all"])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_nan_that_nobody_may_read_goes_nowhere(name, sinks):
    case, ids = Case(segments=True, sinks=sinks), ids_of()
    if can(name, case):
        pytest.skip("refused, which is tested above")
    mask, clean = mask_of(case, ids), inputs(case)
    dirty = dict(clean)
    for part in ("key", "value"):
        dirty[part] = np.where((ids == 0)[:, None, :, None], np.nan, clean[part])
    dirty["query"] = np.where((ids == 0)[:, :, None, None], np.nan, clean["query"])
    got, expected = computed(name, case, mask, dirty), computed(name, case, mask, clean)
    for part, array in expected.items():
        assert np.isfinite(got[part]).all(), part
        np.testing.assert_array_equal(got[part], array, err_msg=part)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", QUICK)
def test_a_table_of_pairs_has_rows_that_see_nothing_and_keys_that_nobody_reads(name, sinks):
    """As with a cache: some slots were never written, and hold anything."""
    case = Case(seq=6, sinks=sinks)
    if can(name, case):
        pytest.skip("refused, which is tested above")
    arrays, allowed = inputs(case), np.random.default_rng(3).random((2, 6, 6)) < 0.5
    allowed[0, 2], allowed[1, :, 4] = False, False
    dirty = dict(arrays)
    for part in ("key", "value"):
        dirty[part] = arrays[part].copy()
        dirty[part][1, :, 4] = np.nan
    got, expected = computed(name, case, Mask(jnp.asarray(allowed)), dirty), in_float64(case, allowed, arrays)
    for part, array in got.items():
        assert np.isfinite(array).all(), part
        np.testing.assert_allclose(array, expected[part], atol=1e-5, err_msg=part)
    assert (got["out"][0, 2] == 0).all()


def weights(name, mask, seq, **options):
    """The weights themselves: the values are the unit vectors."""
    query, key = (
        np.random.default_rng(n).normal(size=(1, *shape, seq)) for n, shape in enumerate(((seq, 2), (1, seq)))
    )
    value = jnp.eye(seq)[None, None]
    arrays = [jnp.asarray(each, "float32") for each in (query, key, value)]
    return np.asarray(jax.jit(lambda *a: attend(*a, mask, implementation=name, **options))(*arrays))[0, :, 0]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_shows_so_many_keys_itself_included(name, window):
    place = jnp.arange(SEQ)[None]
    seen = weights(name, document_mask(SEQ).within(place, place, window=window), SEQ, scale=0.05) > 0
    assert (seen.sum(-1) == np.minimum(np.arange(SEQ) + 1, window)).all()
    assert seen.diagonal().all()


@pytest.mark.parametrize("name", EVERY)
def test_the_cap_comes_before_the_mask(name):
    if can(name, Case(softcap=1.0)):
        pytest.skip("refused, which is tested above")
    found = weights(name, document_mask(SEQ, jnp.asarray(ids_of()[:1])), SEQ, softcap=1.0)
    allowed = allowed_of(Case(), ids_of()[:1])[0]
    assert ((found > 0) == allowed).all()
    assert found[allowed].min() > np.exp(-2) / SEQ * 0.99  # scores are in [-1, 1]


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("name", QUICK)
def test_what_is_masked_changes_nothing(name, data):
    """A key and a value, whatever they are, change no bit of a query that does not see them, nor get its gradient."""
    seq = 70
    cuts = sorted(data.draw(st.sets(st.integers(1, seq - 1), max_size=3)))
    numbers = data.draw(st.permutations(range(4)))  # 0 among them is padding
    ids = np.array([[numbers[sum(cut <= t for cut in cuts)] for t in range(seq)]] * 2, "int32")
    near = data.draw(st.sampled_from([{}, {"window": 3}, {"chunk": 4}, {"causal": False}]))
    case = Case(seq=seq, segments=True, **near)
    at, mask, arrays = data.draw(st.integers(0, seq - 1)), mask_of(case, ids), inputs(case)
    blind = ~allowed_of(case, ids)[:, :, at]
    arrays["back"] = arrays["back"] * blind[:, :, None, None]
    other = {**arrays, "key": arrays["key"].copy(), "value": arrays["value"].copy()}
    other["key"][:, :, at], other["value"][:, :, at] = 300.0, -1e4
    first, second = computed(name, case, mask, arrays), computed(name, case, mask, other)
    np.testing.assert_array_equal(first["out"][blind], second["out"][blind])
    np.testing.assert_array_equal(first["query"][blind], second["query"][blind])
    assert (second["key"][:, :, at] == 0).all()
    assert (second["value"][:, :, at] == 0).all()


@settings(max_examples=30)
@given(data=st.data())
def test_a_pattern_says_what_the_table_says(data):
    seq = data.draw(st.sampled_from([1, 6, 17]))
    cuts = data.draw(st.sets(st.integers(0, seq)))
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=seq + 1, max_size=seq + 1, unique=False))
    runs = [sum(cut <= t for cut in cuts) for t in range(seq)]
    ids = np.array([[0 if numbers[run] == 0 else run + 1 for run in runs]], "int32")
    near = data.draw(st.sampled_from([{}, {"window": 2}, {"window": 7}, {"chunk": 3}, {"chunk": 1}]))
    case = Case(seq=seq, segments=data.draw(st.booleans()), **near)
    ids = ids if case.segments else np.ones_like(ids)
    mask = mask_of(case, ids)
    pattern = mask.pattern
    assert (pattern.causal, pattern.window, pattern.chunk) == (True, case.window, case.chunk)
    expected = allowed_of(case, ids)
    assert (np.asarray(mask.allowed) == expected).all()
    groups = np.ones((1, seq), int) if pattern.groups() is None else np.asarray(pattern.groups())
    row, column = np.mgrid[:seq, :seq]
    said = (groups[:, :, None] == groups[:, None, :]) & (groups[:, :, None] != 0) & (column <= row)
    said &= row - column < (pattern.window or seq)
    assert (said == expected).all()


def test_two_sizes_of_chunks_have_no_pattern():
    place = jnp.arange(8)[None]
    mask = document_mask(8).within(place, place, window=5).within(place, place, window=3)
    assert mask.pattern.window == 3
    assert mask.within(place, place, chunk=4).within(place, place, chunk=3).pattern is None


def test_a_named_one_refuses_a_cache(build, tokens):
    model = build(runtime=Runtime(attention=INTERPRETED))
    with pytest.raises(UserError, match="as with a cache"):
        model(tokens, cache=model.init_cache(2, 128))
    assert DecoderConfig(runtime=Runtime(attention=INTERPRETED)).runtime.attention == INTERPRETED


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3)])
def test_splash_on_a_mesh_is_splash_on_one_device(heads, kv_heads):
    case = Case(heads=heads, kv_heads=kv_heads, segments=True, sinks=True, window=20, softcap=2.0)
    mask, arrays = mask_of(case, ids_of()), inputs(case)
    expected = in_float64(case, allowed_of(case, ids_of()), arrays)
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        got = computed(INTERPRETED, case, mask, arrays)
    for part, array in got.items():
        np.testing.assert_allclose(array, expected[part], atol=3e-5, err_msg=part)
