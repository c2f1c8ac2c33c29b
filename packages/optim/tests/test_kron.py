import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from styrax.core import UserError
from styrax.core.tree import flatten
from styrax.optim import adamw, guard
from styrax.optim.kron import fit_due, kron, noise_keys
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


def bound(x):
    top = np.abs(x).max()
    x = x / top
    row = x[:, np.argmax((x**2).sum(axis=0))] @ x
    return top * np.linalg.norm(row / np.linalg.norm(row) @ x.T)


def twin(w, grads, noise, *, rate, left=True, right=True, decay=0.1):
    """The docstring in float64, one matrix, with full matrices for diagonals too and inverses written out."""
    w = np.asarray(w, np.float64)
    m, n = w.shape
    mu, ql, qr = np.zeros((m, n)), np.eye(m), np.eye(n)
    for t, (g, v) in enumerate(zip(np.asarray(grads, np.float64), np.asarray(noise, np.float64)), 1):
        mu = 0.9 * mu + 0.1 * g
        mean = mu / (1 - 0.9**t)
        noisy = mean + np.sqrt(2.0**-23) * np.abs(mean).mean() * v
        a, b = ql @ noisy @ qr.T, np.linalg.inv(ql).T @ v @ np.linalg.inv(qr)
        new = []
        for q, x, y, triangle in ((ql, a, b, left), (qr, a.T, b.T, right)):
            one, two = x @ x.T, y @ y.T
            if triangle:
                new.append(q - 0.1 * np.triu(one - two) / bound(one + two) @ q)
            else:
                new.append(q - 0.1 * np.diag(np.diag(one - two)) / np.diag(one + two).max() @ q)
        ql, qr = new
        u = ql.T @ ql @ mean @ qr.T @ qr
        w = w - rate * (u * min(1, 1.1 / (np.sqrt((u**2).mean()) + 1e-6)) + decay * w)
    return w


@pytest.mark.slow
def test_same_trajectory_as_float64():
    rng = np.random.default_rng(0)
    params = {
        "bias": rng.normal(size=4),
        "layers": {"w": rng.normal(size=(2, 3, 4))},
        "tall": {"w": rng.normal(size=(9, 3))},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    grads = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params) for _ in range(6)]
    tx = kron(0.01, specs=specs(params), max_size_triangular=5, seed=3, weight_decay=0.1)
    got, state = train(tx, params, grads)
    got, start, paths = flatten(got), flatten(params), [flatten(g) for g in grads]
    for path, copies, shape, left in (("layers/w", 2, (3, 4), True), ("tall/w", 1, (9, 3), False)):
        for copy in range(copies):
            keys = [noise_keys(3, t, path, copies)[copy] for t in range(len(grads))]
            noise = [jax.random.normal(jax.random.wrap_key_data(key, impl="threefry2x32"), shape) for key in keys]
            pick = (lambda x, i=copy: x[i]) if copies > 1 else (lambda x: x)
            expected = twin(pick(start[path]), [pick(g[path]) for g in paths], noise, rate=0.01, left=left)
            np.testing.assert_allclose(pick(got[path]), expected, atol=1e-5, err_msg=path)
    other, _ = train(adamw(0.01), {"bias": params["bias"]}, [{"bias": g["bias"]} for g in grads])
    np.testing.assert_allclose(got["bias"], other["bias"], rtol=1e-6)
    assert flatten(state.left)["tall/w"].shape == (1, 9) and flatten(state.right)["tall/w"].shape == (1, 3, 3)


def test_whitens():
    """Fitted to gradients with one covariance, the factors make them as white as they can."""
    rng = np.random.default_rng(1)
    sides = [rng.normal(size=(n, n)) + 2 * np.eye(n) for n in (4, 5)]
    grads = jnp.asarray(np.einsum("ij,tjk,lk->til", sides[0], rng.normal(size=(1500, 4, 5)), sides[1]), jnp.float32)
    tx = kron(0.0, specs=W, b1=0.0, precond_lr=0.02)
    w = {"w": jnp.zeros((4, 5))}

    @jax.jit
    def fit(grads):
        return jax.lax.scan(lambda state, g: (tx.update({"w": g}, state, w)[1], None), tx.init(w), grads)[0]

    state = fit(grads)
    ql, qr = state.left["w"][0], state.right["w"][0]
    np.testing.assert_array_equal(ql, np.triu(ql))
    white = np.asarray(jnp.einsum("ij,tjk,kl->til", ql.T @ ql, grads, qr.T @ qr))
    for product in ("tij,tkj->ik", "tij,tik->jk"):
        for x, most in ((grads, None), (white, 2.0)):
            values = np.linalg.eigvalsh(np.einsum(product, x, x))
            ratio = values[-1] / values[0]
            assert ratio > 10 if most is None else ratio < most, (product, ratio)


def test_frequency_of_the_fits():
    counts = jnp.arange(20_000)
    due, number = jax.vmap(fit_due)(counts)
    assert due[:500].all() and int(number[499]) == 500
    expected = np.clip(np.exp(-0.001 * (np.arange(20_000) - 500.0)), 0.03, 1).cumsum()
    np.testing.assert_allclose(np.cumsum(due), expected, atol=3)
    np.testing.assert_allclose(due[10_000:].mean(), 0.03, atol=1e-3)


def test_guard_zeros_noise_and_mistakes():
    params = {"w": jnp.ones((3, 4))}
    tx = guard(kron(0.01, specs=W))
    state = jax.jit(tx.init)(params)
    step = jax.jit(tx.update)
    for g in (jnp.zeros((3, 4)), jnp.full((3, 4), jnp.nan), jnp.ones((3, 4))):
        before = state
        updates, state = step({"w": g}, state, params)
        assert np.isfinite(updates["w"]).all()
        if not np.asarray(g).any():
            np.testing.assert_array_equal(state.inner.left["w"], before.inner.left["w"])
        if not np.isfinite(g).all():
            jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    keys = {tuple(np.asarray(noise_keys(*case, 1))[0]) for case in ((0, 0, "a"), (0, 1, "a"), (0, 0, "b"), (1, 0, "a"))}
    assert len(keys) == 4
    with pytest.raises(UserError, match=r"(?s)kron:.*b1.*precond_lr.*seed"):
        kron(0.01, specs=W, b1=-1, precond_lr=0, seed=-1)
