import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from styrax.core import UserError
from styrax.core.config import build
from styrax.core.testing import check_optimizer
from styrax.optim import WSD, AdamW, Cosine, Parameters, guard, metrics


def test_import_is_cheap():
    code = (
        "import sys, styrax.optim, styrax.optim.recipes as r; r.AdamW();"
        "print([m for m in ('jax', 'optax', 'numpy', 'flax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_exported():
    import styrax.optim

    assert all(getattr(styrax.optim, name) is not None for name in styrax.optim.__all__)


def test_same_as_the_optax_chain(model, gradients):
    params = other = model()
    recipe = AdamW(learning_rate=1e-2, schedule=WSD(warmup=3, decay=5))
    mine = recipe.build(jax.eval_shape(lambda: params), steps=20)
    mask = jax.tree.map(lambda _: False, params)
    mask["head"]["kernel"] = True
    mask["layers"]["attn"]["q"]["kernel"] = True
    mask["layers"]["mlp"]["up"]["kernel"] = True
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(WSD(warmup=3, decay=5).build(steps=20, peak=1e-2), b2=0.95, weight_decay=0.1, mask=mask),
    )
    state, reference = jax.jit(mine.init)(params), jax.jit(theirs.init)(params)
    step, other_step = jax.jit(mine.update), jax.jit(theirs.update)
    for seed in range(20):
        grads = gradients(params, seed)
        updates, state = step(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        updates, reference = other_step(grads, reference, other)
        other = jax.tree.map(jnp.add, other, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, other)


def test_resume_is_bit_exact(small, gradients):
    """Through flat numpy arrays, as a checkpoint holds them, and with a bad step in between."""
    params = small()
    recipe = AdamW(learning_rate=1e-2)

    def advance(params, state, seeds, tx):
        step = jax.jit(tx.update)
        for seed in seeds:
            grads = gradients(params, seed, size=float("inf") if seed == 2 else 1.0)
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    tx = recipe.build(params, steps=6)
    whole = advance(params, tx.init(params), range(6), tx)
    half = advance(params, tx.init(params), range(3), tx)
    saved = [np.asarray(x) for x in jax.tree.leaves(half)]
    again = recipe.build(jax.eval_shape(lambda: params), steps=6)
    structure = jax.tree.structure((params, jax.eval_shape(again.init, params)))
    resumed = advance(*jax.tree.unflatten(structure, map(jnp.asarray, saved)), range(3, 6), again)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(whole)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(resumed)
    ]
    assert float(recipe.metrics(resumed[1])["skipped"]) == 1.0


def test_resume_with_more_steps(small, gradients):
    """The state says where the run is, the number of steps says along which curve."""
    params = small()
    recipe = AdamW(learning_rate=1.0, schedule=Cosine(warmup=0, final=0.0))
    tx = recipe.build(params, steps=10)
    state = tx.init(params)
    for seed in range(10):
        _, state = tx.update(gradients(params, seed), state, params)
    _, state = recipe.build(params, steps=20).update(gradients(params, 10), state, params)
    assert float(recipe.metrics(state)["learning_rate"]) == pytest.approx(0.5, rel=1e-5)
    _, state = tx.update(gradients(params, 11), state, params)
    assert float(recipe.metrics(state)["learning_rate"]) == pytest.approx(0.0, abs=1e-6)


def test_multipliers(gradients):
    params = {"embed": jnp.ones((3, 2)), "w": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    grads = gradients(params, 0)
    base = AdamW(weight_decay=0.0)
    twice = dataclasses.replace(base, parameters=Parameters(lr_multipliers={"embed": 2.0, "vector": 0.0}))
    a, b = (r.build(params, steps=5) for r in (base, twice))
    one, _ = a.update(grads, a.init(params), params)
    two, _ = b.update(grads, b.init(params), params)
    np.testing.assert_allclose(two["embed"], 2 * one["embed"], rtol=1e-6)
    np.testing.assert_array_equal(two["w"], one["w"])
    assert not two["bias"].any()


def test_metrics_have_fixed_keys(small, gradients):
    params = small()
    recipe = AdamW()
    tx = recipe.build(params, steps=5)
    state = tx.init(params)
    first = recipe.metrics(state)
    assert set(first) == {"learning_rate", "grad_norm", "clip_scale", "skipped"}
    _, state = jax.jit(tx.update)(gradients(params, 0), state, params)
    after = jax.jit(recipe.metrics)(state)
    assert set(after) == set(first)
    assert all(x.dtype == jnp.float32 and x.shape == () for x in (*first.values(), *after.values()))
    assert float(after["grad_norm"] * after["clip_scale"]) == pytest.approx(1.0, rel=1e-6)


def test_metrics_inside_a_chain_and_nnx(small):
    params = small()
    tx = optax.chain(optax.identity(), AdamW().build(params, steps=5), optax.scale(1.0))
    assert len(metrics(tx.init(params))) == 4
    assert set(metrics(guard(optax.sgd(0.1)).init(params))) == {"grad_norm", "clip_scale", "skipped"}
    with pytest.raises(ValueError, match=r"found 0 in .*tuple.*; wrap the optimizer in guard"):
        metrics(optax.adam(0.1).init(params))
    twice = optax.chain(guard(optax.sgd(0.1)), guard(optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"found 2 in .*; give it the state of one of them"):
        metrics(twice.init(params))
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, AdamW().build(nnx.state(model, nnx.Param), steps=5), wrt=nnx.Param)
    assert len(metrics(optimizer.opt_state)) == 4


def test_conformance(small):
    params = small()
    check_optimizer(AdamW().build(params, steps=100), params)


def test_read_from_a_file_and_back():
    recipe = build(
        AdamW,
        {
            "learning_rate": 1e-3,
            "clip_norm": "none",
            "parameters": {
                "decay_roles": ["matrix"],
                "roles": {"extra/**": "matrix"},
                "lr_multipliers": {"embed": 0.5},
            },
            "schedule": {"kind": "wsd", "decay": 0.4},
        },
    )
    assert recipe.clip_norm is None
    assert recipe.schedule == WSD(decay=0.4)
    assert build(AdamW, dataclasses.asdict(recipe)) == recipe
    assert build(AdamW, dataclasses.asdict(AdamW())) == AdamW()


def test_errors():
    with pytest.raises(ValueError, match=r"b2 must be below 1, got 1.0"):
        AdamW(b2=1.0)
    with pytest.raises(UserError, match=r'roles.a: expected "matrix".*got "embd" .did you mean .embed.'):
        Parameters(roles={"a": "embd"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError) as caught:
        AdamW(learning_rate=-1, eps=float("nan"), clip_norm="x", weight_decay=float("inf"))  # pyright: ignore[reportArgumentType]
    assert str(caught.value).splitlines() == [
        "learning_rate: expected number >= 0.0, got -1",
        "weight_decay: expected number >= 0.0, got inf: numbers must be finite",
        'clip_norm: expected number >= 0.0 or "none", got "x"',
        "eps: expected number > 0.0, got nan: numbers must be finite",
    ]
    with pytest.raises(ValueError, match=r"steps=2\.5"):
        AdamW().build({"w": jnp.ones(1)}, steps=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="fits no parameter"):
        AdamW(parameters=Parameters(roles={"nowhere": "matrix"})).build({"w": jnp.ones(1)}, steps=1)
    with pytest.raises(ValueError, match="steps=0"):
        AdamW().build({"w": jnp.ones(1)}, steps=0)
