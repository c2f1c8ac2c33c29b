"""Tiny decoders, and the means to make them."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.core import Policy, tree
from styrax.models import Decoder, DecoderConfig

sys.path.insert(0, str(Path(__file__).parent))
VOCAB = 23
TINY = {"num_layers": 2, "embed_dim": 24, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 40, "max_len": 64}


@pytest.fixture(scope="session")
def build():
    """Make a tiny decoder whose parameters are large enough that a wrong term shows in the logits."""

    def make(policy: str = "f32", seed: int = 0, **changes) -> Decoder:
        config = DecoderConfig(**{**TINY, **changes})
        policy = Policy.parse(policy)
        empty = nnx.eval_shape(lambda: config.build(vocab_size=VOCAB, rngs=nnx.Rngs(0), policy=policy))
        rng = np.random.default_rng(seed)

        def draw(path, leaf):
            noise = rng.normal(size=leaf.shape)
            return jnp.asarray(1 + 0.1 * noise if path.endswith("scale") else 0.2 * noise, leaf.dtype)

        return tree.map_with_path(draw, empty)

    return make


@pytest.fixture(scope="session")
def run():
    """Call a model, compiled."""
    return jax.jit(lambda model, tokens, **given: model(tokens, **given))


@pytest.fixture
def tokens():
    return np.random.default_rng(1).integers(0, VOCAB, (2, 12), dtype=np.int32)


@pytest.fixture
def packed():
    """Two documents and padding in one row, one whole document in the other."""
    ids = [[1] * 5 + [2] * 4 + [0] * 3, [1] * 12]
    positions = [[*range(5), *range(4), 0, 0, 0], [*range(12)]]
    return {"segment_ids": np.array(ids, np.int32), "positions": np.array(positions, np.int32)}


@pytest.fixture
def accelerator(monkeypatch):
    """Trace as one would on an accelerator."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
