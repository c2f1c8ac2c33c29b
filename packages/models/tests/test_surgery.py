"""Changes to a model that is there: the old one stays, and what was not meant stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from styrax.core import DEFAULT_RULES, UserError, tree
from styrax.core.mesh import MeshConfig, shardings
from styrax.models import Arch, Attn, Head
from styrax.models.layers.norm import Norm
from styrax.models.surgery import Frozen, drop_mtp, freeze, graft, keep_layers, swap, thaw, tie, untie
from styrax.models.view import leaves, view

PATTERN = Arch(local=Attn(window=4), layers=("local", "local", "attn"))


def test_swap_arrays_and_modules(build, run, tokens):
    model = build()
    before = run(model, tokens)
    scale = jnp.full(24, 3.0)
    norm = Norm(24, model.config.arch.norm, policy=model.policy)
    by_array, by_module = swap(model, {"final_norm/scale": scale}), swap(model, {"final_norm": norm})
    ratio = 3.0 / np.asarray(model.final_norm.scale[...])
    np.testing.assert_array_equal(by_array.final_norm.scale[...], scale)
    np.testing.assert_array_equal(by_module.final_norm.scale[...], jnp.ones(24))
    np.testing.assert_array_equal(run(model, tokens), before)
    assert not np.allclose(run(by_array, tokens), before) and not np.allclose(ratio, 1)


def test_swap_says_all_that_is_wrong(build):
    with pytest.raises(UserError) as caught:
        swap(
            build(),
            {
                "final_norm/scal": jnp.ones(24),
                "final_norm/scale": jnp.ones(23),
                "embed/embedding": jnp.ones((23, 24), "bfloat16"),
                "final_norm": jnp.ones(24),
            },
        )
    text = str(caught.value)
    assert "final_norm/scal: there is nothing (did you mean 'final_norm/scale'?)" in text
    assert "final_norm/scale: expected float32[24], got float32[23]" in text
    assert "embed/embedding: expected float32[23, 24], got bfloat16[23, 24]" in text
    assert "final_norm: expected a module, got an array" in text


def test_what_is_frozen_is_not_trained(build, tokens):
    model = build(arch=PATTERN, num_layers=6, scan="off")
    cold = freeze(model, "embed/**", "layers/0/attn/**")
    assert isinstance(cold.embed.embedding, Frozen) and isinstance(model.embed.embedding, nnx.Param)
    graph, params, rest = nnx.split(cold, nnx.Param, ...)
    tx = optax.adamw(0.1)
    state = tx.init(params)
    assert len(jax.tree.leaves(state)) == 1 + 2 * len(jax.tree.leaves(params))

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: (nnx.merge(graph, params, rest)(tokens) ** 2).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, _ = step(params, state)
    new, old = tree.flatten(nnx.merge(graph, params, rest)), tree.flatten(model)
    same = {path for path in old if np.array_equal(old[path], new[path])}
    assert same == {path for path in old if path.startswith(("embed/", "layers/0/attn/"))}
    warm = thaw(cold, "layers/**")
    assert isinstance(warm.embed.embedding, Frozen)
    assert isinstance(warm.layers[0].attn.q.kernel, nnx.Param)
    with pytest.raises(UserError, match=r"freeze: 'embd/\*\*' matches no parameter"):
        freeze(model, "embd/**")
    with pytest.raises(UserError, match=r"thaw: 'layers/\*\*' matches no frozen array"):
        thaw(warm, "layers/**")


def test_tie_and_untie(build, run, tokens):
    model = build()
    apart = untie(model)
    np.testing.assert_allclose(run(apart, tokens), run(model, tokens), atol=1e-5)
    assert apart.head.kernel.shape == (24, 23)
    again = tie(apart)
    np.testing.assert_array_equal(run(again, tokens), run(model, tokens))
    other = tie(swap(apart, {"head/kernel": jnp.ones((24, 23))}), keep="head")
    np.testing.assert_array_equal(other.embed.embedding[...], jnp.ones((23, 24)))
    assert isinstance(untie(freeze(model, "final_norm/scale")).final_norm.scale, Frozen)
    for wrong in (lambda: untie(apart), lambda: tie(model), lambda: tie(apart, keep="both")):
        with pytest.raises(UserError):
            wrong()


def test_layers_that_are_kept_are_the_layers_that_were(build, run, tokens):
    """A model of layers 1, 2, 4 and 5 in a row against running just these by hand."""
    model = build(arch=PATTERN, num_layers=6, scan="on")
    kept = keep_layers(model, [1, 2, 4, 5])
    assert [kind.mixer for kind in kept.config.kinds] == ["local", "attn", "local", "attn"]
    scope = model.scope(jnp.asarray(tokens), None, None, None)
    x = model.embed(jnp.asarray(tokens))
    stacks, index = model.config.plan[0], 0
    for layer in (1, 2, 4, 5):
        number, index = next((n, each.layers.index(layer)) for n, each in enumerate(stacks) if layer in each.layers)
        block = jax.tree.map(lambda leaf, index=index: leaf[index], model.layers[number])
        x = block(x, None, scope=scope, layer=layer, index=index, key=None)[0]
    np.testing.assert_allclose(run(kept, tokens), model.logits(model.final_norm(x)), atol=2e-5)
    np.testing.assert_array_equal(run(keep_layers(model, range(6)), tokens), run(model, tokens))
    with pytest.raises(UserError, match=r"numbers from 0 to 5, got \[0, 6\]"):
        keep_layers(model, [0, 6])
    with pytest.raises(UserError, match="got \\[\\]"):
        keep_layers(model, [])


def test_heads_come_and_go(build, run, tokens):
    old = build()
    new = build(seed=1, arch=Arch(head=Head(mtp=1)))
    found = graft(new, old)
    assert set(found.taken) == tree.flatten(old).keys()
    assert found.kept and all(path.startswith("mtp/") for path in found.kept)
    np.testing.assert_array_equal(run(found.model, tokens), run(old, tokens))
    bare = drop_mtp(found.model)
    assert tree.flatten(bare).keys() == tree.flatten(old).keys() and bare.config == old.config
    np.testing.assert_array_equal(run(bare, tokens), run(old, tokens))
    assert set(graft(new, old, only="layers/**").taken) == {
        path for path in tree.flatten(old) if path.startswith("layers/")
    }
    with pytest.raises(UserError, match="no array that matches"):
        graft(new, old, only="nothing/**")
    with pytest.raises(UserError, match="no multi-token prediction"):
        drop_mtp(old)


def test_a_view_says_where_arrays_lie(build):
    model = freeze(build(), "embed/**")
    mesh = MeshConfig(axes={"data": 2, "fsdp": 2, "tensor": 2}).build()
    rules = {**DEFAULT_RULES, "vocab": ()}
    places = shardings(model, model.config.logical_axes(), rules, mesh)
    placed = jax.device_put(model, places)
    found = {leaf.path: leaf for leaf in leaves(placed)}
    up = found["layers/mlp/up/kernel"]
    assert up.sharding == "-, fsdp, tensor" and up.share * 4 == up.bytes == 2 * 24 * 40 * 4
    assert found["embed/embedding"].kind == "Frozen" and up.kind == "Param"
    text = view(placed)
    assert "layers/mlp/up/kernel" in text and "[2, 24, 40]" in text and "-, fsdp, tensor" in text
    assert f"{sum(leaf.share for leaf in found.values()):,} of them on each device" in text
    shapes = nnx.eval_shape(lambda: model.config.build(vocab_size=23, rngs=nnx.Rngs(0)))
    assert {leaf.sharding for leaf in leaves(shapes)} == {"n/a"} and "n/a of them on each device" in view(shapes)
