"""What must not change a step: how a batch is cut, how layers are run, on how many devices; all at once.

The model has everything that tends to get lost on the way: experts with their losses, multi-token prediction, dropout,
z-loss, and rows with unequal numbers of tokens.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from styrax.core import DEFAULT_RULES, tree
from styrax.core.mesh import MeshConfig
from styrax.models import Arch, DecoderConfig, Head, MoE, Runtime, Scales
from styrax.train import init_state, make_step, next_token_loss
from styrax.train.shardings import batch_sharding, state_shardings

ROWS, SEQ, VOCAB = 8, 8, 32
CONFIG = DecoderConfig(
    num_layers=4,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=32,
    dropout=0.25,
    scan="on",
    scales=Scales(z_loss=1e-2, init_std=0.2),
    arch=Arch(
        moe=MoE(num_experts=4, experts_per_token=2, expert_dim=16, balance_coef=0.3, z_coef=0.1), head=Head(mtp=1)
    ),
)
DENSE = dataclasses.replace(CONFIG, arch=Arch(head=Head(mtp=1)))
TX = optax.sgd(1.0)  # the update is the gradient


def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (ROWS, SEQ + 1))
    segments, mask = np.ones((ROWS, SEQ), np.int32), np.ones((ROWS, SEQ), np.float32)
    for row in range(ROWS):
        segments[row, SEQ - row :] = 0
    segments[1, 3:] = np.where(segments[1, 3:] > 0, 2, 0)
    mask[::2, :3] = 0
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "loss_mask": mask * (segments != 0),
        "segment_ids": segments,
    }


def step_of(config, *, accumulate=1, axes=None, given=None):
    """Take one step; gives the metrics and the gradient by path."""
    model = config.build(vocab_size=VOCAB, rngs=nnx.Rngs(0))
    graph, state = init_state(model, TX, key=jax.random.key(0))
    before = {path: np.asarray(leaf) for path, leaf in tree.flatten(state.params).items()}
    step = make_step(graph, TX, next_token_loss, accumulate=accumulate)
    data = batch() if given is None else given
    if axes is None:
        state, metrics = jax.jit(step)(state, data)
    else:
        mesh = MeshConfig(axes=axes).build()
        rules = {**DEFAULT_RULES, "kv_heads": ()}
        state = jax.device_put(state, state_shardings(state, mesh, config.logical_axes(), rules))
        data = jax.device_put(data, batch_sharding(mesh, rules))
        with jax.set_mesh(mesh):
            state, metrics = jax.jit(step)(state, data)
    after = tree.flatten(state.params)
    return {k: float(v) for k, v in metrics.items()}, {path: before[path] - np.asarray(after[path]) for path in before}


@pytest.fixture(scope="module")
def whole():
    return {name: step_of(config) for name, config in (("experts", CONFIG), ("dense", DENSE))}


def same(got, expected):
    for name, value in expected[0].items():
        assert got[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for path, leaf in expected[1].items():
        bound = 1e-5 * max(np.abs(leaf).max(), 1e-3) + 1e-7
        np.testing.assert_allclose(got[1][path], leaf, atol=2 * bound, err_msg=path)


def test_every_term_and_parameter_has_a_gradient(whole):
    metrics, gradient = whole["experts"]
    assert {"loss", "loss_term", "z_loss", "mtp_1", "balance", "router_z"} <= metrics.keys()
    assert not [path for path, leaf in gradient.items() if not np.abs(leaf).max() > 0]
    for field, changed in (
        ("z_loss", dataclasses.replace(CONFIG, scales=Scales(init_std=0.2))),
        ("mtp", dataclasses.replace(CONFIG, arch=dataclasses.replace(CONFIG.arch, head=Head(mtp=1, mtp_coef=0.0)))),
    ):
        other = step_of(changed)[1]
        assert any(np.abs(other[path] - leaf).max() > 1e-4 * np.abs(leaf).max() for path, leaf in gradient.items()), (
            field
        )


@pytest.mark.parametrize("accumulate", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulation_is_one_batch(whole, accumulate):
    """With dropout: a row draws by its number."""
    same(step_of(CONFIG, accumulate=accumulate), whole["experts"])


def test_unrolled_and_recomputed_is_scanned(whole):
    same(step_of(dataclasses.replace(CONFIG, scan="off", remat="block")), whole["experts"])


MESHES = [
    {"data": 8},
    {"fsdp": 4, "tensor": 2},
    {"expert": 4, "data": 2},
    {"stage": 2, "expert": 2, "fsdp": 2},
    {"context": 2, "fsdp": 2, "tensor": 2},
    {"stage": 4, "data": 2},
]


@pytest.mark.parametrize("axes", [MESHES[3]], ids=str)
def test_a_mesh_is_one_device(whole, axes):
    same(step_of(CONFIG, axes=axes), whole["experts"])


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["experts", "dense"])
def test_every_mesh_is_one_device(whole, name, axes):
    same(step_of(CONFIG if name == "experts" else DENSE, axes=axes), whole[name])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"repeats": 2}, {"schedule": "1f1b"}], ids=["interleaved", "1f1b"])
def test_accumulation_on_a_mesh_with_stages(whole, schedule):
    config = dataclasses.replace(DENSE, runtime=Runtime(microbatches=2, **schedule))
    same(step_of(config, axes={"stage": 2, "data": 2, "tensor": 2}, accumulate=2), whole["dense"])


def test_a_batch_that_is_wholly_masked_changes_nothing():
    """But for what the routers' losses ask, which count tokens and not targets; padding counts nowhere."""
    empty = {**batch(), "loss_mask": np.zeros((ROWS, SEQ), np.float32), "segment_ids": np.zeros((ROWS, SEQ), np.int32)}
    metrics, gradient = step_of(CONFIG, given=empty)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["loss"] == 0 and metrics["tokens"] == 0
    assert all(not leaf.any() for leaf in gradient.values())
