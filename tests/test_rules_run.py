"""A run whose rules are other than the usual ones: what one device trains, over the axes that they name."""

import itertools
import re

import jax
import numpy as np
import optax
import pytest

from styrax.core import DEFAULT_RULES, MeshConfig, Policy, tree
from styrax.models import Arch, DecoderConfig, MoE
from styrax.train import Watch, compiled, fit

ROWS, SEQ, VOCAB = 8, 16, 32
MODEL = DecoderConfig(
    num_layers=2, embed_dim=16, num_heads=4, dropout=0.1, scan="on",
    arch=Arch(moe=MoE(num_experts=4, experts_per_token=2, expert_dim=16, balance_coef=0.3)),
)  # fmt: skip
RULES = {**DEFAULT_RULES, "batch": ("data", "fsdp"), "expert": ("fsdp",), "seq": ("tensor",), "vocab": ()}


def batches():
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    mask = np.ones((ROWS, SEQ), np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask}


def train(mesh=None, **given):
    def build(rngs):
        return MODEL.build(vocab_size=VOCAB, rngs=rngs, policy=Policy())

    # The update is the gradient.
    return fit(
        build, optax.sgd(1.0), itertools.repeat(batches()), steps=1, mesh=mesh, logical_axes=MODEL.logical_axes(),
        held_out=[batches()], hooks=[Watch("embed/**", activations=True, every=1)], **given,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_by_other_rules_is_one_device(monkeypatch):
    """Metrics, those of a watch and of an evaluation too, and the update."""
    texts = []

    def lower(*args):
        texts.append(lowered := plain(*args))
        return lowered

    plain, expected = compiled.lower_step, train()
    monkeypatch.setattr(compiled, "lower_step", lower)
    got = train(MeshConfig(axes={"data": 2, "fsdp": 2, "tensor": 2}).build(), rules=RULES)
    assert got.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    left, right = tree.flatten(got.state.params), tree.flatten(expected.state.params)
    for path, leaf in right.items():
        np.testing.assert_allclose(left[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path)
    (text,) = [each.as_text() for each in texts]
    exchanges = set(re.findall(r'"stablehlo.all_to_all"\(.*?replica_groups = dense<(.*?)> : tensor', text))
    sends = set(re.findall(r'"stablehlo.collective_permute"\(.*?source_target_pairs = dense<(.*?)> : tensor', text))
    pairs = {tuple(map(int, pair)) for each in sends for pair in re.findall(r"\[(\d), (\d)\]", each)}
    assert exchanges == {"[[0, 2], [1, 3], [4, 6], [5, 7]]"}  # fsdp is the second axis
    assert pairs and all(there // 2 == here // 2 for here, there in pairs)  # tensor is the last
    assert not jax.tree.leaves(got.state.params)[0].sharding.is_fully_replicated
