"""Trees that several tests train on."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for contract.py


def _model(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "embed": {"embedding": array(7, 4)},
        "head": {"kernel": array(4, 7), "bias": array(7)},
        "layers": {
            "attn": {"q": {"kernel": array(2, 4, 2, 2), "bias": array(2, 2, 2)}, "sinks": array(2, 2)},
            "mlp": {"up": {"kernel": array(2, 4, 6)}},
            "norm": {"scale": array(2, 4)},
            "gain": array(2),
        },
        "norm": {"scale": array(4)},
        "temperature": array(),
    }


def _gradients(params, seed, size=1.0, dtype=None):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(size * rng.normal(size=p.shape), dtype or p.dtype), params)


@pytest.fixture
def small():
    """Make a small tree, for tests that run many operations uncompiled; `small(dtype)`."""
    return lambda dtype=jnp.float32: {"a": {"kernel": jnp.ones((2, 3), dtype)}, "b": jnp.full((3,), -0.5, dtype)}


@pytest.fixture
def model():
    """Make a tree with every role in it; `model(dtype)`."""
    return _model


@pytest.fixture
def gradients():
    """Make random gradients: `gradients(params, seed, size=1.0, dtype=None)`."""
    return _gradients
