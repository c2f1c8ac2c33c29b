"""Parameters of 16 bits against the float32 run that they stand for."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core import UserError
from styrax.core.tree import flatten
from styrax.optim import adamw, averaged, eval_params, groups, guard, metrics, state_shardings
from styrax.optim.precision import STORE, full_params, precision, random_bits, whole

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
MODES = ("master", "split", "stochastic", "kahan")


def params(dtype=BF16):
    rng = np.random.default_rng(0)
    return {
        "layers": {"kernel": jnp.asarray(0.02 * rng.normal(size=(2, 8, 12)), dtype)},
        "norm": {"scale": jnp.asarray(1 + 0.02 * rng.normal(size=12), F32)},
    }


def wide(tree):
    return jax.tree.map(lambda x: x.astype(F32), tree)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def train(tx, weights, steps=6, dtype=F32, state=None, start=0, compiled=False, size=1.0):
    state = tx.init(weights) if state is None else state
    update = jax.jit(tx.update) if compiled else tx.update
    for seed in range(start, start + steps):
        rng = np.random.default_rng(seed)
        grads = jax.tree.map(lambda w, rng=rng: jnp.asarray(size * rng.normal(size=w.shape), dtype), weights)
        updates, state = update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights, state


@pytest.mark.parametrize("mode", ["master", "split"])
@pytest.mark.parametrize("inner", [lambda: adamw(1e-3), lambda: optax.adam(1e-3)])
def test_exact_modes_follow_the_float32_run_bit_for_bit(mode, inner):
    expected, reference = train(guard(inner()), wide(params()), steps=3)
    weights, state = train(guard(precision(inner(), mode)), params(), steps=3)
    assert bits(full_params(state, weights)) == bits(expected)
    assert bits(state.inner.inner) == bits(reference.inner)
    assert weights["layers"]["kernel"].dtype == BF16 and weights["norm"]["scale"].dtype == F32
    nearest = expected["layers"]["kernel"].astype(BF16)
    np.testing.assert_allclose(weights["layers"]["kernel"].astype(F32), nearest.astype(F32), rtol=2**-7)
    assert np.mean(weights["layers"]["kernel"] != nearest) < (0.01 if mode == "split" else 1e-9)  # ties alone


@pytest.mark.parametrize("mode", ["master", "split"])
def test_also_where_the_steps_are_compiled_into_one_program(mode):
    """With factors that are powers of two no fused multiply-add can differ."""
    rng = np.random.default_rng(3)
    weights = params()
    grads = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=(16, *w.shape)), BF16), weights)

    def run(tx, weights):
        def step(carry, g):
            weights, state = carry
            updates, state = tx.update(g, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        return jax.jit(lambda c, g: jax.lax.scan(step, c, g)[0])((weights, tx.init(weights)), grads)

    inner = optax.sgd(2.0**-10, momentum=0.5)
    expected, _ = run(inner, wide(weights))
    got, state = run(guard(precision(inner, mode), clip_norm=None), weights)
    assert bits(full_params(state, got)) == bits(expected)


SPECIAL = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x007FFFFF, 0x00800000, 0x3F7F7FFF, 0x3F7F8000, 0x3F808000, 0x7F7F7FFF]
SPECIAL += [0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
SPECIAL += [x | 0x80000000 for x in SPECIAL]
store = jax.jit(STORE["split"])
apply = jax.jit(lambda old, step, rest: (left := optax.apply_updates(old, step), whole(left, rest)))


def check_split(new, old):
    new, old = np.array(new, np.uint32).view(np.float32), np.array(old, np.uint16).view(ml_dtypes.bfloat16)
    step, rest = store(new, old, None)
    left, found = map(np.asarray, apply(old, step, rest))
    with np.errstate(all="ignore"):
        p, f = old.astype(np.float64), found.astype(np.float64)
        n = new.astype(np.float64)
        finite = np.isfinite(n) & np.isfinite(p) & (np.abs(n - p) < 3.3e38)
        normal = np.abs(n) > 2.0**-118  # a step of bfloat16 there is not subnormal
        exact = finite & normal & (np.abs(n) > 2.0**-15 * np.abs(p))
        np.testing.assert_array_equal(found[exact].view(np.uint32), new[exact].view(np.uint32))
        # Elsewhere within the rounding of an update as large as the weight, and of subnormal numbers to zero.
        assert (np.abs(f - n) <= 2.0**-22 * np.abs(p) + 2.0**-125)[finite].all()
    assert np.isnan(found[np.isnan(n)]).all()
    infinite = np.isinf(n) & np.isfinite(p)
    np.testing.assert_array_equal(found[infinite], new[infinite])
    gone = ~np.isfinite(p) & np.isfinite(n)  # what is not finite in the parameter stays so
    assert not np.isfinite(left.astype(np.float32))[gone].any()


def test_the_pair_stands_for_every_float():
    new, old = zip(*itertools.product(SPECIAL, [x >> 16 for x in SPECIAL]))
    check_split(new, old)
    every = np.arange(2**16, dtype=np.uint32) + 0x3F7F8000  # all that round to 1, and neighbours
    for start in (0x3F80, 0x3F7F, 0xBF80):
        check_split(every, np.full(2**16, start, np.uint16))


number = st.integers(0, 2**32 - 1)


@settings(max_examples=30)
@given(st.lists(st.tuples(number, number | st.integers(-3, 3)), min_size=16, max_size=16))
def test_the_pair_stands_for_any_float(values):
    """Also where the old parameter is a near neighbour of the new value."""
    new = [value for value, _ in values]
    old = [(a >> 16) + b & 0xFFFF if abs(b) < 4 else b >> 16 for a, b in values]
    check_split(new, old)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, SLOW(F16)])
def test_small_updates_are_not_lost(mode, dtype):
    if (mode, dtype) == ("split", F16):
        return
    weights = {"w": jnp.asarray(0.02 * np.random.default_rng(0).normal(size=4096), dtype)}
    rate = 2e-6 if dtype == BF16 else 1e-6  # below which a float16 holds no compensation
    one = {"w": jnp.ones(4096, dtype)}

    def moved(tx):
        def step(carry, _):
            after, state = carry
            updates, state = tx.update(one, state, after)
            return (optax.apply_updates(after, updates), state), None

        run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=64)[0])
        after, state = run((weights, tx.init(weights)))
        first = np.asarray(weights["w"], np.float64)
        shown, full = (np.asarray(tree["w"], np.float64) - first for tree in (after, full_params(state, after)))
        return shown, full

    plain, _ = moved(optax.sgd(rate))
    assert np.mean(plain == 0) > 0.8
    shown, full = moved(precision(optax.sgd(rate), mode))
    np.testing.assert_allclose(full.mean(), -64 * rate, rtol=0.03)
    np.testing.assert_allclose(shown.mean(), -64 * rate, rtol=0.1)


@pytest.mark.parametrize(
    ("dtype", "low", "unit", "share"),
    [
        (BF16, 1.0, 2.0**-7, 0.3),
        (BF16, -0.5, -(2.0**-8), 0.9),
        (F16, 1.0, 2.0**-10, 0.1),
        (F16, 2.0**-18, 2.0**-24, 0.7),
    ],
)
def test_stochastic_rounding_is_unbiased(dtype, low, unit, share):
    n = 1 << 16
    weights = {"w": jnp.full(n, low, dtype)}
    tx = precision(optax.sgd(1.0), "stochastic", seed=5)
    updates, _ = jax.jit(tx.update)({"w": jnp.full(n, -share * unit, F32)}, tx.init(weights), weights)
    after = np.asarray(optax.apply_updates(weights, updates)["w"], np.float64)
    assert set(np.unique(after)) == {low, low + unit}
    up = np.mean(after == low + unit)
    assert abs(up - share) < 5 * np.sqrt(share * (1 - share) / n)


def test_random_bits_are_fair_and_independent():
    """Each bit by itself, and of neighbours, of one element in successive updates, and of two parameters."""
    words = jax.random.key_data(jax.random.split(jax.random.key(0, impl="threefry2x32"), 64))
    draws = np.asarray(jax.jit(jax.vmap(lambda key: random_bits(key, jnp.zeros((32, 64)))))(words)).reshape(64, -1)
    signs = 2.0 * ((draws[..., None] >> np.arange(32, dtype=np.uint32)) & 1) - 1
    n = draws.size
    assert (np.abs(signs.mean((0, 1))) < 5 / np.sqrt(n)).all()
    for other in (np.roll(signs, 1, 1), np.roll(signs, 64, 1), np.roll(signs, 1, 0), np.roll(signs, 1, 2)):
        assert (np.abs((signs * other).mean((0, 1))) < 5.5 / np.sqrt(n)).all()
    counts = np.bincount((draws >> 24).ravel(), minlength=256)
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 5 * np.sqrt(2 * 255)


def test_stochastic_rounding_is_the_same_resumed_and_in_another_seed_is_not():
    tx = guard(precision(optax.sgd(1e-3, momentum=0.9), "stochastic"))
    tx = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    half, state = train(tx, params(), steps=2)
    straight, _ = train(tx, half, steps=2, state=state, start=2)
    half, state = jax.tree.map(jnp.asarray, jax.device_get((half, state)))
    again, _ = train(tx, half, steps=2, state=state, start=2)
    assert bits(again) == bits(straight)
    one = {"w": jnp.ones(64, BF16)}
    draws = [precision(optax.sgd(1e-3), "stochastic", seed=s) for s in (0, 1)]
    assert len({tuple(bits(tx.update(one, tx.init(one), one)[0])) for tx in draws}) == 2


@pytest.mark.parametrize("kind", [SLOW(AxisType.Auto), AxisType.Explicit])
def test_stochastic_rounding_is_the_same_on_every_mesh(kind):
    weights = params()
    inner = optax.sgd(2.0**-10)
    tx = guard(precision(inner, "stochastic"), clip_norm=None)
    step = jax.jit(tx.update)
    one = jax.tree.map(lambda w: jnp.full(w.shape, 0.3, F32), weights)
    expected = optax.apply_updates(weights, step(one, tx.init(weights), weights)[0])
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    where = {
        "layers": {"kernel": NamedSharding(mesh, PartitionSpec("b", "a", None))},
        "norm": {"scale": NamedSharding(mesh, PartitionSpec())},
    }
    with jax.set_mesh(mesh):
        laid = jax.tree.map(jax.device_put, weights, where)
        state = jax.device_put(tx.init(weights), state_shardings(tx, laid))
        got = optax.apply_updates(laid, step(jax.tree.map(jax.device_put, one, where), state, laid)[0])
    assert bits(got) == bits(expected)
    assert got["layers"]["kernel"].sharding.is_equivalent_to(where["layers"]["kernel"], 3)


def test_kahan_keeps_twice_the_bits():
    expected, _ = train(adamw(1e-3), wide(params()))
    weights, state = train(precision(adamw(1e-3), "kahan"), params())
    found = full_params(state, weights)["layers"]["kernel"]
    np.testing.assert_allclose(found, expected["layers"]["kernel"], rtol=2**-12, atol=1e-6)
    assert state.rest["layers"]["kernel"].dtype == BF16
    assert set(flatten(state.rest)) == {"layers/kernel"}


@pytest.mark.parametrize(("mode", "inner"), [(mode, adamw) for mode in MODES] + [("split", optax.adam)])
def test_a_skipped_step_keeps_every_bit(mode, inner):
    tx = guard(precision(inner(1e-3), mode))
    tx = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    weights, state = train(tx, params(), steps=2)
    bad = jax.tree.map(lambda w: jnp.full(w.shape, jnp.nan, F32), weights)
    updates, after = tx.update(bad, state, weights)
    assert bits(optax.apply_updates(weights, updates)) == bits(weights)
    assert bits(after.inner) == bits(state.inner)
    assert int(after.skipped) == 1


@pytest.mark.parametrize("mode", ["split", *map(SLOW, ("master", "stochastic", "kahan"))])
def test_state_has_one_form_on_every_tree(mode):
    nnx = pytest.importorskip("flax.nnx")
    for kind in (lambda p: p, lambda p: [p["layers"]["kernel"], p["norm"]["scale"]], lambda p: p["layers"]["kernel"]):
        for model in (kind(params()), nnx.State(jax.tree.map(nnx.Param, params()))):
            tx = precision(adamw(1e-3), mode)
            grads = jax.tree.map(lambda w: w.astype(BF16), model)
            state = jax.eval_shape(tx.init, model)
            updates, after = jax.eval_shape(tx.update, grads, state, model)
            assert jax.tree.structure(after) == jax.tree.structure(state)
            kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (after, state)]
            assert kinds[0] == kinds[1]
            assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
            full = jax.eval_shape(full_params, state, model)
            assert jax.tree.structure(full) == jax.tree.structure(model)
    state = precision(optax.sgd(0.1), mode).init(params())
    assert bits(full_params(state, params())) == bits(wide(params()))


def test_within_groups_and_below_a_guard():
    weights = params() | {"head": jnp.ones((12, 3), BF16)}
    tx = guard(groups(
        {"exact": precision(adamw(1e-3), "split"), "plain": adamw(1e-3), "sum": precision(optax.sgd(1e-3), "kahan")},
        {"layers/**": "exact", "head": "sum", "**": "plain"},
    ))  # fmt: skip
    after, state = train(tx, weights, compiled=True)
    assert metrics(state)["learning_rate/plain"] > 0
    full = flatten(full_params(state, after))
    assert {x.dtype for x in full.values()} == {jnp.dtype("float32")}
    for path, x in full.items():
        np.testing.assert_allclose(x, np.asarray(flatten(after)[path], np.float32), rtol=2**-8)
        assert bool(np.any(x != flatten(after)[path])) == (path != "norm/scale")
    _, inside = train(precision(groups({"all": adamw(1e-3)}, {"**": "all"}), "master"), params())
    assert inside.inner.inner["all"].mu["layers"]["kernel"].dtype == F32


@pytest.mark.parametrize("mode", ["master", "split", "kahan"])
def test_what_the_bits_lack_lies_as_its_parameter(mode):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec(None, "a", "b"))
    whole_mesh = NamedSharding(mesh, PartitionSpec())
    weights = params()
    abstract = {
        "layers": {"kernel": jax.ShapeDtypeStruct((2, 8, 12), BF16, sharding=where)},
        "norm": {"scale": jax.ShapeDtypeStruct((12,), F32, sharding=whole_mesh)},
    }
    found = state_shardings(guard(precision(adamw(1e-3), mode)), abstract)
    assert found.inner.rest["layers"]["kernel"] == found.inner.inner.mu["layers"]["kernel"] == where
    assert flatten(weights).keys() - flatten(found.inner.rest).keys() == {"norm/scale"}


@pytest.mark.parametrize("mode", ["split", *map(SLOW, ("master", "stochastic", "kahan"))])
def test_through_nnx_optimizer(mode):
    """Whose init sees variables and whose update sees arrays."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.kernel, self.scale = nnx.Param(params()["layers"]["kernel"]), nnx.Param(params()["norm"]["scale"])

    model, tx = Model(), guard(precision(optax.sgd(2.0**-10), mode), clip_norm=None)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    weights = {"kernel": params()["layers"]["kernel"], "scale": params()["norm"]["scale"]}
    grads = jax.tree.map(jnp.ones_like, weights)
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model))))
    state = tx.init(weights)
    update = jax.jit(tx.update)
    for _ in range(2):
        step(model, optimizer)
        updates, state = update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    assert bits(flatten(nnx.state(model, nnx.Param))) == bits(flatten(weights))
    full = full_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert bits(flatten(full)) == bits(flatten(full_params(state, weights)))


def test_missing_leaves_are_left_alone():
    tx = precision(optax.sgd(0.1), "split")
    weights = {"a": jnp.ones(2, BF16), "b": None, "c": jnp.ones(2, BF16)}
    state = tx.init(weights)
    updates, after = tx.update({"a": jnp.ones(2), "b": None, "c": None}, state, weights)
    assert updates["c"] is None and bits(after.rest["c"]) == bits(state.rest["c"])
    np.testing.assert_allclose(
        full_params(after, optax.apply_updates(weights, {**updates, "c": jnp.zeros(2)}))["a"], 0.9
    )


def test_an_average_is_of_the_float32_values():
    tx = precision(averaged(optax.sgd(2.0**-12), decay=1.0), "split")
    weights = {"w": jnp.ones(1, BF16)}
    state = tx.init(weights)
    for _ in range(2):
        updates, state = tx.update({"w": jnp.ones(1)}, state, weights)
        weights = optax.apply_updates(weights, updates)
    np.testing.assert_array_equal(state.inner.average["w"], 1 - 1.5 * 2.0**-12)
    assert eval_params(state, weights)["w"].dtype == BF16
    plain = precision(optax.sgd(1.0), "split").init(weights)
    assert eval_params(plain, weights) is weights


@pytest.mark.parametrize("mode", [SLOW("master"), "stochastic"])
def test_step_needs_no_copy(mode):
    """Parameters follow from the new master alone, so the old one can be overwritten; noise is made in the loop."""
    weights = {"a": jnp.ones((512, 512), BF16), "b": jnp.ones((512, 256), BF16)}
    tx = guard(precision(adamw(1e-3), mode))

    def step(weights, state, grads):
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(weights, tx.init(weights), wide(weights)).compile()
    size = sum(w.nbytes for w in jax.tree.leaves(weights))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size


def test_mistakes():
    with pytest.raises(UserError, match=r"no mode 'splits' \(did you mean 'split'\?\); modes: master, split"):
        precision(adamw(1e-3), "splits")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="seed"):
        precision(adamw(1e-3), "stochastic", seed=-1)
    with pytest.raises(UserError, match=r"no parameter has 16 bits \(found float32\)"):
        precision(adamw(1e-3), "master").init(wide(params()))
    half = {"a": jnp.ones(2, F16), "b": jnp.ones(2, BF16), "c": jnp.ones(2)}
    with pytest.raises(UserError, match=r"'split' takes bfloat16 besides wider dtypes; cast these:\n  a: float16$"):
        precision(adamw(1e-3), "split").init(half)
    tx = precision(adamw(1e-3), "master")
    with pytest.raises(ValueError, match=r"`params` was not given or lacks 'a', 'b', 'c'"):
        tx.update(half, tx.init(half))
    with pytest.raises(ValueError, match=r"1 parameter.*\n  d: int32"):
        tx.init({**half, "d": jnp.ones(2, jnp.int32)})
