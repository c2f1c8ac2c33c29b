import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core.testing import check_optimizer
from styrax.optim import AdamW, adamw, guard, measure


def bits(tree):
    leaves = jax.tree.leaves(tree)
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return [np.asarray(x).tobytes() for x in leaves]


INNERS = {
    "fused": lambda: adamw(1e-2),
    "optax": lambda: optax.adamw(1e-2),
    "chain": lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda c: -1e-2 / (c + 1))),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2, momentum=0.9)),
}


@pytest.fixture(params=["fused", "optax", "chain"])
def inner(request):
    return INNERS[request.param]


def test_same_trajectory_as_optax_with_clipping(small, gradients):
    params = other = small()
    mine = guard(adamw(1e-2), clip_norm=1.0)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95, weight_decay=0.1))
    state, reference = jax.jit(mine.init)(params), jax.jit(theirs.init)(params)
    step, other_step = jax.jit(mine.update), jax.jit(theirs.update)
    for seed in range(30):
        grads = gradients(params, seed, size=[0.01, 0.1, 10.0][seed % 3])
        updates, state = step(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        updates, reference = other_step(grads, reference, other)
        other = jax.tree.map(jnp.add, other, updates)
        norm = np.linalg.norm(np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)]))
        np.testing.assert_allclose(state.grad_norm, norm, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, other)


def test_inner_sees_the_same_as_without_guard(small, gradients, inner):
    params = small()
    plain, guarded = inner(), guard(inner(), clip_norm=None)
    grads = gradients(params, 0, size=10.0)
    expected, _ = plain.update(grads, plain.init(params), params)
    got, state = guarded.update(grads, guarded.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    assert float(state.clip_scale) == 1.0


guarded = guard(adamw(1e-2))
compiled_update = jax.jit(guarded.update)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.sampled_from([np.nan, np.inf, -np.inf]), st.booleans(), st.booleans())
def test_nonfinite_gradient_changes_no_bit(place, bad, compiled, half):
    dtype = jnp.bfloat16 if half else jnp.float32
    params = {"a": jnp.array([1.0, -0.0, 0.0], dtype), "b": (jnp.array([2.0], dtype),)}
    tx = guarded
    update = compiled_update if compiled else tx.update
    _, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    flat = np.ones(4, np.float32)
    flat[place] = bad
    grads = {"a": jnp.asarray(flat[:3], dtype), "b": (jnp.asarray(flat[3:], dtype),)}
    updates, after = update(grads, state, params)
    assert bits(after.inner) == bits(state.inner)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert all(not np.any(u) for u in jax.tree.leaves(updates))
    assert int(after.skipped) == 1
    assert float(after.clip_scale) == 0.0
    assert not np.isfinite(after.grad_norm)


@pytest.mark.parametrize("kind", list(INNERS))
def test_skips_and_goes_on(small, gradients, kind):
    """A run with bad steps in between ends where a run without them does, bit for bit."""
    params = small()
    tx = guard(INNERS[kind]())
    step = jax.jit(tx.update)
    clean = dirty = params
    clean_state = dirty_state = tx.init(params)
    for seed in range(6):
        grads = gradients(params, seed)
        updates, clean_state = step(grads, clean_state, clean)
        clean = optax.apply_updates(clean, updates)
        if seed % 2:
            bad = jax.tree.map(lambda g: g.at[...].set(jnp.nan), grads)
            updates, dirty_state = step(bad, dirty_state, dirty)
            dirty = optax.apply_updates(dirty, updates)
        updates, dirty_state = step(grads, dirty_state, dirty)
        dirty = optax.apply_updates(dirty, updates)
    assert bits(clean) == bits(dirty)
    assert bits(clean_state.inner) == bits(dirty_state.inner)
    assert int(clean_state.skipped) == 0
    assert int(dirty_state.skipped) == 3


def test_without_skipping_a_nan_goes_through():
    tx = guard(adamw(1e-2), skip_nonfinite=False)
    params = {"w": jnp.ones(2)}
    updates, state = tx.update({"w": jnp.array([jnp.nan, 1.0])}, tx.init(params), params)
    assert np.isnan(updates["w"][0])
    assert int(state.skipped) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=5, max_size=5), st.floats(0, 100, width=32))
def test_clipping_law(values, clip_norm):
    """The scaled gradient has norm min(n, c) and the direction of the gradient; never a NaN."""
    g = jnp.array(values, jnp.float32)
    verdict = measure({"w": g}, clip_norm=clip_norm)
    norm = np.linalg.norm(np.asarray(g, np.float64))
    np.testing.assert_allclose(verdict.norm, norm, rtol=1e-5, atol=1e-18)
    assert 0.0 <= float(verdict.scale) <= 1.0
    scaled = np.linalg.norm(np.asarray(g, np.float64) * float(verdict.scale))
    np.testing.assert_allclose(scaled, min(float(verdict.norm), clip_norm), rtol=1e-5, atol=1e-18)


def test_zero_gradient_and_zero_bound(inner):
    params = {"w": jnp.ones(3)}
    for clip_norm in (0.0, 1.0, None):
        tx = guard(inner(), clip_norm=clip_norm)
        updates, state = tx.update({"w": jnp.zeros(3)}, tx.init(params), params)
        assert all(np.isfinite(x).all() for x in (updates["w"], state.grad_norm, state.clip_scale))
        assert (float(state.clip_scale), int(state.skipped)) == (1.0, 0)


def test_norm_is_float32_for_bfloat16_gradients():
    g = jnp.full((4096,), 0.3, jnp.bfloat16)
    exact = np.sqrt(np.sum(np.asarray(g, np.float64) ** 2))
    assert float(measure({"w": g}).norm) == pytest.approx(exact, rel=1e-6)


def test_norm_of_many_small_numbers():
    """A running sum in float32 would stop at 2 ** 24 ones."""
    assert float(measure({"w": jnp.ones(2**25)}).norm) == pytest.approx(np.sqrt(2.0**25), rel=1e-5)


@pytest.mark.parametrize("grads_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.bfloat16])
def test_state_keeps_its_kind(small, gradients, inner, params_dtype, grads_dtype):
    """Also for transformations of optax whose own state changes dtype after the first step."""
    params = small(params_dtype)
    grads = gradients(params, 0, dtype=grads_dtype)
    tx = guard(inner())
    state = tx.init(params)
    scanned, _ = jax.lax.scan(lambda s, _: (tx.update(grads, s, params)[1], None), state, None, length=2)
    kinds = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), scanned, state)
    assert all(jax.tree.leaves(kinds))


def test_conformance(small):
    check_optimizer(guard(adamw(1e-2)), small())


def test_no_copy_of_gradient_or_state():
    """The compiled step needs next to no temporary memory, and one loop an array writes it in place."""
    params = {"layers": {"kernel": jnp.ones((4, 256, 256))}, "embed": {"embedding": jnp.ones((512, 256))}}
    size = sum(x.nbytes for x in jax.tree.leaves(params))

    def temporary(tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert temporary(AdamW().build(params, steps=10)) < 0.05 * size
    assert temporary(theirs) > 0.9 * size


def test_state_keeps_its_kind_with_64_bits(small):
    with jax.enable_x64(True):
        params = small()
        tx = AdamW().build(params, steps=5)
        state = tx.init(params)
        after = tx.update(params, state, params)[1]
        assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]


def test_extra_arguments_reach_the_inner_transformation():
    tx = guard(adamw(1.0, weight_decay=0.0), clip_norm=None)
    params = {"w": jnp.ones(1)}
    updates, _ = tx.update(params, tx.init(params), params, learning_rate=0.25, unknown=1)
    np.testing.assert_allclose(updates["w"], -0.25, rtol=1e-6)
    other = guard(optax.polyak_sgd(max_learning_rate=1.0), clip_norm=None)
    other.update(params, other.init(params), params, value=jnp.float32(1.0))


def test_missing_leaves(inner):
    params = {"a": jnp.ones(2), "b": None, "c": optax.MaskedNode()}
    tx = guard(inner())
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    nothing = {"a": None}
    _, state = tx.update(nothing, tx.init(nothing), nothing)
    assert float(state.grad_norm) == 0.0


def test_container_types_do_not_matter():
    """nnx.State, its pure dictionary and a nest of tuples give the same numbers."""
    nnx = pytest.importorskip("flax.nnx")
    pure = {"a": {"kernel": jnp.ones((2, 3))}, "b": {"bias": jnp.ones(3)}}
    state = nnx.State({"a": {"kernel": nnx.Param(jnp.ones((2, 3)))}, "b": {"bias": nnx.Param(jnp.ones(3))}})
    nested = ((jnp.ones((2, 3)),), [jnp.ones(3)])
    results = []
    for params in (pure, state, nested):
        tx = guard(adamw(1e-2))
        updates, after = tx.update(params, tx.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        results.append((bits(updates), bits(after)))
    assert results[0] == results[1] == results[2]
    tx = guard(adamw(1e-2))
    _, mixed = tx.update(pure, tx.init(state), pure)
    assert bits(mixed) == results[0][1]
    assert jax.tree.structure(mixed) == jax.tree.structure(tx.init(state))


def test_bad_clip_norm():
    for bad in (-1.0, float("nan"), "x"):
        with pytest.raises(ValueError, match="clip_norm must be 0 or more, or None"):
            guard(adamw(1e-3), clip_norm=bad)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="clip_norm must be 0 or more, or None"):
            measure({"w": jnp.ones(1)}, clip_norm=bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_norm_to_clip_by_and_to_log(dtype):
    """In float32 whatever the gradient is in, where a sum in bfloat16 is off by a percent."""
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=4000), dtype)}
    tx = guard(optax.identity(), clip_norm=2.0)
    updates, state = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(state.grad_norm, np.linalg.norm(np.asarray(grads["w"], np.float64)), rtol=1e-6)
    assert float(state.clip_scale) == float(jnp.float32(2.0) / state.grad_norm)
    np.testing.assert_array_equal(updates["w"], grads["w"].astype(jnp.float32) * state.clip_scale)


def test_gradients_that_are_no_floats():
    with pytest.raises(ValueError, match=r"1 gradient.*\n  b: int32"):
        measure({"a": jnp.ones(1), "b": jnp.ones(1, jnp.int32)})
