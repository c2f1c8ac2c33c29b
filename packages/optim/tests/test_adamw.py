import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.core.testing import check_optimizer
from styrax.optim import adamw


def train(tx, params, gradients, steps=20):
    """Give the parameters after some steps, on a compiled and donated step as in a real run."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for seed in range(steps):
        params, state = step(params, state, gradients(params, seed, size=0.1 * (1 + seed % 5)))
    return params, state


def close(got, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.5, 0.0)])
def test_same_trajectory_as_optax(small, gradients, b1, b2):
    rate = optax.linear_schedule(1e-2, 1e-3, 20)
    mine = adamw(1.0, schedule=rate, b1=b1, b2=b2, weight_decay=0.1)
    params, state = train(mine, small(), gradients)
    theirs, reference = train(optax.adamw(rate, b1=b1, b2=b2, weight_decay=0.1), small(), gradients)
    close(params, theirs)
    close(state.mu, reference[0].mu)
    close(state.nu, reference[0].nu)


def test_same_trajectory_as_float64(model, gradients):
    """The equations of the docstring in numpy, one parameter at a time, with decay and multipliers by path."""
    params = model()
    paths = {"norm/scale": (0.0, 1.0), "head/kernel": (0.3, 0.5), "temperature": (0.0, 2.0)}
    small = {
        "norm": params["norm"],
        "head": {"kernel": params["head"]["kernel"]},
        "temperature": params["temperature"],
    }
    tx = adamw(
        0.02,
        b2=0.999,
        eps=1e-6,
        weight_decay={path: decay for path, (decay, _) in paths.items()},
        lr_multipliers={path: k for path, (_, k) in paths.items()},
    )
    got, _ = train(tx, small, gradients, steps=50)
    got = {"norm/scale": got["norm"]["scale"], "head/kernel": got["head"]["kernel"]} | {
        "temperature": got["temperature"]
    }

    for path, (decay, k) in paths.items():
        first, *rest = path.split("/")
        w = np.asarray(small[first][rest[0]] if rest else small[first], np.float64)
        mu = nu = np.zeros_like(w)
        for t in range(1, 51):
            grads = gradients(small, t - 1, size=0.1 * (1 + (t - 1) % 5))
            g = np.asarray(grads[first][rest[0]] if rest else grads[first], np.float64)
            mu = 0.9 * mu + 0.1 * g
            nu = 0.999 * nu + 0.001 * g**2
            w = w - k * 0.02 * (mu / (1 - 0.9**t) / (np.sqrt(nu / (1 - 0.999**t)) + 1e-6) + decay * w)
        np.testing.assert_allclose(got[path], w, rtol=3e-6, atol=3e-6, err_msg=path)


shapes = st.sampled_from([(), (3,), (2, 3)])


@settings(max_examples=10, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=4), st.floats(0, 0.99), st.floats(0, 0.999), st.integers(0, 99))
def test_any_tree_follows_optax(shapes, b1, b2, seed):
    rng = np.random.default_rng(seed)

    def array(shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    mine, theirs = adamw(0.1, b1=b1, b2=b2), optax.adamw(0.1, b1=b1, b2=b2, weight_decay=0.1)
    params = other = {"nested": (array(shapes[0]), [array(s) for s in shapes[1:]])}
    state, reference = mine.init(params), theirs.init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda p: array(p.shape), params)
        updates, state = mine.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, reference = theirs.update(grads, reference, other)
        other = optax.apply_updates(other, updates)
        close(params, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grads_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.bfloat16])
def test_state_keeps_its_kind(small, gradients, params_dtype, grads_dtype):
    params = small(params_dtype)
    tx = adamw(1e-3)
    grads = gradients(params, 0, dtype=grads_dtype)
    abstract = jax.eval_shape(tx.init, params)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (_, state), _ = jax.lax.scan(body, (params, tx.init(params)), None, length=3)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    kinds = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, abstract)
    assert all(jax.tree.leaves(kinds))
    assert {x.dtype for x in jax.tree.leaves((state.mu, state.nu))} == {jnp.dtype(jnp.float32)}


def test_second_moment_of_bfloat16_parameters_does_not_stick():
    """In bfloat16 an average with 0.999 of ones stops at 0.25."""
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    tx = adamw(1e-3, b2=0.999)

    def body(state, _):
        return tx.update({"w": jnp.ones(2, jnp.bfloat16)}, state, params)[1], None

    state, _ = jax.lax.scan(body, tx.init(params), None, length=3000)
    np.testing.assert_allclose(state.nu["w"], 1 - 0.999**3000, rtol=1e-4)


def test_conformance(small):
    check_optimizer(adamw(1e-3), small())


def test_learning_rate_is_data(small, gradients):
    params = small()
    grads = gradients(params, 0)
    tx = adamw(1e-3, schedule=lambda count: 0.5)
    traces = []

    @jax.jit
    def compiled(lr, state):
        traces.append(lr)
        return tx.update(grads, state, params, learning_rate=lr)

    state = tx.init(params)
    for peak in (1e-3, 2e-3):
        updates, new = compiled(jnp.float32(peak), state)
        expected, _ = adamw(peak, schedule=lambda count: 0.5).update(grads, state, params)
        close(updates, expected)
        np.testing.assert_allclose(new.learning_rate, peak / 2)
    assert len(traces) == 1
    swept, _ = jax.vmap(lambda lr: tx.update(grads, state, params, learning_rate=lr))(jnp.array([1e-3, 2e-3]))
    np.testing.assert_allclose(swept["b"][1], updates["b"], rtol=1e-6)


def test_learning_rate_before_and_after_a_step():
    tx = adamw(2.0, schedule=lambda count: (count + 1) / 10)
    params = {"w": jnp.ones(1)}
    state = tx.init(params)
    assert float(state.learning_rate) == pytest.approx(0.2)
    for expected in (0.2, 0.4, 0.6):
        _, state = tx.update(params, state, params)
        assert float(state.learning_rate) == pytest.approx(expected)


def test_missing_leaves_are_left_alone(small, gradients):
    params = {**small(), "c": jnp.ones(3)}
    tx = adamw(1e-2)
    grads = gradients(params, 0)
    full, _ = tx.update(grads, tx.init(params), params)
    partial = {"a": {"kernel": None}, "b": grads["b"], "c": optax.MaskedNode()}
    updates, state = tx.update(partial, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(partial)
    np.testing.assert_array_equal(updates["b"], full["b"])
    assert not state.mu["a"]["kernel"].any()
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def test_inside_masked_and_partition(small, gradients):
    params = small()
    grads = gradients(params, 0)
    mask = {"a": {"kernel": True}, "b": False}
    masked = optax.masked(adamw(1e-2, weight_decay={"a/kernel": 0.1, "b": 0.0}), mask)
    updates, _ = masked.update(grads, masked.init(params), params)
    np.testing.assert_array_equal(updates["b"], grads["b"])
    split = optax.partition({True: adamw(1e-2), False: optax.sgd(1.0)}, mask)
    again, _ = split.update(grads, split.init(params), params)
    np.testing.assert_array_equal(again["a"]["kernel"], updates["a"]["kernel"])


def test_nnx_optimizer_and_a_static_mapping_by_path():
    """A static decay mapping works though init sees variables and update sees arrays."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    tx = adamw(0.1, weight_decay={"kernel": 0.1, "bias": 0.0})
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 3))) ** 2))(model))

    step(model, optimizer)
    step(model, optimizer)

    def loss(params):
        return jnp.sum((jnp.ones((1, 3)) @ params["kernel"] + params["bias"]) ** 2)

    params, state = before, tx.init(before)
    for _ in range(2):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)


class Callable:
    """A parameter tree that can be called, like an Equinox module."""

    def __init__(self, w):
        self.w = w

    def __call__(self, *args):
        raise AssertionError("the tree was taken for a function")


jax.tree_util.register_pytree_with_keys(
    Callable, lambda c: (((jax.tree_util.GetAttrKey("w"), c.w),), None), lambda _, children: Callable(*children)
)


def test_callable_tree_is_a_tree():
    params = Callable(jnp.ones(2))
    tx = adamw(0.1)
    updates, _ = tx.update(Callable(jnp.ones(2)), tx.init(params), params)
    assert isinstance(updates, Callable)


def test_errors_name_every_path(model, small, gradients):
    params = model()
    with pytest.raises(UserError) as caught:
        adamw("x", b1=1.0, b2=-1, eps=0, weight_decay={"a": float("nan")}, lr_multipliers=float("inf"))  # pyright: ignore[reportArgumentType]
    assert str(caught.value).splitlines() == [
        "adamw:",
        "  b2: expected number >= 0.0, <= 1.0, got -1",
        '  learning_rate: expected number >= 0.0, got "x"',
        "  weight_decay.a: expected number >= 0.0, got nan: numbers must be finite",
        "  lr_multipliers: expected number >= 0.0, got inf: numbers must be finite",
        "  eps: expected number > 0.0, got 0",
        "  b1 must be below 1, got 1.0",
    ]
    with pytest.raises(ValueError, match=r"nothing for 'norm/scale' .did you mean 'norms/scale'") as error:
        adamw(1e-3, weight_decay={"norms/scale": 0.1}).init(params)
    assert str(error.value).count("\n") == 11
    with pytest.raises(ValueError, match=r"2 parameter.*\n  a: int32\n  b: complex64"):
        adamw(1e-3).init({"a": jnp.ones(2, jnp.int32), "b": jnp.ones(2, jnp.complex64), "c": jnp.ones(1)})

    params = small()
    tx = adamw(1e-3)
    state = tx.init(params)
    grads = {**gradients(params, 0), "b": jnp.ones(5), "bb": jnp.ones(4)}
    with pytest.raises(ValueError, match=r"'b': gradient \(5,\), state \(3,\)\n.*'bb' has a gradient but no state"):
        tx.update(grads, state, params)
    with pytest.raises(ValueError, match="has weight decay, but `params` was not given"):
        tx.update(gradients(params, 0), state)


def test_eps_by_path(small, gradients):
    params = small()
    grads = gradients(params, 0)
    tx = adamw(1e-2, eps={"a/kernel": 0.5, "b": 1e-3, "more": 1.0})
    got, state = tx.update(grads, tx.init(params), params)
    for path, eps in (("a", 0.5), ("b", 1e-3)):
        expected, other = adamw(1e-2, eps=eps).update(grads, adamw(1e-2, eps=eps).init(params), params)
        close(got[path], expected[path], rtol=0, atol=0)
        assert jax.tree.structure(state) == jax.tree.structure(other)
    with pytest.raises(ValueError, match=r"adamw: the numbers by path.*\n  eps has nothing for 'b'"):
        adamw(1e-2, eps={"a/kernel": 0.5}).init(params)
    with pytest.raises(UserError, match=r"eps.b: expected number > 0.0, got 0"):
        adamw(1e-2, eps={"a/kernel": 0.5, "b": 0.0})


def test_one_eps_compiles_as_before(small):
    """A number by path is the same program as one number, and both are constants in it."""
    params = small()
    texts = {
        jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()
        for tx in (adamw(1e-2, eps=1e-5), adamw(1e-2, eps={"a/kernel": 1e-5, "b": 1e-5}))
    }
    assert len(texts) == 1


def test_without_decay_needs_no_parameters(small, gradients):
    params = small()
    tx = adamw(1e-3, weight_decay=0.0)
    tx.update(gradients(params, 0), tx.init(params))


def test_update_can_stand_where_optax_expects_one():
    assert isinstance(adamw(1e-3), optax.GradientTransformationExtraArgs)
    assert "learning_rate" in inspect.signature(adamw(1e-3).update).parameters
