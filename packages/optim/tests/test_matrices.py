import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from styrax.core.tree import flatten
from styrax.optim.kron import kron
from styrax.optim.matrices import batched, hollow, stack_shape
from styrax.optim.muon import muon
from styrax.optim.shampoo import shampoo
from styrax.optim.soap import soap
from styrax.optim.specs import ParamSpec
from styrax.optim.spreading import spread

SPECS = {"w": ParamSpec("matrix", "sio", heads=2), "v": ParamSpec("vector", "o")}
# Only the short side of a matrix [4, 2] has a statistic of full rank, whose basis is not arbitrary.
CASES = {
    "normuon": lambda: muon(0.01, specs=SPECS, normalize=True),
    "shampoo": lambda: shampoo(0.01, specs=SPECS, max_precond_dim=2),
    "soap": lambda: soap(0.01, specs=SPECS, max_precond_dim=2),
    "kron": lambda: kron(0.01, specs=SPECS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_explicit_axes(name):
    """On split axes that no reshape may touch, the same update as on one device, and where the parameters lie."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    rng = np.random.default_rng(2)
    w, g = ({"w": rng.normal(size=(2, 4, 4)), "v": rng.normal(size=4)} for _ in range(2))
    w, g = (jax.tree.map(lambda x: x.astype(np.float32), tree) for tree in (w, g))
    tx = CASES[name]()

    def run(w, g):
        # The carry of a loop must not change its type, of which explicit axes are part.
        begin = jax.tree.map(jnp.zeros_like, g), tx.init(w)
        return jax.lax.fori_loop(0, 3, lambda _, carry: tx.update(g, carry[1], w), begin)

    expected, _ = jax.jit(run)(w, g)
    where = {"w": NamedSharding(mesh, P(None, "a", "b")), "v": NamedSharding(mesh, P("b"))}
    with jax.set_mesh(mesh):
        got, state = jax.jit(run)(jax.device_put(w, where), jax.device_put(g, where))
    for path in where:
        np.testing.assert_allclose(got[path], expected[path], atol=1e-6)
        assert got[path].sharding.is_equivalent_to(where[path], got[path].ndim)
    assert flatten(state.mu)["w"].sharding.is_equivalent_to(where["w"], 3)


def test_batches_and_hollow_trees():
    rng = np.random.default_rng(0)
    shapes = {"a": (2, 3, 4), "b": (1, 4, 3), "c": (1, 3, 3)}
    stacks = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    calls = []

    def double(x):
        calls.append(x.shape)
        return 2 * x

    done = batched(double, {name: (x,) for name, x in stacks.items()}, wide=True)
    assert calls == [(3, 3, 4), (1, 3, 3)]
    for name, x in stacks.items():
        np.testing.assert_array_equal(done[name], 2 * x)
    np.testing.assert_array_equal(spread(double)(stacks["a"]), 2 * stacks["a"])
    spec = ParamSpec("matrix", "osi", heads=3)
    assert spec.to_matrices(np.zeros((6, 2, 5))).shape == stack_shape(spec, (6, 2, 5)) == (6, 5, 2)
    tree = {"a": [jnp.ones(1), jnp.ones(2)], "b": jnp.ones(3)}
    assert list(flatten(hollow(tree, {"a/1"}))) == ["a/1"]
