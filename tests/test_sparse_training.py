"""Models with experts, and others of several kinds of layers, through the training step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from styrax.core import tree
from styrax.models import DecoderConfig
from styrax.models.arch import Arch, Attn, Head
from styrax.models.config import Scales
from styrax.models.moe_config import MoE, Routing, Shared
from styrax.train import init_state, make_step, next_token_loss

SIZES = {"num_layers": 3, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 48}
MODEL = DecoderConfig(
    **SIZES,
    scan="on",
    scales=Scales(z_loss=1e-3, init_std=0.2),
    arch=Arch(
        local=Attn(window=5, qk_norm="head"),
        layers=("local", "attn"),
        moe=MoE(num_experts=4, experts_per_token=2, expert_dim=24, shared=Shared(dim=16), balance_coef=0.5),
        sparse=(False, True, True),
    ),
)


def batch_of(rows=8, seq=16):
    """Rows of unequal numbers of tokens, padding among them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 40, (rows, seq + 1))
    segments, mask = np.ones((rows, seq), np.int32), np.ones((rows, seq), np.float32)
    for row in range(rows):
        segments[row, seq - row :] = 0
    mask[::2, :5] = 0
    tokens, targets = ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)
    return {"tokens": tokens, "targets": targets, "loss_mask": mask * (segments != 0), "segment_ids": segments}


def step_of(accumulate):
    model = MODEL.build(vocab_size=40, rngs=nnx.Rngs(0))
    graph, state = init_state(model, optax.sgd(1.0), key=jax.random.key(0))
    step = jax.jit(make_step(graph, optax.sgd(1.0), next_token_loss, accumulate=accumulate))
    return state, step(state, batch_of())


@pytest.mark.parametrize("accumulate", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulation_changes_nothing(accumulate):
    """The losses of the router included, for they are sums over rows."""
    before, (whole, metrics) = step_of(1)
    _, (parts, again) = step_of(accumulate)
    for name in ("loss", "loss_term", "z_loss", "balance", "router_z", "router_entropy", "tokens"):
        np.testing.assert_allclose(again[name], metrics[name], rtol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(
        float(metrics["loss_term"] + 1e-3 * metrics["z_loss"] + 0.5 * metrics["balance"] + 0.001 * metrics["router_z"]),
        rel=1e-5,
    )
    assert float(metrics["tokens"]) == batch_of()["loss_mask"].sum()
    start = tree.flatten(before.params)
    left, right = tree.flatten(whole.params), tree.flatten(parts.params)
    for path, leaf in start.items():
        one, other = left[path] - leaf, right[path] - leaf
        assert float(jnp.abs(one).max()) > 0, path
        np.testing.assert_allclose(other, one, atol=2e-5 * float(jnp.abs(one).max()) + 1e-8, err_msg=path)


CORRECTED = DecoderConfig(
    **SIZES,
    scan="on",
    scales=Scales(init_std=0.2),
    arch=Arch(
        moe=MoE(
            num_experts=4,
            experts_per_token=1,
            expert_dim=24,
            routing=Routing(score="sigmoid", correction=True, correction_rate=0.02),
            balance_coef=0.0,
        ),
        sparse=(False, True, True),
        head=Head(mtp=1),
    ),
)


def corrections(variables):
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(variables).items() if path.endswith("correction")}


@pytest.mark.parametrize("accumulate", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_corrections_follow_the_load_of_the_whole_batch(accumulate):
    """One step moves each by the rate, towards where fewer than the mean went, in the layers and the block of MTP."""
    model, tx = CORRECTED.build(vocab_size=40, rngs=nnx.Rngs(0)), optax.sgd(0.1)
    batch = batch_of()
    parts = {name: batch[name] for name in ("tokens", "segment_ids")}
    (stats,) = model.hidden(model.blocks(), **parts).reports
    load = np.asarray(stats.load.sum(1))
    assert load.sum() == 2 * (batch["segment_ids"] != 0).sum() and len(set(load[0])) > 1
    graph, state = init_state(model, tx, key=jax.random.key(0))
    step = jax.jit(make_step(graph, tx, next_token_loss, accumulate=accumulate))
    state, _ = step(state, batch)
    found = corrections(state.variables)
    assert found.keys() == {"layers/1/moe/router/correction", "mtp/block/moe/router/correction"}
    expected = 0.02 * np.sign(load.mean(-1, keepdims=True) - load)
    np.testing.assert_allclose(found["layers/1/moe/router/correction"], expected, rtol=1e-6)
    assert np.abs(found["mtp/block/moe/router/correction"]).max() == pytest.approx(0.02)
    assert all(not leaf.any() for path, leaf in tree.flatten(state.variables).items() if path.endswith("load"))


def test_corrections_even_out_the_load():
    model, tx = CORRECTED.build(vocab_size=40, rngs=nnx.Rngs(0)), optax.sgd(0.0)
    batch = batch_of()
    graph, state = init_state(model, tx, key=jax.random.key(0))
    step = jax.jit(make_step(graph, tx, next_token_loss), donate_argnums=0)

    def spread(state):
        model = nnx.merge(graph, state.params, state.variables)
        (stats,) = model.hidden(model.blocks(), batch["tokens"], segment_ids=batch["segment_ids"]).reports
        return float(np.ptp(np.asarray(stats.load.sum(1)), axis=-1).max())

    before = spread(state)
    for _ in range(40):
        state, _ = step(state, batch)
    assert spread(state) < before / 2
