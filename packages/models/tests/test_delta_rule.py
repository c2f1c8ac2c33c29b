"""The gated delta rule against its recurrence in float64, in chunks of all sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.models.layers.delta_rule import CHUNK, by_steps, delta_rule

SHAPE = (2, 3, 4, 5)  # batch, heads, k_dim, v_dim
RUN = jax.jit(delta_rule, static_argnames="chunk")


def draw(seq, seed=0, strength=1.0):
    batch, heads, k_dim, v_dim = SHAPE
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(2, batch, seq, heads, k_dim))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.normal(size=(batch, seq, heads, v_dim))
    log_decay = -strength * rng.exponential(size=(batch, seq, heads))
    rate = rng.uniform(size=(batch, seq, heads))
    memory = rng.normal(size=(batch, heads, k_dim, v_dim))
    return query, key, value, log_decay, rate, memory


def recurrence(query, key, value, log_decay, rate, memory, fresh):
    """Follow the definition, with whole matrices."""
    out, last = np.zeros(value.shape), np.zeros(memory.shape)
    for row, head in np.ndindex(*memory.shape[:2]):
        state = memory[row, head].copy()
        for t in range(query.shape[1]):
            q, k, v = (each[row, t, head] for each in (query, key, value))
            alpha, beta = np.exp(log_decay[row, t, head]), rate[row, t, head]
            state = 0 * state if fresh[row, t] else alpha * state
            state = state - beta * np.outer(k, k) @ state + beta * np.outer(k, v)
            out[row, t, head] = state.T @ q
        last[row, head] = state
    return out, last


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 3, 9, 24]),
    st.sampled_from([1, 4, 8, CHUNK]),
    st.sampled_from([0.0, 0.3, 40.0]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.integers(0, 9),
)
def test_against_the_recurrence(seq, chunk, strength, often, seed):
    """From no decay to one that wipes all out, with documents that begin nowhere, somewhere or everywhere."""
    arrays = draw(seq, seed, strength)
    fresh = np.random.default_rng(seed).uniform(size=(2, seq)) < often
    with jax.default_matmul_precision("highest"):
        got = RUN(*map(jnp.float32, arrays), fresh=jnp.asarray(fresh), chunk=chunk)
    for ours, expected in zip(got, recurrence(*arrays, fresh)):
        np.testing.assert_allclose(ours, expected, atol=2e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("strength", [0.3, 60.0])
def test_gradients_do_not_depend_on_chunks(strength):
    """And stay finite where nothing is left of the memory."""
    arrays = [jnp.float32(each) for each in draw(24, 1, strength)]
    fresh = jnp.zeros((2, 24), bool).at[0, 0].set(True).at[1, 13].set(True)

    def total(out, memory):
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(memory))

    got = jax.jit(jax.grad(lambda arrays: total(*delta_rule(*arrays, fresh=fresh, chunk=8))))(arrays)
    expected = jax.jit(jax.grad(lambda arrays: total(*by_steps(*arrays, fresh))))(arrays)
    for ours, theirs in zip(got, expected):
        assert bool(jnp.isfinite(ours).all())
        np.testing.assert_allclose(ours, theirs, atol=3e-5 * max(1.0, float(jnp.abs(theirs).max())))


def test_equal_keys_that_overwrite_one_another():
    """Nothing fades and everything is written anew: the products of a chunk cancel."""
    query, key, value, log_decay, rate, memory = draw(CHUNK)
    arrays = query, np.broadcast_to(key[:, :1], key.shape), value, 0 * log_decay, np.ones_like(rate), memory
    fresh = np.zeros((2, CHUNK), bool)
    with jax.default_matmul_precision("highest"):
        got = RUN(*map(jnp.float32, arrays), fresh=jnp.asarray(fresh))
    for ours, expected in zip(got, recurrence(*arrays, fresh)):
        np.testing.assert_allclose(ours, expected, atol=1e-4)
