"""Experts on many devices: what one device computes, by an exchange of all with all."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import Policy, tree
from styrax.core.mesh import DEFAULT_RULES, MeshConfig, shardings
from styrax.models.layers import exchange
from styrax.models.layers.moe import Mixture
from styrax.models.layers.router import best
from styrax.models.moe_config import MoE, Routing, Shared

DIM, BATCH, SEQ = 8, 8, 6
CONFIGS = {
    "dropless": MoE(num_experts=8, experts_per_token=3, expert_dim=4, shared=Shared(dim=6)),
    "biased": MoE(num_experts=8, experts_per_token=2, expert_dim=4, expert_bias=True, routing=Routing(bias=True)),
    "scaled input": MoE(num_experts=8, experts_per_token=2, expert_dim=4, input_scaled=True),
    # As many places as choices: nothing is dropped, on however many devices.
    "capacity": MoE(num_experts=8, experts_per_token=2, expert_dim=4, dispatch="capacity", capacity_factor=8.0),
}
MESHES = ({"expert": 8}, {"data": 2, "expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 4, "context": 2})


def make(config):
    layer = Mixture(DIM, config, std=0.5, residual_std=0.5, policy=Policy(), key=jax.random.key(0))
    rng = np.random.default_rng(0)
    return tree.map_with_path(lambda path, leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype), layer)


def batch():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(BATCH, SEQ, DIM)), "float32")
    return x, jnp.asarray(rng.uniform(size=(BATCH, SEQ)) > 0.2)


def objective(layer, x, mask):
    y, stats = layer(x, mask=mask, batch=BATCH)
    return jnp.sum(jnp.sin(y)), (y, stats)


def gradient():
    return jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))


def on_mesh(axes, layer, x, mask):
    mesh = MeshConfig(axes=axes).build()
    where = shardings(layer, layer.config.logical_axes(), {**DEFAULT_RULES, "embed": ("fsdp",)}, mesh)
    rows = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec([a for a in axes if a in DEFAULT_RULES["batch"]])
    )
    return mesh, (jax.device_put(layer, where), jax.device_put(x, rows), jax.device_put(mask, rows))


def same(got, expected):
    left, right = tree.flatten(got), tree.flatten(expected)
    assert left.keys() == right.keys()
    for path, leaf in right.items():
        bound = 2e-5 * max(float(jnp.abs(leaf).max()), 1e-3)
        np.testing.assert_allclose(left[path], leaf, atol=bound, err_msg=path)


@pytest.mark.parametrize("axes", [MESHES[1]], ids=str)
@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_many_devices_are_one(name, axes):
    """Result, statistics, and the gradients of experts, router and input."""
    layer, (x, mask) = make(CONFIGS[name]), batch()
    expected = gradient()(layer, x, mask)
    mesh, placed = on_mesh(axes, layer, x, mask)
    with jax.set_mesh(mesh):
        same(gradient()(*placed), expected)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_on_every_mesh(name, axes):
    test_many_devices_are_one(name, axes)


def test_tokens_are_exchanged_and_not_gathered():
    """Nothing of the size of all tokens is on one device; experts stay where they are."""
    config = MoE(num_experts=8, experts_per_token=2, expert_dim=4, dispatch="capacity")
    layer, (x, mask) = make(config), batch()
    mesh, placed = on_mesh({"expert": 8}, layer, x, mask)
    with jax.set_mesh(mesh):
        text = jax.jit(lambda *given: objective(*given)[0]).lower(*placed).compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) >= 2
    gathered = [
        int(np.prod([int(n) for n in shape.split(",")]))
        for shape in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text)
    ]
    assert all(size < BATCH * SEQ * DIM for size in gathered)


def test_a_mesh_without_experts_sorts_where_tokens_are():
    layer, (x, mask) = make(CONFIGS["dropless"]), batch()
    mesh, placed = on_mesh({"fsdp": 8}, layer, x, mask)
    with jax.set_mesh(mesh):
        text = jax.jit(lambda *given: objective(*given)[0]).lower(*placed).compile().as_text()
    assert "all-to-all" not in text
    sorts = re.findall(r"s32\[(\d+)\]\S*\) sort\(|s32\[(\d+)\]\S* sort\(", text)
    assert sorts and all(int(a or b) <= BATCH * SEQ * 3 // 8 for a, b in sorts)


def whole_blocks(x, target, starts, counts, offsets, arriving, *, axis_name):
    """What `jax.lax.ragged_all_to_all` promises, from the documentation: by gathering everything."""
    me = jax.lax.axis_index(axis_name)
    every = [jax.lax.all_gather(each, axis_name) for each in (x, starts, counts, offsets)]
    out = target
    for source in range(len(counts)):
        rows, begin, count, offset = (each[source] for each in every)
        place = jnp.arange(len(target)) - offset[me]
        inside = (place >= 0) & (place < count[me])
        taken = rows[jnp.clip(begin[me] + place, 0, len(rows) - 1)]
        out = jnp.where(inside[:, None], taken, out)
    return out


def test_only_what_there_is_is_sent_on_an_accelerator(monkeypatch):
    """The form of TPUs and GPUs, with the exchange that a CPU lacks done by hand."""
    layer, (x, mask) = make(CONFIGS["dropless"]), batch()
    expected = gradient()(layer, x, mask)
    mesh, placed = on_mesh({"data": 2, "expert": 4}, layer, x, mask)
    monkeypatch.setattr(exchange, "platform", lambda *_: "tpu")
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", whole_blocks)
    with jax.set_mesh(mesh):
        same(gradient()(*placed), expected)


def test_capacity_drops_on_each_device_what_finds_no_place_there():
    """Every device gives each expert as many places; all choices are counted, kept or dropped."""
    config = MoE(num_experts=4, experts_per_token=2, expert_dim=4, dispatch="capacity", capacity_factor=0.5)
    layer, (x, mask) = make(config), batch()
    mesh, placed = on_mesh({"expert": 4, "data": 2}, layer, x, mask)
    with jax.set_mesh(mesh):
        _, (_, stats) = jax.jit(objective)(*placed)
    choices = np.asarray(jax.lax.top_k(x.reshape(-1, DIM) @ layer.router.kernel[...], 2)[1]).reshape(BATCH, SEQ, 2)
    dropped = 0
    for device in range(8):  # one row each
        count = np.bincount(choices[device][np.asarray(mask[device])].reshape(-1), minlength=4)
        dropped += np.maximum(count - int(0.5 * SEQ * 2 / 4), 0).sum()
    assert float(stats.dropped) == dropped > 0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from([0.0, 1.0, 2.5, -3.0]), min_size=4, max_size=9))
def test_the_best_on_a_mesh_are_the_best(k, row):
    """The first of equal ones too, by numpy's stable sort."""
    x = jnp.asarray([row, row[::-1]])
    with jax.set_mesh(MeshConfig(axes={"data": 2, "expert": 4}).build()):
        values, places = best(x, k)
    order = np.argsort(-np.asarray(x), axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(x), order, -1))
