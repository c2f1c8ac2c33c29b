"""Adaptive clipping against a loop over units, against optax on matrices, and on a mesh where optax cannot run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core import UserError
from styrax.core.tree import flatten
from styrax.optim import adamw, guard, specs, state_shardings
from styrax.optim.agc import agc

AXES = {"layers/attn/q/kernel": "sioo", "layers/attn/q/bias": "soo"}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def clip_unit(w, g, clipping, eps, scale=1.0):
    limit, norm = clipping * max(np.linalg.norm(w), eps), scale * np.linalg.norm(g)
    return g * (limit / norm if norm > limit else 1.0)


def twin(path, w, g, *rest):
    """One unit after another, by what the parameters of `model` are."""
    w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
    out = np.array(g)
    if path == "head/kernel":
        return g
    if path == "embed/embedding":
        units = [(row,) for row in range(w.shape[0])]
    elif path in ("layers/attn/q/kernel", "layers/mlp/up/kernel"):
        units = [(layer, slice(None), *place) for layer in range(2) for place in np.ndindex(w.shape[2:])]
    elif path.startswith("layers/"):
        units = [(layer,) for layer in range(2)]
    else:
        units = [...]
    for unit in units:
        out[unit] = clip_unit(w[unit], g[unit], *rest)
    return out


@pytest.mark.parametrize("guarded", [False, True])
def test_every_unit_is_held_to_its_own_norm(model, gradients, guarded):
    weights = model()
    weights["layers"]["mlp"]["up"]["kernel"] *= 1e-6  # `eps` counts
    tx = agc(optax.sgd(1.0), 0.1, 1e-2, specs=specs(weights, axes=AXES))
    tx = guard(tx, clip_norm=2.0) if guarded else tx
    for size in (0.02, 3.0):
        grads = gradients(weights, 1, size=size)
        grads["embed"]["embedding"] = grads["embed"]["embedding"].at[2].set(0.0)
        norm = float(np.linalg.norm(np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])))
        scale = min(1.0, 2.0 / norm) if guarded else 1.0
        updates, _ = tx.update(grads, tx.init(weights), weights)
        for path, u in flatten(updates).items():
            expected = scale * twin(path, flatten(weights)[path], flatten(grads)[path], 0.1, 1e-2, scale)
            np.testing.assert_allclose(-u, expected, rtol=1e-5, atol=1e-8, err_msg=path)


def test_as_optax_on_matrices_vectors_and_scalars():
    rng = np.random.default_rng(0)
    weights = {"w": {"kernel": rng.normal(size=(5, 3))}, "v": rng.normal(size=4), "s": rng.normal(size=())}
    weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), weights)
    mine, theirs = agc(optax.identity(), 0.3, specs=specs(weights)), optax.adaptive_grad_clip(0.3)
    got, _ = mine.update(grads, mine.init(weights), weights)
    expected, _ = theirs.update(grads, theirs.init(weights), weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def test_zeros_and_roles():
    weights = {"head": {"kernel": jnp.zeros((3, 2))}, "kernel": jnp.zeros((3, 2))}
    found = specs(weights)
    ones, zeros = jax.tree.map(jnp.ones_like, weights), weights
    for clipping in (0.0, 0.5):
        tx = agc(optax.identity(), clipping, specs=found)
        assert not any(np.any(u) for u in jax.tree.leaves(tx.update(zeros, tx.init(weights), weights)[0]))
        updates, _ = tx.update(ones, tx.init(weights), weights)
        assert np.all(updates["head"]["kernel"] == 1)
        np.testing.assert_allclose(updates["kernel"], clipping * 1e-3 / np.sqrt(3), rtol=1e-6)
        tx = agc(optax.identity(), clipping, specs=found, exclude=())
        updates, _ = tx.update(ones, tx.init(weights), weights)
        np.testing.assert_allclose(updates["head"]["kernel"], clipping * 1e-3 / np.sqrt(3), rtol=1e-6)


@pytest.mark.parametrize("inner", [lambda: adamw(1e-2), lambda: optax.adamw(1e-2)])
def test_a_skipped_step_keeps_every_bit(small, inner):
    weights = small(jnp.bfloat16)
    tx = guard(agc(inner(), specs=specs(weights)))
    update = jax.jit(tx.update)
    _, state = update(weights, tx.init(weights), weights)
    updates, after = update(jax.tree.map(lambda w: jnp.full_like(w, jnp.inf), weights), state, weights)
    assert bits(after.inner) == bits(state.inner)
    assert bits(optax.apply_updates(weights, updates)) == bits(weights)


def test_on_a_mesh_with_explicit_axes(model, gradients):
    """Also with the axis of layers sharded, where `optax.adaptive_grad_clip` raises."""
    weights = {"layers": {"mlp": {"kernel": jnp.ones((4, 8, 6))}, "norm": {"scale": jnp.ones((4, 8))}}}
    grads = gradients(weights, 0)
    tx = guard(agc(adamw(1e-2), 0.02, specs=specs(weights)))
    expected, _ = tx.update(grads, tx.init(weights), weights)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    for kernel, scale in ((("a", "b", None), ("a", None)), ((None, "a", "b"), (None, "b"))):
        where = {"mlp": {"kernel": PartitionSpec(*kernel)}, "norm": {"scale": PartitionSpec(*scale)}}
        where = jax.tree.map(lambda s: NamedSharding(mesh, s), {"layers": where})
        with jax.set_mesh(mesh):
            laid, g = (jax.tree.map(jax.device_put, tree, where) for tree in (weights, grads))
            state = jax.device_put(tx.init(weights), state_shardings(tx, laid))
            updates, after = jax.jit(tx.update)(g, state, laid)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)
        same = jax.tree.map(
            lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), (updates, after.inner.mu), (laid, laid)
        )
        assert jax.tree.all(same)


def test_mistakes(model):
    weights = model()
    with pytest.raises(
        UserError, match=r"agc:\n.*clipping.*\n.*eps.*\n.*exclude: 'heads' is no role \(did you mean 'head'"
    ):
        agc(adamw(1e-2), -1.0, 0.0, specs={}, exclude=("heads",))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"nothing for these parameters:\n  'embed/embedding'"):
        agc(adamw(1e-2), specs={}).init(weights)
    with pytest.raises(UserError, match=r"agc must know.*\n  'layers/attn/q/kernel'"):
        agc(adamw(1e-2), specs=specs(weights)).init(weights)
    tx = agc(optax.sgd(0.1), specs=specs(weights, axes=AXES))
    with pytest.raises(ValueError, match=r"`params` was not given or lacks 'embed/embedding', 'head/bias'"):
        tx.update(weights, tx.init(weights))
