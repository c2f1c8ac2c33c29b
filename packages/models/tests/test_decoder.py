import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.core import DEFAULT_RULES, MeshConfig, Policy, UserError, mesh, tree
from styrax.core.testing import check_decoder
from styrax.models import DecoderConfig
from styrax.models.config import Scales


class Compiled:
    """A model whose calls are compiled, for `check_decoder`."""

    def __init__(self, model, run):
        self.model, self.run = model, run
        self.init_cache = model.init_cache

    def __call__(self, tokens, **given):
        return self.run(self.model, tokens, **given)


@pytest.mark.parametrize(
    "changes",
    [{"scan": "on", "tied": False}, {"num_kv_heads": 1, "head_dim": 10}],
)
def test_conforms(build, changes, run):
    model = build(**changes)
    check_decoder(Compiled(model, run), model.vocab_size)


def test_conforms_in_bfloat16(build, run):
    model = build("bf16")
    check_decoder(Compiled(model, run), model.vocab_size, tolerance=0.5)


def test_documents_do_not_see_each_other(build, tokens, packed, run):
    model = build()
    logits = run(model, tokens, **packed)
    alone = run(model, tokens[:1, 5:9])
    np.testing.assert_allclose(logits[0, 5:9], alone[0], atol=1e-4)
    np.testing.assert_allclose(logits[1], run(model, tokens[1:])[0], atol=1e-4)
    without = run(model, tokens, segment_ids=packed["segment_ids"])  # only distances matter
    np.testing.assert_allclose(without[0, :9], logits[0, :9], atol=1e-4)


def test_padding_has_finite_gradients(build, tokens, packed):
    def loss(model):
        return (model(tokens, **packed) * (packed["segment_ids"] != 0)[..., None]).sum()

    grads = tree.flatten(jax.jit(jax.grad(loss))(build()))
    assert all(jnp.isfinite(grad).all() and (grad != 0).any() for grad in grads.values())


@pytest.mark.parametrize(
    ("policy", "param", "output"),
    [
        ("f32", "float32", "float32"),
        ("bf16", "float32", "float32"),
        ("params=bf16,compute=bf16,output=bf16", "bfloat16", "bfloat16"),
        ("params=bf16,compute=f32,output=f32", "bfloat16", "float32"),
    ],
)
def test_policy(build, tokens, policy, param, output, run):
    model = build(policy, tied=False)
    assert {str(leaf.dtype) for leaf in tree.flatten(model).values()} == {param}
    logits = run(model, tokens)
    assert logits.dtype == output
    wide = {path: leaf.astype("float32") for path, leaf in tree.flatten(model).items()}
    exact = run(tree.unflatten(build(tied=False), wide), tokens)
    np.testing.assert_allclose(logits.astype("float32"), exact, atol=0.06 * np.abs(exact).max())
    cache = model.init_cache(1, 4)
    assert cache.parts[0].keys.dtype == Policy.parse(policy).compute


def test_bfloat16_products_are_bfloat16(build, tokens):
    """Forward and backward: a float32 operand would make a product several times slower."""
    model = build("bf16", scan="on", remat="none")
    text = jax.jit(jax.grad(lambda model: (model(tokens) ** 2).sum())).lower(model).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3 * (7 + 2 + 1)
    # The scores' cotangent is float32, and rounded by the product itself, as its algorithm says.
    wide = [line for line in products if "xbf16>, tensor" not in line]
    assert len(wide) == 2
    assert all("lhs_precision_type = bf16" in line for line in wide)


def test_dropout_needs_rngs_and_is_a_function_of_the_key(build, tokens, run):
    model = build(dropout=0.2)

    @jax.jit
    def dropped(model, key):
        return model(tokens, rngs=nnx.Rngs(dropout=key))

    plain = run(model, tokens)
    assert (plain == run(build(), tokens)).all()
    one, again, two = (dropped(model, jax.random.key(seed)) for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != plain).any()
    assert (one != two).any()
    with_rngs = jax.jit(lambda model: model(tokens, rngs=nnx.Rngs(0)))(build())
    assert (with_rngs == plain).all()


@pytest.mark.parametrize("token", [-1, 23])
def test_a_token_outside_the_vocabulary_makes_its_row_nan(build, token, run):
    logits = run(build(), np.array([[0, token], [1, 2]], np.int32))
    assert jnp.isnan(logits[0, 1]).all()
    assert jnp.isfinite(logits[1]).all()


def test_what_stands_at_padding_reaches_nobody(build):
    ids = jnp.array([[1, 1, 0, 0]])
    run = jax.jit(lambda model, tokens: model(tokens, segment_ids=ids))
    wanted = run(build(), jnp.array([[3, 4, 5, 6]]))
    got = run(build(), jnp.array([[3, 4, -100, 999]]))
    assert (got[:, :2] == wanted[:, :2]).all()
    assert jnp.isfinite(got).all()


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ({"tokens": jnp.zeros(3, int)}, [r"tokens: expected \[batch, seq\], neither of them 0, got \[3\]"]),
        ({"tokens": jnp.zeros((1, 0), int)}, [r"got \[1, 0\]"]),
        ({"tokens": jnp.zeros((1, 3))}, ["tokens: expected an integer dtype, got float32"]),
        (
            {"tokens": jnp.zeros((2, 3), int), "positions": jnp.zeros((2, 4), int), "segment_ids": jnp.ones(3)},
            [r"positions: expected the shape of tokens, \[2, 3\], got \[2, 4\]", "segment_ids: expected an integer"],
        ),
    ],
)
def test_wrong_shapes_are_reported_together(build, arguments, messages):
    with pytest.raises(UserError) as caught:
        build()(arguments.pop("tokens"), **arguments)
    for message in messages:
        caught.match(message)


def test_state_is_parameters_only(build):
    model = build(dropout=0.1)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert not tree.flatten(rest)
    assert tree.flatten(params).keys() == DecoderConfig(tied=True).logical_axes().keys()
    hash(graphdef)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.as_pure(params)))


@pytest.mark.slow
def test_initialises_eagerly_abstractly_and_compiled_into_shards(run):
    config = DecoderConfig(num_layers=8, embed_dim=64, num_heads=4, tied=False)

    def init(key):
        model = config.build(vocab_size=500, rngs=nnx.Rngs(params=key))
        return nnx.as_pure(nnx.split(model, nnx.Param, ...)[1])

    abstract = jax.eval_shape(init, jax.random.key(0))
    devices = MeshConfig(axes={"fsdp": -1, "tensor": 1}).build(jax.devices()[:1])
    shardings = mesh.shardings(abstract, config.logical_axes(), DEFAULT_RULES, devices)
    compiled = tree.flatten(jax.jit(init, out_shardings=shardings)(jax.random.key(0)))
    model = config.build(vocab_size=500, rngs=nnx.Rngs(0))
    assert tree.flatten(model).keys() == compiled.keys() == tree.flatten(abstract).keys()
    for path, leaf in tree.flatten(model).items():
        assert compiled[path].shape == tree.flatten(abstract)[path].shape
        if path.endswith("scale"):
            assert (leaf == 1).all()
        else:
            residual = "/o/" in path or "/down/" in path
            np.testing.assert_allclose(leaf.std(), 0.02 / (4 if residual else 1), rtol=0.05, err_msg=path)
            np.testing.assert_allclose(compiled[path].std(), leaf.std(), rtol=0.05, err_msg=path)
    kernel = model.layers.mlp.up.kernel[...]
    assert (kernel[0] != kernel[1]).any()
    assert np.abs(run(model, np.zeros((1, 4), np.int32))).max() < 2


def test_initial_values_by_scales():
    def deviations(**given):
        config = DecoderConfig(num_layers=3, embed_dim=96, num_heads=2, tied=False, scales=Scales(**given))
        leaves = tree.flatten(config.build(vocab_size=300, rngs=nnx.Rngs(0)))
        return {path: float(leaf.std()) for path, leaf in leaves.items() if not path.endswith("scale")}

    plain = deviations()
    scaled = deviations(init_std=0.5, hidden_init_mult=0.1, residual_init_mult=3.0)
    for path, std in scaled.items():
        writes = "/o/" in path or "/down/" in path
        expected = 0.5 * (0.1 if path.startswith("layers") else 1) * (3 if writes else 1)
        np.testing.assert_allclose(std, expected, rtol=0.05, err_msg=path)
        np.testing.assert_allclose(std / plain[path], expected / (0.02 / (6**0.5 if writes else 1)), rtol=1e-5)


def products(model, tokens):
    return str(jax.make_jaxpr(lambda model: model(tokens))(model)).count(" mul ")


def test_a_scale_of_one_is_no_product(build, tokens):
    plain = products(build(), tokens)
    same = Scales(attn_scale=build().config.head_width ** -0.5)
    assert str(jax.make_jaxpr(build(scales=same))(tokens)) == str(jax.make_jaxpr(build())(tokens))
    for scales, more in (({"embed_scale": 2.0}, 1), ({"logit_mult": 2.0}, 1), ({"residual_mult": 2.0}, 2 * 2)):
        assert products(build(scales=Scales(**scales)), tokens) == plain + more


def test_scales_keep_the_dtype_and_serve_a_cache(build, tokens, run):
    scales = Scales(embed_scale=3.0, attn_scale=0.7, residual_mult=0.4, logit_mult=0.5)
    model = build("params=bf16,compute=bf16,output=bf16", scales=scales)
    assert run(model, tokens).dtype == jnp.bfloat16
    model = build(scales=scales, scan="on")
    check_decoder(Compiled(model, run), model.vocab_size)


SHARDED = """
import jax, numpy as np
from flax import nnx
from styrax.core import DEFAULT_RULES, MeshConfig, mesh
from styrax.models import DecoderConfig

config = DecoderConfig(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, tied=False)

def init():
    return nnx.as_pure(nnx.split(config.build(vocab_size=8, rngs=nnx.Rngs(0)), nnx.Param, ...)[1])

graphdef = nnx.split(nnx.eval_shape(lambda: config.build(vocab_size=8, rngs=nnx.Rngs(0))), nnx.Param, ...)[0]
devices = MeshConfig(axes={"data": 1, "fsdp": 2, "tensor": 2}).build(jax.devices())
placed = mesh.shardings(jax.eval_shape(init), config.logical_axes(), DEFAULT_RULES, devices)
params = jax.jit(init, out_shardings=placed)()
assert params["layers"]["attn"]["q"]["kernel"].addressable_shards[0].data.shape == (2, 8, 8)
tokens = np.random.default_rng(0).integers(0, 8, (4, 6))

def loss(params, tokens):
    return (nnx.merge(graphdef, params)(tokens) ** 2).mean()

rows = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(("data", "fsdp")))
got, grad = jax.jit(jax.value_and_grad(loss))(params, jax.device_put(tokens, rows))
single, expected = jax.jit(jax.value_and_grad(loss))(jax.device_get(params), tokens)
np.testing.assert_allclose(got, single, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grad, expected)
"""


def run_alone(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_works_over_a_mesh():
    run_alone(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")


TREE_MODE = """
import jax, numpy as np
from flax import nnx
from styrax.core import tree
from styrax.models import DecoderConfig

config = DecoderConfig(num_layers=2, embed_dim=16, num_heads=2, dropout=0.1)
model = nnx.eval_shape(lambda: config.build(vocab_size=8, rngs=nnx.Rngs(0)))
model = tree.map_with_path(lambda path, leaf: np.full(leaf.shape, 0.1, "float32"), model)
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
tokens = np.zeros((1, 4), int)

def loss(params, key):
    return nnx.merge(graphdef, params, rest)(tokens, rngs=nnx.Rngs(dropout=key)).sum()

grads = jax.jit(jax.grad(loss))(nnx.as_pure(params), jax.random.key(0))
assert all(np.isfinite(leaf).all() for leaf in tree.flatten(grads).values())
assert len(list(model.generate([1], max_tokens=1))) == 1
"""


def test_works_in_tree_mode():
    run_alone(TREE_MODE, NNX_GRAPH_MODE="false", NNX_GRAPH_UPDATES="false")
