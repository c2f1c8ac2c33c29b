"""Any mesh trains as one device does."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from styrax.core import MeshConfig, Policy
from styrax.data import ByteTokenizer, LMData, write_store
from styrax.models import DecoderConfig
from styrax.optim import AdamW
from styrax.train import fit
from styrax.train.shardings import batch_sharding

MODEL = DecoderConfig(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, dropout=0.1, scan="on")
STEPS = 3


class Curve:
    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append(dict(metrics))

    def close(self):
        pass


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory):
    texts = {p.name: p.read_text() for p in sorted(corpus.iterdir())}
    store = write_store(tmp_path_factory.mktemp("store") / "s", texts, ByteTokenizer())
    return LMData(store, seed=1, seq_len=16, batch_size=8, held_out=0.2, max_held_out_batches=2)


def train(data, mesh, accumulate=1, model=MODEL):
    def build(rngs):
        return model.build(vocab_size=data.vocab_size, rngs=rngs, policy=Policy.parse("f32"))

    tx = AdamW(learning_rate=1e-2).build(
        nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build(nnx.Rngs(0))))), steps=STEPS
    )
    curve = Curve()
    loader = data.loader(sharding=batch_sharding(mesh) if mesh is not None else None)
    result = fit(
        build, tx, loader, steps=STEPS, mesh=mesh, logical_axes=model.logical_axes(), tracker=curve,
        metrics=AdamW().metrics, held_out=data.held_out(), token_bytes=data.token_bytes, accumulate=accumulate,
    )  # fmt: skip
    loader.close()
    return result, curve.lines


@pytest.fixture(scope="module")
def alone(data):
    return train(data, None)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": -1}], ids=str)
def test_a_mesh_equals_one_device(data, alone, axes):
    mesh = MeshConfig(axes=axes).build()
    result, curve = train(data, mesh)
    assert len(curve) == STEPS
    for got, wanted in zip(curve, alone[1]):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=1e-6, err_msg=name)
    if "fsdp" in axes:
        sharded = [x for x in jax.tree.leaves(result.state.params) if not x.sharding.is_fully_replicated]
        assert sharded
        moments = [x for x in jax.tree.leaves(result.state.opt_state) if not x.sharding.is_fully_replicated]
        assert len(moments) == 2 * len(sharded)


def test_accumulation_on_a_mesh_equals_one_device(data):
    model = dataclasses.replace(MODEL, dropout=0.0, num_layers=1)
    mesh = MeshConfig(axes={"data": 2, "fsdp": 2}).build(jax.devices()[:4])
    wanted = train(data, None, model=model)[1]
    for a, b in zip(train(data, mesh, accumulate=2, model=model)[1], wanted):
        np.testing.assert_allclose([a["loss"], a["grad_norm"]], [b["loss"], b["grad_norm"]], rtol=2e-4)
