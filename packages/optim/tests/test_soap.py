from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from styrax.core import UserError
from styrax.core.tree import flatten
from styrax.optim import adamw, guard
from styrax.optim.soap import soap
from styrax.optim.specs import ParamSpec, specs

W = {"w": ParamSpec("matrix", "io")}


def train(tx, w, grads):
    """Give the parameters after every step."""

    @jax.jit
    def step(w, state, g):
        updates, state = tx.update(g, state, w)
        return optax.apply_updates(w, updates), state

    state, seen = tx.init(w), []
    for g in grads:
        w, state = step(w, state, g)
        seen.append(w)
    return seen, state


@pytest.mark.parametrize("name", ["plain", "decayed"])
def test_same_trajectory_as_pytorch_optimizer(name):
    golden = np.load(Path(__file__).parent / "golden" / "soap.npz")
    kwargs = {"plain": {"weight_decay": 0.0}, "decayed": {"b1": 0.9, "b2": 0.95, "shampoo_beta": 0.8}}[name]
    tx = soap(3e-3, specs=W, frequency=4, **kwargs)
    seen, _ = train(
        tx, {"w": jnp.asarray(golden[f"{name}_0"])}, [{"w": jnp.asarray(g)} for g in golden[f"{name}_grads"]]
    )
    got = np.stack([w["w"] for w in seen])
    np.testing.assert_allclose(got, golden[f"{name}_w"], atol=1e-5)
    np.testing.assert_array_equal(got[0], golden[f"{name}_0"])


def twin(w, grads, *, rate, frequency, left=True, right=True, b=0.95, eps=1e-8, decay=0.01):
    """The docstring in float64, one matrix, with the bases from `numpy`."""

    def basis(gram):
        return np.linalg.eigh(gram)[1][:, ::-1]

    w = np.asarray(w, np.float64)
    m, n = w.shape
    mu, nu, lhs, rhs, ql, qr = (
        np.zeros((m, n)),
        np.zeros((m, n)),
        np.zeros((m, m)),
        np.zeros((n, n)),
        np.eye(m),
        np.eye(n),
    )
    for t, g in enumerate(np.asarray(grads, np.float64)):
        if t:
            mu, nu = b * mu + (1 - b) * g, b * nu + (1 - b) * (ql.T @ g @ qr) ** 2
            a = np.sqrt(1 - b**t) / (1 - b**t)
            w = w - rate * (a * ql @ (ql.T @ mu @ qr / (np.sqrt(nu) + eps)) @ qr.T + decay * w)
        lhs, rhs = b * lhs + (1 - b) * g @ g.T, b * rhs + (1 - b) * g.T @ g
        if t == 0:
            ql, qr = basis(lhs) if left else ql, basis(rhs) if right else qr
        elif t % frequency == 0:
            if left:
                order = np.argsort(-np.diag(ql.T @ lhs @ ql))
                nu, ql = nu[order], np.linalg.qr((lhs @ ql)[:, order])[0]
            if right:
                order = np.argsort(-np.diag(qr.T @ rhs @ qr))
                nu, qr = nu[:, order], np.linalg.qr((rhs @ qr)[:, order])[0]
    return w


def test_same_trajectory_as_float64_stacked_and_one_sided():
    """Square matrices in a stack and apart, and rectangular ones of which the long side is not rotated."""
    rng = np.random.default_rng(0)
    params = {
        "layers": {"w": rng.normal(size=(3, 4, 4))},
        "square": {"w": rng.normal(size=(4, 4))},
        "wide": {"w": rng.normal(size=(4, 9))},
        "tall": {"w": rng.normal(size=(9, 4))},
        "bias": rng.normal(size=4),
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    grads = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params) for _ in range(8)]
    tx = soap(0.01, specs=specs(params), frequency=3, max_precond_dim=5)
    seen, state = train(tx, params, grads)
    seen, start, paths = flatten(seen[-1]), flatten(params), [flatten(g) for g in grads]
    for path, sides in {"square/w": (True, True), "wide/w": (True, False), "tall/w": (False, True)}.items():
        expected = twin(start[path], [g[path] for g in paths], rate=0.01, frequency=3, left=sides[0], right=sides[1])
        np.testing.assert_allclose(seen[path], expected, atol=2e-5, err_msg=path)
    for i in range(3):
        got, g = seen["layers/w"][i], [g["layers/w"][i] for g in paths]
        np.testing.assert_allclose(got, twin(start["layers/w"][i], g, rate=0.01, frequency=3), atol=2e-5)
    other, _ = train(adamw(0.01, weight_decay=0.01), {"bias": params["bias"]}, [{"bias": g["bias"]} for g in grads])
    np.testing.assert_allclose(seen["bias"], other[-1]["bias"], rtol=1e-6)
    assert set(flatten(state.left)) == {"layers/w", "square/w", "wide/w"}
    assert set(flatten(state.right_basis)) == {"layers/w", "square/w", "tall/w"}


def test_rectangular_matrices_by_what_must_hold():
    """Bases are orthogonal and diagonalize; a rotation of the problem rotates the path; nothing moves at first."""
    rng = np.random.default_rng(1)
    shape, steps = (3, 7), 9
    grads = rng.normal(size=(steps, *shape)) * np.linspace(0.5, 2, 7)
    p = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    tx = soap(0.01, specs=W, frequency=2, weight_decay=0.0)
    zero = {"w": jnp.zeros(shape)}
    seen, state = train(tx, zero, [{"w": jnp.asarray(g, jnp.float32)} for g in grads])
    assert not np.asarray(seen[0]["w"]).any() and np.asarray(seen[1]["w"]).any()
    left, right = state.left_basis["w"][0], state.right_basis["w"][0]
    for q in (left, right):
        np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-5)
    b = 0.95
    weights = (1 - b) * b ** np.arange(steps)[::-1]
    np.testing.assert_allclose(state.left["w"][0], np.einsum("t,tij,tkj->ik", weights, grads, grads), rtol=1e-4)
    np.testing.assert_allclose(
        state.right["w"][0], np.einsum("t,tij,tik->jk", weights, grads, grads), rtol=1e-4, atol=1e-5
    )
    # The right statistic of the first steps has rank 3 of 7; on the left there is one basis only.
    one = soap(0.01, specs=W, frequency=2, weight_decay=0.0, max_precond_dim=5)
    plain, _ = train(one, zero, [{"w": jnp.asarray(g, jnp.float32)} for g in grads])
    turned, _ = train(one, zero, [{"w": jnp.asarray(p @ g, jnp.float32)} for g in grads])
    np.testing.assert_allclose(turned[-1]["w"], p @ plain[-1]["w"], atol=2e-5)


def test_guard_zeros_and_mistakes():
    params = {"w": jnp.ones((3, 4))}
    tx = guard(soap(0.01, specs=W, frequency=1))
    state = jax.jit(tx.init)(params)
    step = jax.jit(tx.update)
    for g in (jnp.zeros((3, 4)), jnp.full((3, 4), jnp.nan), jnp.ones((3, 4)), jnp.full((3, 4), jnp.inf)):
        before = state
        updates, state = step({"w": g}, state, params)
        assert np.isfinite(updates["w"]).all()
        if not np.isfinite(g).all():
            assert not np.asarray(updates["w"]).any()
            jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    with pytest.raises(UserError, match=r"(?s)soap:.*b1.*frequency.*b2 must be below 1"):
        soap(0.01, specs=W, b1=-1, b2=1.0, shampoo_beta=0.5, frequency=0)
