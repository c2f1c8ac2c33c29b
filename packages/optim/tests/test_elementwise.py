"""Elementwise optimizers against independent implementations and against their equations in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trajectories import GOLDEN, run

from styrax.core import UserError
from styrax.core.testing import check_optimizer
from styrax.optim import adamw, guard
from styrax.optim.adafactor import adafactor
from styrax.optim.adam_mini import adam_mini
from styrax.optim.ademamix import ademamix
from styrax.optim.averaging import averaged
from styrax.optim.cautious import cautious
from styrax.optim.eight_bit import eight_bit_adamw
from styrax.optim.evaluation import eval_params
from styrax.optim.lion import lion
from styrax.optim.mars import mars
from styrax.optim.prodigy import prodigy
from styrax.optim.schedule_free import schedule_free
from styrax.optim.specs import ParamSpec

# Name -> the optimizer as it was run by the oracle (tools/golden/optim_elementwise.py) and the tolerance.
ORACLES = {
    "lion": (lambda: lion(3e-3, weight_decay=0.1), 5e-7),
    "ademamix": (lambda: ademamix(1e-2, warmup=20, weight_decay=0.1), 8e-6),
    "schedule_free": (lambda: schedule_free(2e-2, schedule=lambda k: jnp.minimum(1.0, (k + 1) / 10)), 1e-5),
    "mars": (lambda: mars(1e-2, weight_decay=0.1), 8e-6),
    "prodigy": (lambda: prodigy(weight_decay=0.1), 2e-5),
    "adam_mini": (
        lambda: adam_mini(
            1e-2,
            specs={"w": ParamSpec("matrix", "oi", heads=2), "b": ParamSpec("vector", "o")},
            weight_decay={"w": 0.1, "b": 0.0},
        ),
        8e-6,
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_same_trajectory_as_the_oracle(name):
    make, tolerance = ORACLES[name]
    golden = np.load(GOLDEN / f"{name}.npz")
    params = {"w": golden["w0"], "b": golden["b0"]}
    got, _ = run(make(), params, {"w": golden["gw"], "b": golden["gb"]})
    for leaf in params:
        np.testing.assert_allclose(got[leaf], golden[leaf], rtol=tolerance, atol=tolerance, err_msg=leaf)


def lion_twin(w, grads):
    m = np.zeros_like(w)
    for g in grads:
        w = w - 0.5 * 0.02 * (np.sign(0.9 * m + 0.1 * g) + 0.3 * w)
        m = 0.99 * m + 0.01 * g
    return w


def ademamix_twin(w, grads, b1=0.9, b2=0.999, b3=0.9999, alpha=5.0, warmup=30):
    m = slow = v = np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        s = min(1, t / warmup)
        b3_t = b3 if s == 1 else math.exp(math.log(b1) * math.log(b3) / ((1 - s) * math.log(b3) + s * math.log(b1)))
        m, slow, v = b1 * m + (1 - b1) * g, b3_t * slow + (1 - b3_t) * g, b2 * v + (1 - b2) * g**2
        u = (m / (1 - b1**t) + s * alpha * slow) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        w = w - 0.5 * 0.02 * (u + 0.3 * w)
    return w


def mars_twin(w, grads, b1=0.95, b2=0.99):
    m = v = last = np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        c = g + 0.025 * b1 / (1 - b1) * (g - last)
        c = c / max(1, np.linalg.norm(c))
        m, v, last = b1 * m + (1 - b1) * c, b2 * v + (1 - b2) * c**2, g
        w = w - 0.5 * 0.02 * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8) + 0.3 * w)
    return w


def schedule_free_twin(w, grads, b1=0.9, b2=0.999, r=0.5):
    """With x, z and y all stored."""
    x = z = y = w
    v, total, largest = np.zeros_like(w), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        rate = 0.02 * min(1, t / 10)
        v = b2 * v + (1 - b2) * g**2
        z = z - 0.5 * rate * (g / (np.sqrt(v / (1 - b2**t)) + 1e-8) + 0.3 * y)
        largest = max(largest, rate)
        weight = t**r * largest**2
        total += weight
        x = x + weight / total * (z - x)
        y = b1 * x + (1 - b1) * z
    return y


def prodigy_twin(w, grads, b1=0.9, b2=0.999, d0=1e-2, growth=1.05):
    """With bias correction, a limit on growth and the safeguard, which the golden run has not."""
    b3 = math.sqrt(b2)
    m = v = s = np.zeros_like(w)
    d = d_max = d0
    numerator, w0 = 0.0, w
    for t, g in enumerate(grads, 1):
        eta = d * 0.02 * math.sqrt(1 - b2**t) / (1 - b1**t)
        numerator = b3 * numerator + d / d0 * eta * np.sum(g * (w0 - w))
        s = b3 * s + d / d0 * d * g
        m, v = b1 * m + (1 - b1) * d * g, b2 * v + (1 - b2) * (d * g) ** 2
        estimate = 2.0 * numerator / np.abs(s).sum()
        if d == d0:
            d = max(d, estimate)
        d_max = max(d_max, estimate)
        d = min(d_max, growth * d)
        w = w - 0.5 * eta * (m / (np.sqrt(v) + d * 1e-8) + 0.3 * w)
    return w


def cautious_twin(w, grads):
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        mask = u * g > 0
        u = u * mask / max(mask.mean(), 1e-3)
        w = w - 0.5 * 0.02 * (u + 0.3 * np.where(u * w > 0, w, 0))
    return w


def cautious_adamw(weight_decay=0.1, lr_multipliers=1.0, **kw):
    inner = adamw(0.02, weight_decay=0.0, lr_multipliers=lr_multipliers, **kw)
    return cautious(inner, weight_decay=weight_decay, cautious_decay=True, lr_multipliers=lr_multipliers)


def adam_mini_twin(w, grads):
    """One second moment for each column, which is an output."""
    m, v = np.zeros_like(w), np.zeros(w.shape[1])
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (g**2).mean(0)
        w = w - 0.5 * 0.02 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + 0.3 * w)
    return w


def adafactor_twin(w, grads, b1=0.7):
    rows, columns, m = np.zeros(w.shape[0]), np.zeros(w.shape[1]), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        b2 = 1 - t**-0.8
        rows, columns = b2 * rows + (1 - b2) * (g**2).mean(1), b2 * columns + (1 - b2) * (g**2).mean(0)
        u = g / np.sqrt(np.outer(rows, columns) / rows.mean())
        u = u / max(1, np.sqrt((u**2).mean()) / 0.5)
        m = b1 * m + (1 - b1) * u * max(np.sqrt((w**2).mean()), 1e-3)
        w = w - 0.5 * 0.02 * (m + 0.3 * w)
    return w


MATRIX = {"w": ParamSpec("matrix", "io")}

# Name -> optimizer with decay 0.3 and multiplier 0.5, and its equation for one parameter in float64.
TWINS = {
    "lion": (lambda **kw: lion(0.02, **kw), lion_twin, 2e-6),
    "ademamix": (lambda **kw: ademamix(0.02, warmup=30, **kw), ademamix_twin, 3e-6),
    "ademamix without warm-up": (
        lambda **kw: ademamix(0.02, **kw),
        lambda w, grads: ademamix_twin(w, grads, warmup=1),
        3e-6,
    ),
    "mars": (lambda **kw: mars(0.02, **kw), mars_twin, 3e-6),
    "schedule_free": (
        lambda **kw: schedule_free(0.02, schedule=lambda k: jnp.minimum(1.0, (k + 1) / 10), r=0.5, **kw),
        schedule_free_twin,
        3e-6,
    ),
    "cautious": (cautious_adamw, cautious_twin, 3e-6),
    "prodigy": (
        lambda **kw: prodigy(
            0.02, d0=1e-2, d_coef=2.0, growth_rate=1.05, use_bias_correction=True, safeguard_warmup=True, **kw
        ),
        prodigy_twin,
        1e-5,
    ),
    "adam_mini": (lambda **kw: adam_mini(0.02, specs=MATRIX, **kw), adam_mini_twin, 3e-6),
    "adafactor": (
        lambda **kw: adafactor(0.02, specs=MATRIX, b1=0.7, clip=0.5, min_size=2, **kw),
        adafactor_twin,
        3e-6,
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_same_trajectory_as_float64(name):
    make, twin, tolerance = TWINS[name]
    rng = np.random.default_rng(7)
    w = rng.normal(size=(5, 3)).astype("float32")
    grads = (rng.normal(size=(60, 5, 3)) * np.exp(rng.normal(size=(5, 3)))).astype("float32")
    tx = make(weight_decay={"w": 0.3}, lr_multipliers={"w": 0.5})
    got, _ = run(tx, {"w": w}, {"w": grads})
    expected = twin(np.float64(w), np.float64(grads))
    np.testing.assert_allclose(got["w"][-1], expected, rtol=tolerance, atol=tolerance)


SMALL = {"a/kernel": ParamSpec("matrix", "io"), "b": ParamSpec("vector", "o"), "c": ParamSpec("vector", "o")}
PLAIN = {
    "lion": lambda **kw: lion(1e-2, **kw),
    "ademamix": lambda **kw: ademamix(1e-2, warmup=5, **kw),
    "schedule_free": lambda **kw: schedule_free(1e-2, **kw),
    "mars": lambda **kw: mars(1e-2, **kw),
    "prodigy": lambda **kw: prodigy(**{"learning_rate": 1.0, "d0": 1e-2} | kw),
    "cautious": cautious_adamw,
    "adam_mini": lambda **kw: adam_mini(1e-2, specs=SMALL, **kw),
    "adafactor": lambda **kw: adafactor(1e-2, specs=SMALL, min_size=2, **kw),
    "eight_bit": lambda **kw: eight_bit_adamw(1e-2, specs=SMALL, **kw),
    "adafactor with momentum": lambda **kw: adafactor(1e-2, specs=SMALL, b1=0.9, **kw),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_conformance(name, small):
    check_optimizer(PLAIN[name](), small())


@pytest.mark.parametrize("name", PLAIN)
def test_a_guarded_step_is_scaled_or_skipped(name, small, gradients):
    """A clipped step is that of the clipped gradient; a skipped one changes no bit of state or weights."""
    params = small()
    raw, tx = PLAIN[name](), guard(PLAIN[name](), clip_norm=1.0)
    big = gradients(params, 0, size=100.0)
    norm = optax.tree.norm(big)
    clipped, _ = raw.update(jax.tree.map(lambda g: g / norm, big), raw.init(params), params)
    updates, state = tx.update(big, tx.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, clipped)
    updates, after = tx.update({**big, "b": jnp.full(3, jnp.nan)}, state, params)
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    assert all(np.signbit(u).all() and not u.any() for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", PLAIN)
def test_missing_leaves_and_traced_rate(name, small, gradients):
    params = {**small(), "c": jnp.ones(3)}
    tx = PLAIN[name](schedule=lambda count: 0.5)
    grads = gradients(params, 0)
    partial = {"a": {"kernel": None}, "b": grads["b"], "c": optax.MaskedNode()}
    updates, state = tx.update(partial, tx.init(params), params, learning_rate=jnp.float32(0.5))
    assert jax.tree.structure(updates) == jax.tree.structure(partial)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    assert float(state.learning_rate) == 0.25


@pytest.mark.parametrize("make", [lion, ademamix, schedule_free, mars, prodigy, adam_mini, adafactor, eight_bit_adamw])
def test_errors_are_the_callers(make, small, gradients):
    more = {"specs": SMALL} if make in (adam_mini, adafactor, eight_bit_adamw) else {}
    with pytest.raises(UserError, match=rf"^{make.__name__}:\n"):
        make("x", b1=1.0, weight_decay=-1, **more)
    with pytest.raises(ValueError, match=f"{make.__name__}: the numbers by path"):
        make(1e-3, weight_decay={"a": 1.0}, **more).init(small())
    params = small()
    with pytest.raises(ValueError, match=f"{make.__name__}: the gradient does not fit"):
        make(1e-3, **more).update({**params, "b": jnp.ones(4)}, make(1e-3, **more).init(params), params)


@pytest.mark.parametrize("make", [adam_mini, adafactor])
def test_axes_that_nobody_gave_are_refused(make):
    with pytest.raises(UserError, match="must know which axes are inputs"):
        make(1e-3, specs={"w": ParamSpec("matrix", None)}).init({"w": jnp.ones((2, 3, 4))})


def test_ademamix_slow_average_is_exact_near_one():
    """0.9999 in float32 is off by a twentieth of a per cent in what it forgets."""
    tx = ademamix(1e-3, b3=0.99999, alpha=1.0, weight_decay=0.0)
    grads = {"w": jnp.ones((1000, 1), jnp.float32)}
    _, state = run(tx, {"w": jnp.ones(1)}, grads)
    np.testing.assert_allclose(state.slow["w"][-1], 1 - 0.99999**1000, rtol=1e-5)


def test_schedule_free_evaluates_the_oracles_average():
    golden = np.load(GOLDEN / "schedule_free.npz")
    params = {"w": golden["w0"], "b": golden["b0"]}
    make, tolerance = ORACLES["schedule_free"]
    got, states = run(make(), params, {"w": golden["gw"], "b": golden["gb"]})
    x = jax.vmap(eval_params)(states, got)
    for leaf in params:
        np.testing.assert_allclose(x[leaf], golden[f"x_{leaf}"], rtol=tolerance, atol=tolerance, err_msg=leaf)


def test_schedule_free_sums_do_not_stick_in_bfloat16():
    """In bfloat16 a sum of ones stops at 256."""
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    _, state = run(schedule_free(1.0, weight_decay=0.0), params, {"w": jnp.zeros((600, 1), jnp.bfloat16)})
    assert float(state.weight_sum[-1]) == 600


def test_schedule_free_rate_of_zero_moves_nothing():
    tx = schedule_free(1.0, schedule=lambda k: jnp.minimum(1.0, k / 2))
    params = {"w": jnp.ones(2)}
    updates, state = tx.update(params, tx.init(params), params)
    assert not updates["w"].any()
    assert float(state.weight_sum) == 0


def test_prodigy_estimates_what_its_authors_do():
    golden = np.load(GOLDEN / "prodigy.npz")
    _, states = run(
        prodigy(weight_decay=0.1), {"w": golden["w0"], "b": golden["b0"]}, {"w": golden["gw"], "b": golden["gb"]}
    )
    np.testing.assert_allclose(states.d, golden["d"], rtol=2e-5)
    assert golden["d"][-1] > 100 * golden["d"][0]


def test_schedule_free_needs_b1():
    with pytest.raises(UserError, match="b1 must be above 0"):
        schedule_free(1e-3, b1=0.0)


LAYERS = {str(i): ParamSpec("matrix", "io") for i in range(3)}


@pytest.mark.parametrize(
    "make",
    [
        lambda s: mars(0.1, specs=s),
        lambda s: cautious(adamw(0.1, weight_decay=0.0), specs=s),
        lambda s: adafactor(0.1, specs=s or LAYERS, min_size=2),
        lambda s: adam_mini(0.1, specs=s or LAYERS),
    ],
)
def test_stacked_layers_are_as_a_loop(make):
    rng = np.random.default_rng(3)
    w, grads = (rng.normal(size=(*n, 3, 4, 5)).astype("float32") for n in ((), (8,)))
    tx = make({"w": ParamSpec("matrix", "sio")})
    stacked, _ = run(tx, {"w": w}, {"w": grads})
    loop, _ = run(make(None), [*w], [*np.moveaxis(grads, 1, 0)])
    for i in range(3):
        np.testing.assert_allclose(stacked["w"][:, i], loop[i], rtol=1e-6, atol=1e-7)


def test_cautious_decay_needs_a_rate(small):
    with pytest.raises(ValueError, match="has no `learning_rate`"):
        cautious(optax.sgd(1.0), weight_decay=0.1).init(small())


def test_cautious_around_any_transformation_under_a_guard(small, gradients):
    params = small()
    tx = guard(cautious(optax.sgd(0.1, momentum=0.9)))
    check_optimizer(tx, params)
    _, state = tx.update(gradients(params, 0), tx.init(params), params)
    updates, after = tx.update({**gradients(params, 1), "b": jnp.full(3, jnp.inf)}, state, params)
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    assert not any(u.any() for u in jax.tree.leaves(updates))


@pytest.mark.parametrize(("decay", "start"), [(0.9, 0), (1.0, 0), (1.0, 5), (0.8, 7), (0.0, 0)])
@pytest.mark.parametrize("inner", [adamw, optax.sgd])
def test_average_of_the_weights(decay, start, inner):
    """Weights and states are those without the average; the average is a weighted sum of the weights."""
    rng = np.random.default_rng(5)
    params, grads = {"w": rng.normal(size=3).astype("float32")}, {"w": rng.normal(size=(20, 3)).astype("float32")}
    plain, inner_states = run(inner(0.1), params, grads)
    got, states = run(averaged(inner(0.1), decay=decay, start=start), params, grads)
    np.testing.assert_array_equal(got["w"], plain["w"])
    jax.tree.map(np.testing.assert_array_equal, states.inner, inner_states)
    tail = np.float64(plain["w"][start:])
    shares = np.array([decay**i for i in range(len(tail))])[::-1]
    last = jax.tree.map(lambda x: x[-1], states)
    found = eval_params(last, {"w": got["w"][-1]})
    np.testing.assert_allclose(found["w"], (shares[:, None] * tail).sum(0) / shares.sum(), rtol=2e-6)
    np.testing.assert_array_equal(states.average["w"][: start + 1], plain["w"][: start + 1])


def test_average_skips_with_the_guard_and_is_found_anywhere(small, gradients):
    params = small(jnp.bfloat16)
    for tx in (guard(averaged(adamw(0.1))), guard(averaged(optax.sgd(0.1)))):
        check_optimizer(tx, small())
        updates, state = tx.update(gradients(params, 0), tx.init(params), params)
        params_after = optax.apply_updates(params, updates)
        updates, after = tx.update({**gradients(params, 1), "b": jnp.full(3, jnp.nan)}, state, params_after)
        jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
        found = eval_params(after, params_after)
        jax.tree.map(np.testing.assert_array_equal, found, params_after)
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    assert eval_params(optax.sgd(1.0).init(params), params) is params
    with pytest.raises(ValueError, match="`params` was not given or lacks 'a/kernel', 'b'"):
        tx.update(gradients(params, 0), state)
    with pytest.raises(UserError, match=r"averaged:\n  decay: .*\n  start: "):
        averaged(optax.sgd(1.0), decay=2.0, start=-1)


def test_average_and_schedule_free_can_be_donated(small, gradients):
    """Parameters and state share no buffer, neither from a compiled nor from a plain init."""
    for tx in (averaged(adamw(0.1)), schedule_free(0.1)):
        step = jax.jit(lambda g, s, p, tx=tx: tx.update(g, s, p), donate_argnums=(1, 2))
        for init in (tx.init, jax.jit(tx.init)):
            params = jax.tree.map(jnp.copy, small())
            step(gradients(params, 0), init(params), params)


def test_the_average_is_of_what_apply_updates_leaves():
    """Compiled, XLA would drop the rounding to 16 bits and back; the first average is the weights to the bit."""
    for dtype in (jnp.bfloat16, jnp.float16):
        params = {"w": jnp.linspace(0.1, 1.0, 64, dtype=dtype)}
        tx = averaged(optax.sgd(1e-3))
        updates, state = jax.jit(tx.update)({"w": jnp.linspace(1.0, 2.0, 64)}, tx.init(params), params)
        weights = optax.apply_updates(params, updates)["w"]
        np.testing.assert_array_equal(state.average["w"], weights.astype(jnp.float32))
