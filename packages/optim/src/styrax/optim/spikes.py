"""What `guard` can do with the history of gradient norms: clip outliers by z-score, and skip spikes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from styrax.core.config import Fraction, Positive, PositiveFloat, check

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class ZClipState(NamedTuple):
    """What `ZClip` remembers.

    Attributes:
        mean: Mean of the norms, as clipped.
        variance: Their variance.
        seen: How many finite norms there were.
    """

    mean: Float[Array, ""]
    variance: Float[Array, ""]
    seen: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class ZClip:
    """Clip a gradient whose norm is an outlier among the norms before it.

    With `n` the norm, `m` and `v` the running mean and variance, and `s = sqrt(v)`,

        z = (n - m) / (s + 1e-6);       limit = m + Z s / (z / Z) if z > Z, else none
        n' = min(n, limit);   m' = a m + (1 - a) n';   v' = a v + (1 - a) (n' - m')^2

    so a greater outlier is clipped to nearer the mean. During the warm-up nothing is clipped, and `m` and `v` are the
    plain mean and variance of the norms so far. A norm that is not finite is no part of the history. What `clip_norm`
    of `guard` does is not seen here: the smaller of the two limits counts for the gradient, this one for the history.

    Attributes:
        kind: Which method this is.
        alpha: Decay `a` of the averages.
        z: Threshold `Z` of the z-score.
        warmup: Number of norms before the first clip.

    Source: Kumar et al. 2025 (ZClip), arXiv 2504.02507, algorithm 1.

    Example:
        >>> clip = ZClip(warmup=2)
        >>> state = clip.init()
        >>> for norm in (1.0, 3.0):
        ...     _, state = clip.update(norm, state)
        >>> limit, state = clip.update(12.0, state)  # z = 10: four times the threshold
        >>> round(float(limit), 3), round(float(state.mean), 4)
        (2.625, 2.0187)
    """

    kind: Literal["zclip"] = "zclip"
    alpha: Fraction = 0.97
    z: PositiveFloat = 2.5
    warmup: Positive = 25

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)

    def init(self) -> ZClipState:
        """Make the state before the first norm."""
        import jax.numpy as jnp

        return ZClipState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def update(self, norm: Any, state: Any) -> tuple[Float[Array, ""], ZClipState]:
        """Give the largest norm to let pass, infinity for any, and the state with this norm in it."""
        import jax.numpy as jnp

        norm = jnp.asarray(norm, jnp.float32)
        mean, variance, seen = state
        deviation = jnp.sqrt(variance)
        z = (norm - mean) / (deviation + 1e-6)
        outlier = (seen >= self.warmup) & (z > self.z)
        limit = jnp.where(outlier, mean + self.z * deviation / (z / self.z), jnp.inf)
        kept = jnp.minimum(norm, limit)
        # By Welford's rule while it is the plain mean: sums of squares would cancel.
        share = jnp.where(seen < self.warmup, 1.0 / (seen + 1).astype(jnp.float32), 1.0 - self.alpha)
        moved = mean + share * (kept - mean)
        spread = (kept - moved) * jnp.where(seen < self.warmup, kept - mean, kept - moved)
        new = ZClipState(moved, variance + share * (spread - variance), seen + 1)
        finite = jnp.isfinite(norm)
        return limit, ZClipState(*(jnp.where(finite, a, b) for a, b in zip(new, state)))


class SpikesState(NamedTuple):
    """What `Spikes` remembers.

    Attributes:
        norms: The last finite norms; the next one goes to place `seen` modulo the length.
        seen: How many finite norms there were.
        skipped: How many steps were skipped for a spike.
    """

    norms: Float[Array, " window"]
    seen: Int[Array, ""]
    skipped: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """Skip a step whose norm is far above the last ones.

    With `m` and `s` the mean and the sample standard deviation (over one less than their number) of the last norms
    before this one, a step is skipped if

        n > m + k s,        once half the window is filled

    The norm of a skipped step is in the history all the same, so a gradient that has become larger for good is let
    pass before long. One that is not finite is not.

    Attributes:
        kind: Which method this is.
        window: How many norms are looked at.
        sigmas: Number `k` of standard deviations.

    Source: `SkipStepOptimizer` of OLMo-core; OLMo 2, arXiv 2501.00656, section 3.

    Example:
        >>> spikes = Spikes(window=4)
        >>> state = spikes.init()
        >>> found = []
        >>> for norm in (1.0, 2.0, 9.0, 2.0):
        ...     spike, state = spikes.update(norm, state)
        ...     found.append(bool(spike))
        >>> found, int(state.skipped)
        ([False, False, True, False], 1)
    """

    kind: Literal["spikes"] = "spikes"
    window: Positive = 128
    sigmas: PositiveFloat = 6.0

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if self.window < 4:
            raise ValueError(f"window must be 4 or more for half of it to have a deviation, got {self.window}")

    def init(self) -> SpikesState:
        """Make the state before the first norm."""
        import jax.numpy as jnp

        zero = jnp.zeros((), jnp.int32)
        return SpikesState(jnp.zeros(self.window, jnp.float32), zero, zero)

    def update(self, norm: Any, state: Any) -> tuple[Bool[Array, ""], SpikesState]:
        """Tell whether a norm is a spike, and give the state with this norm in it."""
        import jax.numpy as jnp

        norm = jnp.asarray(norm, jnp.float32)
        places = jnp.arange(self.window)
        held = places < state.seen
        count = jnp.maximum(jnp.minimum(state.seen, self.window), 2).astype(jnp.float32)
        # In units of the largest, whose square may overflow.
        unit = jnp.maximum(jnp.max(state.norms), 1e-30)
        norms = state.norms / unit
        mean = jnp.sum(jnp.where(held, norms, 0.0)) / count
        variance = jnp.sum(jnp.where(held, jnp.square(norms - mean), 0.0)) / (count - 1.0)
        finite = jnp.isfinite(norm)
        ready = state.seen >= self.window // 2
        spike = finite & ready & (norm / unit > mean + self.sigmas * jnp.sqrt(variance))
        here = finite & (places == state.seen % self.window)
        return spike, SpikesState(
            jnp.where(here, norm, state.norms), state.seen + finite, state.skipped + spike.astype(jnp.int32)
        )
