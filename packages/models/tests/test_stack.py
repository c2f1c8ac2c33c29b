"""The loop over layers: scanned and unrolled, kept and recomputed, on a CPU and elsewhere."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.core import tree
from styrax.models import unstack
from styrax.models.stack import stack


def with_config(model, **changes):
    """Give the same parameters another config."""
    other = dataclasses.replace(model.config, **changes)
    empty = nnx.eval_shape(lambda: other.build(vocab_size=model.vocab_size, rngs=nnx.Rngs(0), policy=model.policy))
    return tree.unflatten(empty, tree.flatten(model))


def loss(model, tokens, packed, key):
    rngs = None if key is None else nnx.Rngs(dropout=key)
    logits = model(tokens, **packed, rngs=rngs)
    weight = (packed["segment_ids"] != 0)[..., None]
    return (jax.nn.log_softmax(logits)[..., :3] * weight).mean()


def value_and_grad(model, tokens, packed, key):
    value, grad = jax.jit(jax.value_and_grad(loss))(model, tokens, packed, key)
    return value, tree.flatten(grad)


def is_recomputed(jaxpr):
    return "prevent_cse" in jaxpr  # a parameter of the primitive, which has changed its name


def test_stack_and_unstack():
    def make(key):
        return {"w": jax.random.normal(key, (2, 3)), "b": jnp.zeros(4)}

    key = jax.random.key(0)
    stacked = stack(make, 3, key)
    assert stacked["w"].shape == (3, 2, 3)
    for block, one in zip(unstack(stacked), jax.random.split(key, 3), strict=True):
        np.testing.assert_allclose(block["w"], make(one)["w"], rtol=1e-6)


def test_scanned_unrolled_kept_and_recomputed_are_the_same(build, tokens, packed):
    """The same elements are dropped too."""
    model = build(dropout=0.3, scan="off", remat="none")
    value, grad = value_and_grad(model, tokens, packed, jax.random.key(5))
    for scan, remat in (("on", "block"), ("off", "block")):
        changed = with_config(model, scan=scan, remat=remat)
        other_value, other = value_and_grad(changed, tokens, packed, jax.random.key(5))
        np.testing.assert_allclose(other_value, value, rtol=1e-5)
        assert other.keys() == grad.keys()
        for path, leaf in grad.items():
            np.testing.assert_allclose(other[path], leaf, atol=1e-5 * np.abs(leaf).max(), err_msg=path)


def test_the_gradient_of_the_unrolled_form_is_assembled_once(build, tokens, packed):
    """`array[i]` would give a sum of as many zero-padded arrays of full size as there are layers."""
    model = build(scan="off", remat="none")
    text = jax.jit(jax.grad(loss)).lower(model, tokens, packed, None).as_text()
    shapes = {leaf.shape for path, leaf in tree.flatten(model).items() if path.startswith("layers/")}
    assert len(shapes) == 5
    for shape in shapes:
        full = f"tensor<{'x'.join(map(str, shape))}xf32>"
        assert not re.search(rf"stablehlo\.(add|pad)\b.*{full}", text)
        assert f"-> {full}" in "".join(line for line in text.splitlines() if "concatenate" in line)


def test_form_on_a_cpu(build, tokens, packed):
    text = jax.jit(loss).lower(build(), tokens, packed, None).as_text()
    assert "stablehlo.while" not in text
    assert "stablehlo.optimization_barrier" in text
    assert "stablehlo.while" in jax.jit(loss).lower(build(scan="on"), tokens, packed, None).as_text()


@pytest.mark.parametrize("remat", ["none", "auto"])
def test_form_elsewhere(build, tokens, packed, remat, accelerator):
    traced = jax.jit(jax.grad(loss)).trace(build(remat=remat), tokens, packed, None)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.while" in text
    assert "optimization_barrier" not in text
    assert is_recomputed(str(traced.jaxpr)) == (remat == "auto")


def test_both_forms_give_the_same_logits(build, tokens, packed, monkeypatch):
    model = build()
    here = jax.jit(lambda: model(tokens, **packed))()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    there = jax.jit(lambda: model(tokens, **packed))()
    np.testing.assert_allclose(here, there, atol=1e-4)


@pytest.mark.parametrize(("remat", "recomputed"), [("auto", False), ("block", True), ("none", False)])
def test_recomputation_on_a_cpu(build, tokens, packed, remat, recomputed):
    model = build(num_layers=1, remat=remat)
    text = str(jax.make_jaxpr(jax.grad(loss))(model, tokens, packed, None))
    assert is_recomputed(text) is recomputed


def test_what_is_recomputed_on_a_cpu_is_not_kept(build):
    """Unrolled, it would be made early, and be there until it is needed."""
    tokens = jnp.zeros((8, 64), int)

    def temporaries(**changes):
        model = build(num_layers=6, **changes)
        objective = jax.grad(lambda model: jax.nn.log_softmax(model(tokens))[..., 0].mean())
        return jax.jit(objective).lower(model).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(remat="block") < temporaries(remat="none") / 2


def test_a_cache_keeps_layers_apart_on_a_cpu(build):
    model = build(num_layers=2, remat="block")
    assert len(model.blocks()) == 1
    assert len(model.blocks(cached=True)) == 2
    cache = model.init_cache(1, 8)
    text = jax.jit(lambda model, cache: model(jnp.zeros((1, 1), int), cache=cache)).lower(model, cache).as_text()
    assert "stablehlo.while" not in text
