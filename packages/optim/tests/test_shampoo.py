import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from styrax.core import UserError
from styrax.core.tree import flatten
from styrax.optim import adamw, guard
from styrax.optim.shampoo import shampoo
from styrax.optim.specs import ParamSpec, specs

W = {"w": ParamSpec("matrix", "io")}


def train(tx, w, grads):
    @jax.jit
    def step(w, state, g):
        updates, state = tx.update(g, state, w)
        return optax.apply_updates(w, updates), state

    state = tx.init(w)
    for g in grads:
        w, state = step(w, state, g)
    return w, state


def twin(w, grads, *, rate, frequency, left=True, right=True, b=0.95, eps=1e-12, decay=0.01):
    """The docstring in float64, one matrix."""

    def power(gram):
        values, q = np.linalg.eigh(gram)
        return q @ np.diag((values - min(values[0], 0) + eps) ** (-0.5 / (left + right))) @ q.T

    w = np.asarray(w, np.float64)
    m, n = w.shape
    mu, nu, lhs, rhs, pl, pr = (np.zeros(s) for s in ((m, n), (m, n), (m, m), (n, n), (m, m), (n, n)))
    for t, g in enumerate(np.asarray(grads, np.float64), 1):
        mu, nu = b * mu + (1 - b) * g, b * nu + (1 - b) * g**2
        lhs, rhs = b * lhs + (1 - b) * g @ g.T, b * rhs + (1 - b) * g.T @ g
        if (t - 1) % frequency == 0:
            pl = power(lhs / (1 - b**t)) if left else np.eye(m)
            pr = power(rhs / (1 - b**t)) if right else np.eye(n)
        a = mu / (1 - b**t) / (np.sqrt(nu / (1 - b**t)) + 1e-8)
        s = pl @ mu @ pr
        w = w - rate * (s * np.linalg.norm(a) / np.linalg.norm(s) + decay * w)
    return w


def test_same_trajectory_as_float64():
    rng = np.random.default_rng(0)
    params = {
        "layers": {"w": rng.normal(size=(2, 3, 3))},
        "wide": {"w": rng.normal(size=(3, 9))},
        "tall": {"w": rng.normal(size=(9, 3))},
        "bias": rng.normal(size=4),
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    grads = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params) for _ in range(6)]
    got, state = train(shampoo(0.01, specs=specs(params), frequency=2, max_precond_dim=5), params, grads)
    got, start, paths = flatten(got), flatten(params), [flatten(g) for g in grads]
    for path, sides in {"wide/w": (True, False), "tall/w": (False, True)}.items():
        g = [g[path] for g in paths]
        expected = twin(start[path], g, rate=0.01, frequency=2, left=sides[0], right=sides[1])
        np.testing.assert_allclose(got[path], expected, atol=1e-5, err_msg=path)
    for i in range(2):
        expected = twin(start["layers/w"][i], [g["layers/w"][i] for g in paths], rate=0.01, frequency=2)
        np.testing.assert_allclose(got["layers/w"][i], expected, atol=1e-5)
    other, _ = train(adamw(0.01, weight_decay=0.01), {"bias": params["bias"]}, [{"bias": g["bias"]} for g in grads])
    np.testing.assert_allclose(got["bias"], other["bias"], rtol=1e-6)
    assert set(flatten(state.left_root)) == {"layers/w", "wide/w"}


def test_no_side_is_adam_and_a_root_undoes_its_power():
    rng = np.random.default_rng(1)
    w = {"w": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)}
    grads = [{"w": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)} for _ in range(3)]
    got, _ = train(shampoo(0.01, specs=W, max_precond_dim=2), w, grads)
    expected, _ = train(adamw(0.01, b1=0.95, b2=0.95, weight_decay=0.01), w, grads)
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6)
    _, state = train(shampoo(0.01, specs=W, b2=0.5, frequency=1), w, grads)
    root, gram = state.left_root["w"][0], state.left["w"][0] / (1 - 0.5**3)
    np.testing.assert_allclose(np.linalg.matrix_power(root, 4) @ gram, np.eye(4), atol=1e-4)


def test_guard_zeros_and_mistakes():
    params = {"w": jnp.ones((3, 4))}
    tx = guard(shampoo(0.01, specs=W, frequency=1))
    state = jax.jit(tx.init)(params)
    step = jax.jit(tx.update)
    for g in (jnp.zeros((3, 4)), jnp.full((3, 4), jnp.nan), jnp.ones((3, 4))):
        before = state
        updates, state = step({"w": g}, state, params)
        assert np.isfinite(updates["w"]).all()
        if not np.isfinite(g).all():
            jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    with pytest.raises(UserError, match=r"(?s)shampoo:.*b1.*eps.*frequency"):
        shampoo(0.01, specs=W, b1=-1, eps=0, frequency=0)
