"""The whole house against the same model, optimizer and data order written by hand in plain JAX."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from styrax.core import Policy
from styrax.data import ByteTokenizer, LMData, write_store
from styrax.models import DecoderConfig
from styrax.optim import AdamW
from styrax.optim.schedules import Cosine
from styrax.train import fit
from styrax.train.step import split_model

STEPS = 50
MODEL = DecoderConfig(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64)
RECIPE = AdamW(learning_rate=1e-2, schedule=Cosine(warmup=5))


def plain_jax():
    path = Path(__file__).parents[1] / "tools" / "benchmarks" / "plain_jax.py"
    spec = importlib.util.spec_from_file_location("plain_jax", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_jax"] = module
    spec.loader.exec_module(module)
    return module


class Curve(list):
    def log(self, step, metrics):
        self.append((metrics["loss"], metrics["grad_norm"], metrics["learning_rate"]))

    def close(self):
        pass


def test_fifty_steps_equal_plain_jax(corpus, tmp_path):
    texts = {p.name: p.read_text() for p in sorted(corpus.iterdir())}
    data = LMData(write_store(tmp_path / "s", texts, ByteTokenizer()), seq_len=32, batch_size=4, held_out=0)
    model = MODEL.build(vocab_size=data.vocab_size, rngs=nnx.Rngs(0), policy=Policy.parse("f32"))
    params = split_model(model)[1]

    plain = plain_jax()
    shape = plain.Shape(2, 32, 4, 2, 8, 64, data.vocab_size, MODEL.rope.theta, MODEL.arch.norm.eps)
    weights = plain.from_styrax(params, 2)
    hyper = plain.Hyper(1e-2, 5, STEPS)
    step = plain.make_step(shape, hyper, plain.decays(weights), wrap=lambda x: x)
    adam, wanted = plain.adam_init(weights), []
    for i in range(STEPS):
        rate = float(plain.learning_rate(adam.count, hyper))
        weights, adam, loss, norm = step(weights, adam, data.batch(i))
        wanted.append((float(loss), float(norm), rate))

    curve = Curve()
    loader = data.loader()
    result = fit(model, RECIPE.build(params, steps=STEPS), loader, steps=STEPS, metrics=RECIPE.metrics, tracker=curve)
    loader.close()
    got, wanted = np.array(curve), np.array(wanted)
    np.testing.assert_allclose(got[:, 2], wanted[:, 2], rtol=1e-5)
    np.testing.assert_allclose(got[:, 0], wanted[:, 0], rtol=2e-4)
    np.testing.assert_allclose(got[:10], wanted[:10], rtol=2e-5)
    assert wanted[-1, 0] < wanted[0, 0] - 1
    same = plain.from_styrax(result.state.params, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=2e-3), same, weights)
