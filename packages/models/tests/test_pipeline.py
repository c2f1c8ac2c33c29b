"""Layers over stages: what one device computes, whatever the microbatches and however often they go round."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from styrax.core import DEFAULT_RULES, UserError, tree
from styrax.core.mesh import MeshConfig, shardings, spec
from styrax.models import Arch, Attn, Head, MoE, Runtime
from styrax.models.layers.meshes import mesh_of
from styrax.models.pipeline import Schedule, schedule

RULES = {**DEFAULT_RULES, "vocab": (), "kv_heads": ()}
ROWS, SEQ = 8, 10
PATTERN = Arch(local=Attn(window=4), layers=("local", "attn"))
SPARSE = Arch(moe=MoE(num_experts=4, experts_per_token=2, expert_dim=8), head=Head(mtp=1))


def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 23, (ROWS, SEQ + 1))
    segments = np.ones((ROWS, SEQ), np.int32)
    segments[1, 4:] = 2
    for row in range(2, ROWS):
        segments[row, SEQ - row // 2 :] = 0
    mask = (segments != 0).astype(np.float32)
    return jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:]), jnp.asarray(mask), jnp.asarray(segments)


def gradient(model, where=None):
    """Loss, its terms, and gradients by path."""
    ids, targets, mask, segments = batch()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def objective(params):
        terms = nnx.merge(graph, params, rest).losses(ids, targets, mask, segment_ids=segments)
        total = sum(term.coef * term.total / jnp.maximum(term.weight, 1) for term in terms.values())
        return total, {name: (term.total, term.weight) for name, term in terms.items()}

    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (value, terms), grads = run(params)
    return value, terms, tree.flatten(grads)


def on_mesh(model, axes):
    mesh = MeshConfig(axes=axes).build()
    return mesh, jax.device_put(model, shardings(model, model.config.logical_axes(), RULES, mesh))


def same(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for name, sums in expected[1].items():
        np.testing.assert_allclose(got[1][name], sums, rtol=1e-5, atol=1e-6, err_msg=name)
    for path, leaf in expected[2].items():
        bound = 2e-5 * max(float(jnp.abs(leaf).max()), 1e-3)
        np.testing.assert_allclose(got[2][path], leaf, atol=bound, err_msg=path)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_each_device_has_the_loss_of_its_own_rows(build, kind):
    model = build(num_layers=2, runtime=Runtime(microbatches=1, schedule=kind))
    mesh, placed = on_mesh(model, {"data": 4, "stage": 2})
    rows = jax.device_put(batch(), NamedSharding(mesh, spec(("batch", None), RULES, mesh)))

    def loss(model, rows):
        term = model.losses(*rows[:3], segment_ids=rows[3])["loss"]
        return term.total / term.weight

    with jax.set_mesh(mesh):
        text = jax.jit(nnx.grad(loss)).lower(placed, rows).compile().as_text()
    logits = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+),23\]", text)}
    tokens = {math.prod(shape) for shape in logits} - {model.config.embed_dim}
    assert tokens == {ROWS * SEQ // 8}


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        pytest.param({"data": 2, "stage": 4}, {"num_layers": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"stage": 2, "fsdp": 2, "tensor": 2},
            {"num_layers": 4, "arch": PATTERN, "remat": "block"},
            marks=pytest.mark.slow,
        ),
        ({"stage": 2, "data": 4}, {"num_layers": 4, "runtime": Runtime(microbatches=2, repeats=2)}),
        pytest.param({"stage": 2, "expert": 2, "data": 2}, {"num_layers": 2, "arch": SPARSE}, marks=pytest.mark.slow),
    ],
    ids=["gpipe", "cycles of layers and tensor", "interleaved", "experts and mtp"],
)
def test_stages_are_one_device(build, axes, changes):
    model = build(**changes)
    expected = gradient(model)
    mesh, placed = on_mesh(model, axes)
    with jax.set_mesh(mesh):
        same(gradient(placed), expected)


def test_stages_send_to_their_neighbours_and_keep_their_layers(build):
    """A device holds its share of the layers, and the program sends activations round a ring."""
    model = build(num_layers=8)
    mesh, placed = on_mesh(model, {"stage": 8})
    kernel = placed.layers.mlp.up.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 24, 40)
    ids = batch()[0]
    with jax.set_mesh(mesh):
        text = jax.jit(lambda model: model(ids)).lower(placed).compile().as_text()
    assert "collective-permute" in text
    gathered = [line for line in text.splitlines() if " all-gather(" in line and "f32[8,24,40]" in line]
    assert not gathered


def test_what_does_not_divide_is_said_at_once(build):
    mesh = MeshConfig(axes={"stage": 4, "data": 2}).build()
    with jax.set_mesh(mesh):
        here = mesh_of(jnp.ones(2))
        segments = build(num_layers=6).config.plan[1]
        with pytest.raises(UserError) as caught:
            schedule(Runtime(microbatches=3, repeats=2), segments, 8, here)
        found = schedule(Runtime(), build(num_layers=8).config.plan[1], 64, here)
    text = str(caught.value)
    assert "multiple of stages * repeats = 4 * 2 times, got 6 x 1 layers" in text
    assert "runtime.microbatches: expected a divisor of 4 rows on each device, got 3" in text
    assert "as many microbatches as stages, 4, got 3" in text
    assert found == Schedule(stages=4, microbatches=8, repeats=1)
    assert found.ticks == 11 and found.bubble == pytest.approx(3 / 11)
    assert Schedule(4, 8, 4).bubble == pytest.approx(3 / 35)
