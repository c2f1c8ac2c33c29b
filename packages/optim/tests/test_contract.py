"""One contract for every optimizer: nothing drifts, nothing hides, nothing breaks, on any tree and dtype."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import CASES
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core.tree import flatten, unflatten
from styrax.optim import state_shardings
from styrax.optim.sharding import init

F32, BF16 = jnp.float32, jnp.bfloat16


def tree(dtype=F32):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.1, dtype)

    return {
        "embed": {"embedding": array(16, 8)},
        "head": {"kernel": array(8, 16), "bias": array(16)},
        "layers": {"mlp": {"kernel": array(2, 8, 8)}, "norm": {"scale": array(2, 8)}},
    }


def as_list(params):
    """The same leaves with a list of layers, whose paths have an index."""
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(2)]
    return {**params, "layers": layers}


def as_state(params):
    nnx = pytest.importorskip("flax.nnx")
    return nnx.State(jax.tree.map(nnx.Param, params))


#: The rest run in the second stage of CI: each compiles for some seconds.
NNX = ("adamw", "muon")
QUICK = ("adamw", "groups", "guarded optax", "lion", "muon", "schedule_free")
KINDS = {"dict": lambda params: params, "list": as_list, "nnx": as_state}


def signature(value):
    return {path: (x.shape, x.dtype) for path, x in flatten(value).items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_drifts(name, kind):
    """State after update has the structure, shapes and dtypes of init; traced and not run, so this is cheap."""
    every = list(itertools.product((F32, BF16), repeat=2))
    for dtype, grad_dtype in every if kind == "dict" else [(BF16, F32)]:
        params = jax.eval_shape(lambda dtype=dtype: KINDS[kind](tree(dtype)))
        grads = jax.eval_shape(lambda grad_dtype=grad_dtype: KINDS[kind](tree(grad_dtype)))
        tx = CASES[name](params)
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, grads, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert signature(after) == signature(state)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert {p: s for p, (s, _) in signature(updates).items()} == {p: s for p, (s, _) in signature(params).items()}
        slots = [d for _, d in signature(state).values() if jnp.issubdtype(d, jnp.floating)]
        assert BF16 not in slots or "optax" in name, "a moment in bfloat16 sticks"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_runs_scanned_and_stays_finite(name):
    """In one program: zero, rank-1 and heavy-tailed gradients one after another, as the carry of a scan."""
    params = tree()
    tx = CASES[name](params)
    rng = np.random.default_rng(1)
    zero = jax.tree.map(jnp.zeros_like, params)
    one = jax.tree.map(lambda x: jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape), params)
    heavy = jax.tree.map(lambda x: jnp.asarray(rng.standard_cauchy(x.shape), x.dtype), params)
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), zero, one, heavy, one, zero, heavy)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return (params, state), updates

    state = tx.init(params)
    for expected, got in zip(jax.tree.leaves(jax.eval_shape(tx.init, params)), jax.tree.leaves(state)):
        assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    scan = jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads))
    (after, end), updates = scan((params, state), grads)
    for path, x in {**flatten(after), **flatten(updates)}.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), path
    for path, x in flatten(end).items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            assert np.isfinite(np.asarray(x, np.float32)).all(), path
    # Stopped in the middle and gone on, bit for bit.
    half = jax.tree.map(lambda g: g[:3], grads), jax.tree.map(lambda g: g[3:], grads)
    carry, _ = scan((params, state), half[0])
    (again, _), _ = scan(jax.tree.map(jnp.asarray, jax.device_get(carry)), half[1])
    jax.tree.map(np.testing.assert_array_equal, again, after)


SPLIT = {"embed/embedding": ("a", "b"), "head/kernel": ("b", "a"), "layers/mlp/kernel": (None, "a", "b")}


@pytest.mark.parametrize("name", CASES)
def test_state_lies_as_its_parameters(name):
    """Sharded by the shapes alone, without compiling: every leaf like a parameter lies as that parameter."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = SPLIT
    shapes = flatten(jax.eval_shape(tree))
    params = tree()
    abstract = unflatten(
        params,
        {
            path: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*specs.get(path, ())))
            )
            for path, x in shapes.items()
        },
    )
    tx = CASES[name](params)
    found = flatten(state_shardings(tx, abstract))
    for path, x in flatten(jax.eval_shape(tx.init, abstract)).items():
        owner = next((p for p in specs if path.endswith(p) and shapes[p].shape == x.shape), None)
        # A matrix for each copy may happen to have the parameter's shape.
        if owner and not set(path.split("/")) & {
            "left",
            "right",
            "left_basis",
            "right_basis",
            "left_root",
            "right_root",
        }:
            assert found[path].spec == PartitionSpec(*specs[owner]), path


def steps(tx, params, state, grads):
    """Two updates under `jax.jit`, with nothing said about where the results are to lie."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state

    for g in grads:
        params, state = step(params, state, g)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_on_eight_devices(name, kind):
    """Parameters and state stay where `init` put them, and are what they are on one device."""
    host = tree()
    rng = np.random.default_rng(4)
    grads = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), host) for _ in range(2)]
    tx = CASES[name](host)
    expected, expected_state = steps(tx, host, tx.init(host), grads)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    where = {path: NamedSharding(mesh, PartitionSpec(*SPLIT.get(path, ()))) for path in flatten(host)}
    params, *grads = (jax.device_put(x, unflatten(host, where)) for x in (host, *grads))
    begun = init(tx, params)
    derived = jax.tree.leaves(state_shardings(tx, params))
    assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(jax.tree.leaves(begun), derived))
    got, state = steps(tx, params, begun, grads)
    for path, x in flatten(got).items():
        assert x.sharding.is_equivalent_to(where[path], x.ndim), path
        np.testing.assert_allclose(x, flatten(expected)[path], rtol=1e-4, atol=2e-5, err_msg=path)
    ends = flatten(expected_state)
    for (path, x), before in zip(flatten(state).items(), jax.tree.leaves(begun), strict=True):
        assert x.sharding.is_equivalent_to(before.sharding, x.ndim), (path, x.sharding, before.sharding)
        if jnp.issubdtype(x.dtype, jnp.floating) and "basis" not in path:
            np.testing.assert_allclose(x, ends[path], rtol=1e-3, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("name", [n if n in NNX else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_through_nnx_optimizer(name):
    """Two steps through `nnx.Optimizer`, whose init sees variables and whose update sees arrays, are those without."""
    nnx = pytest.importorskip("flax.nnx")

    def module(node):
        if not isinstance(node, dict):
            return nnx.Param(node)
        made = nnx.Module()
        for key, child in node.items():
            setattr(made, key, module(child))
        return made

    params = tree()
    model = module(params)
    tx = CASES[name](params)
    rng = np.random.default_rng(5)
    grads = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params) for _ in range(2)]
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, grads):
        state = nnx.state(model, nnx.Param)
        optimizer.update(model, unflatten(state, flatten(grads)))

    for g in grads:
        step(model, optimizer, g)
    expected, _ = steps(tx, params, tx.init(params), grads)
    got = flatten(nnx.state(model, nnx.Param))
    for path, x in flatten(expected).items():
        np.testing.assert_allclose(got[path], x, rtol=1e-5, atol=1e-6, err_msg=path)
