"""ZClip and spike skipping against slow twins, over norms with heavy tails, spikes and infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.core.config import build
from styrax.optim import adamw, guard, metrics
from styrax.optim.spikes import Spikes, ZClip


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def series(n=400):
    """Norms that drift, with heavy tails, single spikes, a jump for good, and what is not finite."""
    rng = np.random.default_rng(0)
    norms = np.exp(0.2 * rng.standard_t(3, size=n)) * np.linspace(2.0, 0.5, n)
    norms[[40, 90, 91, 200]] *= 50
    norms[300:] *= 20
    norms[[5, 60, 61, 250]] = np.inf, np.nan, np.inf, np.inf
    norms[[80, 81]] = 0.0
    return norms.astype(np.float32)


class ZClipTwin:
    """Kumar et al. 2025, algorithm 1, as their code has it: a buffer in the warm-up, then averages."""

    def __init__(self, alpha=0.97, z=2.5, warmup=25):
        self.alpha, self.z, self.warmup, self.buffer, self.mean, self.var = alpha, z, warmup, [], None, None

    def limit(self, norm):
        if not np.isfinite(norm):
            if self.mean is not None and norm == np.inf:
                return self.mean  # the limit of the formula for an infinite z
            return np.inf
        if self.mean is None:
            self.buffer.append(norm)
            if len(self.buffer) == self.warmup:
                self.mean, self.var = np.mean(self.buffer), np.var(self.buffer)
            return np.inf
        std = np.sqrt(self.var)
        z = (norm - self.mean) / (std + 1e-6)
        limit = self.mean + self.z * std / (z / self.z) if z > self.z else np.inf
        kept = min(norm, limit)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * kept
        self.var = self.alpha * self.var + (1 - self.alpha) * (kept - self.mean) ** 2
        return limit


class SpikesTwin:
    def __init__(self, window=128, sigmas=6.0):
        self.window, self.sigmas, self.norms = window, sigmas, []

    def spike(self, norm):
        last, ready = self.norms[-self.window :], len(self.norms) >= self.window // 2
        if not np.isfinite(norm):
            return False
        self.norms.append(norm)
        return ready and norm > np.mean(last) + self.sigmas * np.std(last, ddof=1)


def run(tx, norms):
    """Give the states after each gradient of such a norm."""
    weights = {"a": jnp.zeros(3), "b": jnp.zeros(())}
    share = {"a": jnp.full(3, 0.5), "b": jnp.float32(0.5)}

    def step(state, norm):
        _, state = tx.update(jax.tree.map(lambda s: s * norm, share), state, weights)
        return state, (metrics(state), state.inner.count)

    return jax.jit(lambda s, n: jax.lax.scan(step, s, n))(tx.init(weights), jnp.asarray(norms))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("with_zclip", [True, False])
@pytest.mark.parametrize("with_spikes", [True, False])
def test_the_scales_are_those_of_the_twins(clip_norm, with_zclip, with_spikes):
    norms = series()
    options = {"zclip": ZClip()} if with_zclip else {}
    options |= {"spikes": Spikes(window=64, sigmas=4.0)} if with_spikes else {}
    _, (found, counts) = run(guard(adamw(1e-3), clip_norm=clip_norm, **options), norms)
    zclip, spikes = ZClipTwin(), SpikesTwin(64, 4.0)
    scales, means = [], []
    for norm in norms.astype(np.float64):
        limit = zclip.limit(norm) if with_zclip else np.inf
        skip = with_spikes and spikes.spike(norm)
        limit = min(limit, np.inf if clip_norm is None else clip_norm)
        scales.append(0.0 if skip or not np.isfinite(norm) else limit / norm if norm > limit else 1.0)
        means.append(np.mean(zclip.buffer or [0.0]) if zclip.mean is None else zclip.mean)
    np.testing.assert_allclose(found["clip_scale"], scales, rtol=2e-4)
    np.testing.assert_array_equal(found["skipped"], np.cumsum(np.equal(scales, 0)))
    np.testing.assert_array_equal(counts, np.cumsum(np.not_equal(scales, 0)))
    np.testing.assert_allclose(found["grad_norm"], norms, rtol=1e-6)
    assert set(found) == {"grad_norm", "clip_scale", "skipped", "learning_rate"} | (
        {"norm_mean", "norm_std"} if with_zclip else set()
    ) | ({"spikes"} if with_spikes else set())  # fmt: skip
    if with_zclip:
        np.testing.assert_allclose(found["norm_mean"], means, rtol=1e-5)
        assert np.sum((np.array(scales) < 1) & np.isfinite(norms)) >= 5
    if with_spikes:
        assert 4 <= int(found["spikes"][-1]) == int(found["skipped"][-1]) - np.sum(~np.isfinite(norms)) <= 10


def test_a_spike_changes_no_bit_and_the_next_step_goes_on():
    tx = guard(adamw(1e-2), clip_norm=None, spikes=Spikes(window=4))
    weights = {"w": jnp.ones(2)}
    update = jax.jit(tx.update)
    state = tx.init(weights)
    for size in (1.0, 1.1):
        _, state = update({"w": jnp.full(2, size)}, state, weights)
    updates, after = update({"w": jnp.full(2, 1e4)}, state, weights)
    assert bits(after.inner) == bits(state.inner) and bits(updates) == bits({"w": jnp.full(2, -0.0)})
    assert (int(after.skipped), int(after.spikes.skipped), float(after.clip_scale)) == (1, 1, 0.0)
    updates, after = update({"w": jnp.ones(2)}, after, weights)
    assert int(after.inner.count) == 3 and bool(np.all(updates["w"] < 0))


def test_norms_near_the_largest_float_do_no_harm():
    norms = np.array([1.0, 2.0, 1e19, 1.5, 1e19, 1.8e19, 0.0, 1.0] * 4, np.float32)
    last, (found, _) = run(guard(adamw(1e-3), clip_norm=None, zclip=ZClip(warmup=4), spikes=Spikes(window=4)), norms)
    for name, values in found.items():
        assert np.isfinite(values).all(), name
    assert np.isfinite(last.spikes.norms).all()
    zeros = np.zeros(64, np.float32)
    _, (found, _) = run(guard(adamw(1e-3), clip_norm=0.0, zclip=ZClip(warmup=4), spikes=Spikes(window=4)), zeros)
    assert (np.asarray(found["clip_scale"]) == 1).all() and int(found["skipped"][-1]) == 0


def test_without_options_the_state_and_the_program_are_as_ever():
    weights = {"w": jnp.ones(2)}
    plain, other = guard(adamw(1e-2)), guard(adamw(1e-2), zclip=None, spikes=None)
    assert jax.tree.leaves(plain.init(weights).zclip) == jax.tree.leaves(plain.init(weights).spikes) == []
    assert len(jax.tree.leaves(plain.init(weights))) == 7
    texts = [jax.jit(tx.update).lower(weights, tx.init(weights), weights).as_text() for tx in (plain, other)]
    assert texts[0] == texts[1] and "sort" not in texts[0]
    more = guard(adamw(1e-2), zclip=ZClip(), spikes=Spikes()).init(weights)
    assert len(jax.tree.leaves(more)) == 7 + 3 + 3


def test_configs_from_text_and_mistakes():
    assert build(ZClip, {"z": 3, "warmup": 10}) == ZClip(z=3.0, warmup=10)
    assert build(Spikes, {"window": 32}) == Spikes(window=32)
    with pytest.raises(UserError, match=r"alpha.*\n.*warmup"):
        build(ZClip, {"alpha": 2.0, "warmup": 0})
    for wrong, part in (({"alpha": -1.0}, "alpha"), ({"z": 0.0}, "z"), ({"warmup": 2.5}, "warmup")):
        with pytest.raises(ValueError, match=part):
            ZClip(**wrong)
    with pytest.raises(ValueError, match="window must be 4 or more"):
        Spikes(window=2)
    with pytest.raises(ValueError, match=r"spikes must be a Spikes\(...\) or None, got 128"):
        guard(adamw(1e-2), spikes=128)  # pyright: ignore[reportArgumentType]
