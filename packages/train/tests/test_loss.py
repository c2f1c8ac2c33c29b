import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.train import next_token_loss
from styrax.train.loss import cross_entropy


def numpy_nll(logits, targets):
    z = np.asarray(logits, np.float64)
    shifted = z - z.max(-1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probability, np.asarray(targets)[..., None], -1)[..., 0]


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_cross_entropy_equals_float64(scale):
    logits = scale * np.random.default_rng(0).normal(size=(3, 5, 11)).astype(np.float32)
    targets = np.random.default_rng(1).integers(0, 11, (3, 5))
    np.testing.assert_allclose(
        cross_entropy(jnp.asarray(logits), jnp.asarray(targets)),
        numpy_nll(logits, targets),
        rtol=2e-5,
        atol=1e-5,
    )


def test_gradient_is_softmax_minus_one_hot():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 7)), jnp.float32)
    targets = jnp.array([0, 3, 6, 2])
    gradient = jax.grad(lambda z: cross_entropy(z, targets).sum())(logits)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - jax.nn.one_hot(targets, 7), atol=1e-6)


def test_masked_tokens_do_not_count_and_streams_are_passed_on():
    class Model(nnx.Module):
        def __call__(self, tokens, *, positions=None, segment_ids=None, rngs=None):
            assert positions is not None and segment_ids is None and rngs == "streams"
            return jax.nn.one_hot(tokens, 6) * 2.0

    tokens = jnp.array([[1, 2, 3]])
    batch = {
        "tokens": tokens,
        "targets": jnp.array([[1, 5, 3]]),
        "loss_mask": jnp.array([[1, 1, 0]]),
        "positions": tokens,
    }
    term = next_token_loss(Model(), batch, "streams")["loss"]
    wanted = numpy_nll(2.0 * np.eye(6)[[1, 2]], np.array([1, 5])).sum()
    assert float(term.total) == pytest.approx(wanted, rel=1e-5)
    assert float(term.weight) == 2
