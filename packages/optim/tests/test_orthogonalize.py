import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.optim.orthogonalize import ITERATIONS, orthogonalize

NAMES = list(ITERATIONS)


def with_values(values, cols, seed=0):
    """A matrix of Frobenius norm 1 and singular values in the proportions that are given."""
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.normal(size=(len(values), len(values))))
    v, _ = np.linalg.qr(rng.normal(size=(cols, len(values))))
    return u @ np.diag(values) @ v.T


def twin(x, name):
    """The docstring in float64, on the singular values alone."""
    u, s, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / (ITERATIONS[name].margin * np.sqrt((s**2).sum()) + 1e-7)
    for a, b, c in ITERATIONS[name].coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ v


@pytest.mark.parametrize("name", NAMES)
def test_table_and_its_band(name):
    """The documented band is what the polynomials do to the interval, to the last digit that is printed."""
    s = np.linspace(0.01, 1, 200_001) / ITERATIONS[name].margin
    for a, b, c in ITERATIONS[name].coefficients:
        s = a * s + b * s**3 + c * s**5
    low, high = ITERATIONS[name].band
    assert low - 0.001 <= s.min() and s.max() <= high + 0.001
    assert s.min() - 0.002 <= low and high <= s.max() + 0.002


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_singular_values_end_in_the_band(name, form):
    values = np.geomspace(1, 0.03, 12)
    x = with_values(values / np.linalg.norm(values), 20)
    got = np.asarray(jax.jit(lambda x: orthogonalize(x, iteration=name, form=form))(jnp.asarray(x, jnp.float32)))
    low, high = ITERATIONS[name].band
    s = np.linalg.svd(got, compute_uv=False)
    assert low - 2e-3 <= s.min() and s.max() <= high + 2e-3
    np.testing.assert_allclose(got, twin(x, name), atol=2e-4)
    coarse = orthogonalize(jnp.asarray(x, jnp.float32), iteration=name, form=form, dtype=jnp.bfloat16)
    s = np.linalg.svd(np.asarray(coarse), compute_uv=False)
    assert coarse.dtype == jnp.float32 and s.max() < high + 0.1 and s.min() > low - 0.15
    assert np.vdot(coarse, got) / np.linalg.norm(coarse) / np.linalg.norm(got) > 0.995


@pytest.mark.parametrize("form", ["plain", "gram"])
def test_symmetries_and_stacks(form):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4, 6, 10)), jnp.float32)
    p, q = (jnp.asarray(np.linalg.qr(rng.normal(size=(n, n)))[0], jnp.float32) for n in (6, 10))
    f = jax.jit(lambda x: orthogonalize(x, form=form))
    stacked = f(x)
    np.testing.assert_allclose(f(p @ x @ q), p @ stacked @ q, atol=2e-5)
    np.testing.assert_allclose(f(1e3 * x), stacked, atol=1e-5)
    # XLA folds the transposition into the products, which then add in another order.
    np.testing.assert_allclose(f(jnp.swapaxes(x, 1, 2)), jnp.swapaxes(stacked, 1, 2), atol=2e-6)
    # Bit for bit at sizes for which XLA adds up a norm in the same order whatever the batch.
    x = jnp.asarray(rng.normal(size=(4, 16, 32)), jnp.float32)
    # Bit for bit at many sizes, but not at all on every version of XLA.
    np.testing.assert_allclose(np.stack([f(one[None])[0] for one in x]), f(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_zeros_and_rank_one_stay_finite(form, dtype):
    one = jnp.outer(jnp.arange(1.0, 5.0), jnp.ones(7)).astype(dtype)
    x = jnp.stack([jnp.zeros((4, 7), dtype), one])
    got = np.asarray(orthogonalize(x, form=form, dtype=jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[0], 0)
    s = np.linalg.svd(got[1], compute_uv=False)
    assert 0.6 < s[0] < 1.3 and s[1] < 0.1 and np.isfinite(got).all()


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"iteration: .*polar_express.* got 'polar_expres' .did you mean"):
        orthogonalize(jnp.ones((2, 2)), iteration="polar_expres")
    with pytest.raises(UserError, match="form"):
        orthogonalize(jnp.ones((2, 2)), form="grams")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="restart"):
        orthogonalize(jnp.ones((2, 2)), form="gram", restart=-1)


def test_gram_form_saves_work():
    def cost(**kwargs):
        x = jax.ShapeDtypeStruct((32, 96), jnp.float32)
        return jax.jit(lambda x: orthogonalize(x, **kwargs)).lower(x).compile().cost_analysis()["flops"]

    assert cost(form="gram") < 0.8 * cost() and cost(form="gram", restart=0) < 0.7 * cost()
