"""Activations that are told of each layer, against blocks that are called one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.core import Policy, UserError
from styrax.core.mesh import MeshConfig
from styrax.models import Arch, Attn, DecoderConfig
from styrax.models.activations import measure
from styrax.models.arch import MoE, Norm
from styrax.models.stack import in_order

PLAIN = DecoderConfig(num_layers=3, embed_dim=16, num_heads=2, mlp_dim=24)
NORMED = Arch(placement="both", norm=Norm(eps=1e-6))
EXPERTS = MoE(num_experts=4, experts_per_token=2, expert_dim=8)
MIXED = Arch(layers=("local", "attn"), local=Attn(window=2), moe=EXPERTS, sparse=(False, True))
CASES = {
    "plain": PLAIN,
    "normed": dataclasses.replace(PLAIN, arch=NORMED),
    "mixed": dataclasses.replace(PLAIN, num_layers=4, arch=MIXED),
}


def batch():
    """Two rows with two documents each, and padding, at which the model may make what it likes."""
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7)).astype(np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 0, 0, 0]], np.int32)
    return jnp.asarray(tokens), jnp.asarray(segments)


def reference(x, real):
    """The same numbers, in float64 and in plain steps."""
    x = np.asarray(x, np.float64).reshape(*real.shape, -1)[np.asarray(real)]
    finite = x[np.isfinite(x)]
    return {
        "rms": np.sqrt(np.mean(finite**2)), "max": np.abs(finite).max(), "zeros": np.mean(x == 0),
        "not_finite": np.mean(~np.isfinite(x)), "numbers": x.size,
    }  # fmt: skip


def by_hand(model, tokens, segments):
    """Call each block, and what is in it, in order; gives what its parts add and what leaves it, layer by layer."""
    scope = model.scope(tokens, None, segments, None)
    x = jnp.where((segments != 0)[..., None], model.embed(tokens), 0)
    x = x.reshape(-1, x.shape[-1])
    found = []
    for layer, block in enumerate(in_order(model.config.plan[0], model._stacks())):
        pre, post = block.placement != "post", block.placement != "pre"
        mixer, _ = block.attn(block.attn_norm(x) if pre else x, scope, layer, None)
        mixer = block.attn_post_norm(mixer) if post else mixer
        middle = x + mixer
        mlp, _ = block._mlp(block.mlp_norm(middle) if pre else middle, middle, scope)
        mlp = block.mlp_post_norm(mlp) if post else mlp
        x = middle + mlp
        found.append({"attn": mixer, "mlp": mlp, "": x})
    return found, model.final_norm(x)


told = nnx.jit(lambda model, tokens, **given: model.activations(tokens, **given))


@pytest.mark.parametrize("scan", ["on", "off"])
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_layers_called_one_by_one(name, scan):
    config = dataclasses.replace(CASES[name], scan=scan)
    model = config.build(vocab_size=11, rngs=nnx.Rngs(0))
    tokens, segments = batch()
    found = told(model, tokens, segment_ids=segments)
    layers, last = nnx.jit(by_hand)(model, tokens, segments)
    real, paths = segments != 0, {"final_norm"}
    for number, stack in enumerate(config.plan[0]):
        path = "layers" if config.uniform else f"layers/{number}"
        for part in ("attn", "mlp", ""):
            key = f"{path}/{'moe' if part == 'mlp' and stack.kind.sparse else part}".rstrip("/")
            assert found[key]["layer"].tolist() == list(stack.layers)
            for index, layer in enumerate(stack.layers):
                for stat, value in reference(layers[layer][part], real).items():
                    np.testing.assert_allclose(found[key][stat][index], value, rtol=2e-5, err_msg=f"{key} {stat}")
            paths.add(key)
    for stat, value in reference(last, real).items():
        np.testing.assert_allclose(found["final_norm"][stat], value, rtol=2e-5)
    assert paths == set(found)


def test_dropout_is_that_of_the_rows():
    config = dataclasses.replace(PLAIN, dropout=0.5)
    model = config.build(vocab_size=11, rngs=nnx.Rngs(0))
    tokens, _ = batch()
    whole = told(model, tokens, rngs=nnx.Rngs(dropout=1))
    parts = [told(model, tokens[i : i + 1], rngs=nnx.Rngs(dropout=1), row_ids=jnp.array([i])) for i in (0, 1)]
    halves = [np.asarray(part["layers"]["rms"], np.float64) for part in parts]
    np.testing.assert_allclose(whole["layers"]["rms"], np.sqrt((halves[0] ** 2 + halves[1] ** 2) / 2), rtol=1e-5)
    assert not np.allclose(whole["layers"]["rms"], told(model, tokens)["layers"]["rms"])


def test_numbers_that_are_not_finite_are_counted_from_the_layer_on_that_makes_them():
    model = dataclasses.replace(PLAIN, scan="on").build(vocab_size=11, rngs=nnx.Rngs(0))
    kernel = model.layers.mlp.down.kernel
    kernel[...] = kernel[...].at[1, 0, 0].set(jnp.nan)
    found = told(model, batch()[0])
    assert found["layers"]["not_finite"].tolist() == [0.0, 1 / 16, 1.0]
    assert found["layers/mlp"]["not_finite"].tolist() == [0.0, 1 / 16, 1.0]
    assert found["layers/attn"]["not_finite"].tolist() == [0.0, 0.0, 1.0]
    assert np.isfinite(found["layers"]["rms"]).all()


def test_a_large_number_has_a_finite_rms():
    found = measure(jnp.full((4, 4), 1e30, jnp.bfloat16))
    np.testing.assert_allclose(found["rms"], 1e30, rtol=1e-2)
    assert measure(jnp.zeros((2, 3)))["zeros"] == 1.0
    empty = measure(jnp.ones((2, 3)), jnp.zeros((1, 2), bool))
    assert (float(empty["rms"]), float(empty["numbers"])) == (0.0, 0.0)


def test_nobody_watching_leaves_the_program_as_it_is():
    """What is asked for is all there is: a call makes no square root but those of its norms."""
    model = dataclasses.replace(PLAIN, scan="on").build(vocab_size=11, rngs=nnx.Rngs(0))
    tokens, segments = batch()
    plain = jax.make_jaxpr(lambda tokens: model.hidden(model.blocks(), tokens).x)(tokens)
    watched = jax.make_jaxpr(lambda tokens: model.activations(tokens, segment_ids=segments))(tokens)
    assert "is_finite" not in str(plain) and "sqrt" not in str(plain).replace("rsqrt", "")
    assert "is_finite" in str(watched)


def test_on_a_mesh_and_in_bfloat16_they_are_the_same():
    policy = Policy("f32", "bf16", "f32")
    model = PLAIN.build(vocab_size=11, rngs=nnx.Rngs(0), policy=policy)
    tokens, segments = (jnp.tile(each, (4, 1)) for each in batch())
    alone = told(model, tokens, segment_ids=segments)
    mesh = MeshConfig(axes={"data": 8}).build()
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        tokens, segments = jax.device_put((tokens, segments), rows)
        found = told(model, tokens, segment_ids=segments)
    for path, stats in alone.items():
        for name, value in stats.items():
            np.testing.assert_allclose(np.asarray(found[path][name]), value, rtol=2e-2, err_msg=f"{path} {name}")


def test_a_pipeline_says_that_it_cannot():
    config = dataclasses.replace(PLAIN, num_layers=2, scan="on")
    model = config.build(vocab_size=11, rngs=nnx.Rngs(0))
    mesh = MeshConfig(axes={"stage": 2, "data": 4}).build()
    tokens = jnp.tile(batch()[0], (4, 1))
    with jax.set_mesh(mesh), pytest.raises(UserError, match="cannot be watched in a pipeline"):
        told(model, tokens)
