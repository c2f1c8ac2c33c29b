"""The suites for optimizers and decoders accept a right part and refuse wrong ones, each for its own fault."""

import jax
import jax.numpy as jnp
import pytest

from styrax.core import protocols
from styrax.core.testing import check_decoder, check_optimizer

# Optimizers


class Momentum:
    """A right optimizer."""

    def init(self, params):
        return {"m": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), "n": jnp.zeros((), jnp.int32)}

    def update(self, updates, state, params=None):
        m = jax.tree.map(lambda m, g: 0.9 * m + g.astype(jnp.float32), state["m"], updates)
        return jax.tree.map(lambda m: -0.1 * m, m), {"m": m, "n": state["n"] + 1}


class TakesDtypeOfGradients(Momentum):
    def init(self, params):
        return {"m": jax.tree.map(jnp.zeros_like, params), "n": jnp.zeros((), jnp.int32)}


class WeakCounter(Momentum):
    def update(self, updates, state, params=None):
        updates, state = super().update(updates, state, params)
        return updates, {**state, "n": state["n"] + 1.0}


class Grows(Momentum):
    def update(self, updates, state, params=None):
        updates, state = super().update(updates, state, params)
        return updates, {**state, "extra": jnp.zeros(())}


class Normalises(Momentum):
    def update(self, updates, state, params=None):
        updates, state = super().update(updates, state, params)
        return jax.tree.map(lambda u: u / jnp.linalg.norm(u), updates), state


class Remembers(Momentum):
    calls = 0

    def update(self, updates, state, params=None):
        self.calls += 1
        updates, state = super().update(updates, state, params)
        return jax.tree.map(lambda u: u * self.calls, updates), state


PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros((3,))}


def test_a_right_optimizer():
    assert isinstance(Momentum(), protocols.Optimizer)
    check_optimizer(Momentum(), PARAMS)


def test_optax():
    optax = pytest.importorskip("optax")
    # Without `mu_dtype` the first moment starts in the parameters' dtype and then takes the gradients'.
    adamw = optax.adamw(1e-3, mu_dtype=jnp.float32)
    for tx in (adamw, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))):
        assert isinstance(tx, protocols.Optimizer)
        check_optimizer(tx, {"w": jnp.ones((2, 3)), "b": jnp.zeros((3,))})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (TakesDtypeOfGradients, r"bfloat16 parameters: the state after update: leaves differ in shape or dtype"),
        (WeakCounter, r"(?s)the state after update.*n: got \(\(\), 'float32'\), expected \(\(\), 'int32'\)"),
        (Grows, "(?s)the state after update.*extra: got .* expected nothing"),
        (Normalises, "updates of zero gradients, step 0: not finite"),
        (Remembers, "init and update compute something else when they are called again"),
    ],
)
def test_a_wrong_optimizer(bad, message):
    with pytest.raises(AssertionError, match=message):
        check_optimizer(bad(), PARAMS)


# Decoders


class Decoder:
    """A right decoder: one layer of attention in plain jax, with learned positions."""

    causal, segments, offset = True, True, True

    def __init__(self, vocab: int = 11, embed: int = 8):
        keys = jax.random.split(jax.random.key(0), 6)
        self.embed = jax.random.normal(keys[0], (vocab, embed))
        self.place = jax.random.normal(keys[1], (32, embed))
        self.q, self.k, self.v = (jax.random.normal(key, (embed, embed)) / embed**0.5 for key in keys[2:5])
        self.head = jax.random.normal(keys[5], (embed, vocab))

    def init_cache(self, batch: int, length: int):
        empty = jnp.zeros((batch, length, self.embed.shape[1]))
        return {"k": empty, "v": empty, "n": 0}

    def __call__(self, tokens, *, positions=None, segment_ids=None, cache=None, rngs=None):
        batch, seq = tokens.shape
        start = cache["n"] if cache is not None and self.offset else 0
        if positions is None:
            positions = jnp.broadcast_to(start + jnp.arange(seq), (batch, seq))
        x = self.embed[tokens] + self.place[positions]
        q, k, v = x @ self.q, x @ self.k, x @ self.v
        rows = start + jnp.arange(seq)
        if cache is not None:
            start = cache["n"]
            k = jax.lax.dynamic_update_slice(cache["k"], k, (0, start, 0))
            v = jax.lax.dynamic_update_slice(cache["v"], v, (0, start, 0))
            cache = {"k": k, "v": v, "n": start + seq}
            rows = start + jnp.arange(seq)
        mask = jnp.ones((batch, seq, k.shape[1]), bool)
        if self.causal:
            mask &= rows[:, None] >= jnp.arange(k.shape[1])
        if segment_ids is not None and self.segments:
            mask &= (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] > 0)
        scores = jnp.where(mask, jnp.einsum("bte,bse->bts", q, k), -1e30)
        x = x + jax.nn.softmax(scores) @ v
        logits = x @ self.head
        return logits if cache is None else (logits, cache)


class SeesTheFuture(Decoder):
    causal = False


class MixesDocuments(Decoder):
    segments = False


class LosesItsPlace(Decoder):
    offset = False


class Overflows(Decoder):
    def __call__(self, tokens, **given):
        return jnp.full((*tokens.shape, 11), jnp.nan)


class WrongShape(Decoder):
    def __call__(self, tokens, **given):
        return super().__call__(tokens, **given)[..., :-1]


class Constant(Decoder):
    def __call__(self, tokens, **given):
        return jnp.zeros((*tokens.shape, 11))


def test_a_right_decoder():
    check_decoder(Decoder(), 11)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SeesTheFuture, "causality: token 1 changed, earlier logits"),
        (MixesDocuments, "segments: document 1 changed, document 2's logits"),
        (LosesItsPlace, r"cache: chunks of \[1, 1"),
        (Overflows, "logits: not finite"),
        (WrongShape, r"logits: got \(2, 8, 10\), expected \(2, 8, 11\)"),
        (Constant, "causality: token 1 changed, no logit did"),
    ],
)
def test_a_wrong_decoder(bad, message):
    with pytest.raises(AssertionError, match=message):
        check_decoder(bad(), 11)
