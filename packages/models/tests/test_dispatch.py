import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.models.layers import dispatch


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def experts_of(number):
    """Any choices of so many experts and padding, always as many, so that they compile once."""
    return st.lists(st.integers(0, number), min_size=70, max_size=70).map(np.array)


@pytest.fixture(scope="module")
def compiled():
    """Compile both forms of the dropless layout, with their products."""

    def lay(experts, kernels):
        layout = dispatch.dropless(experts, 5)
        x = jnp.sin(jnp.arange(2.0 * len(layout.choice))).reshape(-1, 2)
        return layout[:3], x, layout.multiply(x, kernels)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for cpu in (True, False):
            patch.setattr(dispatch, "on_cpu", lambda cpu=cpu: cpu)
            found[cpu] = jax.jit(lay).lower(np.zeros(70, int), normal(5, 2, 3)).compile()
    return found


@settings(max_examples=40, deadline=None)
@given(experts=experts_of(5) | st.integers(0, 5).map(lambda e: np.full(70, e)), cpu=st.booleans())
def test_dropless_gives_each_choice_a_row_of_its_expert(compiled, experts, cpu):
    kernels = normal(5, 2, 3)
    (row, choice, expert), x, product = jax.tree.map(np.asarray, compiled[cpu](experts, kernels))
    real = experts < 5
    assert len(set(row[real])) == real.sum()
    assert (row[~real] == len(choice)).all()
    assert (choice[row[real]] == np.flatnonzero(real)).all()
    assert (expert[row[real]] == experts[real]).all()
    assert (choice < len(experts)).sum() == real.sum()
    expected = np.einsum("ni,nio->no", x[row[real]], kernels[experts[real]])
    np.testing.assert_allclose(product[row[real]], expected, atol=1e-5)


lay_places = jax.jit(lambda experts: dispatch.capacity(experts, 5, 9)._replace(multiply=0))


@settings(max_examples=40, deadline=None)
@given(experts=experts_of(5))
def test_capacity_fills_places_in_order(experts):
    layout = jax.tree.map(np.asarray, lay_places(experts))
    next_place, dropped = [0] * 5, 0
    for number, e in enumerate(experts):
        row = layout.row[number]
        if e == 5 or next_place[e] == 9:
            dropped += e < 5
            assert row == 5 * 9
            continue
        assert row == e * 9 + next_place[e]
        assert layout.choice[row] == number
        next_place[e] += 1
    assert layout.dropped == dropped
    assert (layout.choice < len(experts)).sum() == sum(next_place)


def test_gradients_of_moves_and_blocks_against_indexing():
    """The backward passes written by hand give what JAX derives from plain indexing."""
    x, kernels = normal(5, 3), normal(4, 3, 2)
    source, target = jnp.array([4, 9, 0, 2, 7]), jnp.array([2, 8, 3, 8, 0])
    weights = normal(5, 3, seed=1)
    moved = jax.grad(lambda x: (dispatch.move(x, source, target) * weights).sum())(x)
    plain = jax.grad(lambda x: (x.at[source].get(mode="fill", fill_value=0) * weights).sum())(x)
    np.testing.assert_array_equal(moved, plain)

    blocks, owner, weights = normal(6, 8, 3), jnp.array([0, 0, 1, 3, 3, 3]), normal(6, 8, 2, seed=1)
    got = jax.grad(lambda *args: (dispatch.block_product(*args, owner) * weights).sum(), (0, 1))(blocks, kernels)
    expected = jax.grad(lambda x, w: (jnp.einsum("bni,bio->bno", x, w[owner]) * weights).sum(), (0, 1))(blocks, kernels)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert (got[1][2] == 0).all()  # an expert without rows
