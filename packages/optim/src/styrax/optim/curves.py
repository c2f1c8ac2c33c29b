"""More schedules, in the manner of `styrax.optim.schedules`: linear, inverse square root, points, and cycles."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from styrax.core.config import Fraction, NonNegative, NonNegativeFloat, Positive, check
from styrax.optim.schedules import WSD, Cosine, amount, check_amounts, fraction, total, warm_up

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from styrax.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Warm up linearly, then fall linearly to a fraction of the peak.

        multiple(t) = min(1, (t + 1) / W) * (f + (1 - f) clip((N - t) / (N - W), 0, 1))

    with `t`, `N`, `W` and `f` as for `styrax.optim.Cosine`.

    Attributes:
        kind: Which schedule this is.
        warmup: Warm-up `W`: an integer is a number of steps, a number with a point a fraction of the total.
        final: Learning rate at the end, `f`, as a fraction of the peak.

    Example:
        >>> rate = Linear(warmup=2).build(steps=6)
        >>> [round(float(rate(t)), 4) for t in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    kind: Literal["linear"] = "linear"
    warmup: NonNegative | Fraction = 0.05
    final: Fraction = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_amounts("Linear", warmup=self.warmup, final=fraction(self.final))

    def build(self, *, steps: int, peak: float = 1.0) -> Schedule:
        """Make the function `step -> learning rate`; see `Cosine.build`."""
        import jax.numpy as jnp

        warm, start = warm_up(self.warmup, total(steps)), amount(self.warmup, steps)

        def rate(step: Any) -> Float[Array, ""]:
            t = jnp.asarray(step, jnp.float32)
            left = jnp.clip((steps - t) / max(steps - start, 1), 0.0, 1.0)
            return peak * warm(t) * (self.final + (1.0 - self.final) * left)

        return rate


@dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Warm up linearly, then fall with the square root of the step, and to a fraction of the peak at the end.

        multiple(t) = min(1, (t + 1) / W) * sqrt(S / max(t + 1, S)) * min(1, f + (1 - f) (N - t) / D)

    with the time scale `S = W`, or 1 where nothing is warmed up.

    Attributes:
        kind: Which schedule this is.
        warmup: Warm-up `W`, as for `Linear`.
        decay: Steps `D` of a linear decay at the end, in the same way; 0 for none.
        final: Fraction `f` of the rate that is left at the end of the decay.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 5.3; the cool-down is of Zhai et al. 2022, arXiv 2106.04560.

    Example:
        >>> rate = InverseSqrt(warmup=4).build(steps=100)
        >>> [round(float(rate(t)), 4) for t in (0, 3, 15, 63)]
        [0.25, 1.0, 0.5, 0.25]
    """

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: NonNegative | Fraction = 0.05
    decay: NonNegative | Fraction = 0
    final: Fraction = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_amounts("InverseSqrt", warmup=self.warmup, decay=self.decay, final=fraction(self.final))

    def build(self, *, steps: int, peak: float = 1.0) -> Schedule:
        """Make the function `step -> learning rate`; see `Cosine.build`."""
        import jax.numpy as jnp

        warm, scale = warm_up(self.warmup, total(steps)), max(amount(self.warmup, steps), 1)
        length = amount(self.decay, steps)

        def rate(step: Any) -> Float[Array, ""]:
            t = jnp.asarray(step, jnp.float32)
            multiple = warm(t) * jnp.sqrt(scale / jnp.maximum(t + 1.0, scale))
            if length:
                left = jnp.clip((steps - t) / length, 0.0, 1.0)
                multiple = multiple * jnp.minimum(1.0, self.final + (1.0 - self.final) * left)
            return peak * multiple

        return rate


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """Go through points of step and multiple, by straight lines or in stairs.

    Attributes:
        kind: Which schedule this is.
        points: Pairs of a step and the multiple of the peak there, with rising steps: an integer is a number of
            steps, a number with a point a fraction of the total. Before the first and after the last the multiple
            stays.
        interpolate: Straight lines between the points (`linear`), or each multiple until the next point (`hold`).

    Example:
        >>> rate = Piecewise(points=((0, 0.5), (4, 1.0), (1.0, 0.0))).build(steps=8)
        >>> [round(float(rate(t)), 4) for t in range(0, 10, 2)]
        [0.5, 0.75, 1.0, 0.5, 0.0]
    """

    kind: Literal["piecewise"] = "piecewise"
    points: tuple[tuple[NonNegative | Fraction, NonNegativeFloat], ...] = ((0, 1.0),)
    interpolate: Literal["linear", "hold"] = "linear"

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not self.points:
            raise ValueError("points: expected one or more pairs of step and multiple, got none")

    def build(self, *, steps: int, peak: float = 1.0) -> Schedule:
        """Make the function `step -> learning rate`; see `Cosine.build`.

        Raises:
            ValueError: The steps of the points do not rise.
        """
        import jax.numpy as jnp

        places = [amount(step, total(steps)) for step, _ in self.points]
        if places != sorted(set(places)):
            raise ValueError(f"points: expected rising steps, got {places} with {steps} steps in all")
        values = [multiple for _, multiple in self.points]
        if self.interpolate == "linear":
            return lambda step: (
                peak
                * jnp.interp(
                    jnp.asarray(step, jnp.float32), jnp.array(places, jnp.float32), jnp.array(values, jnp.float32)
                )
            )

        def stairs(step: Any) -> Float[Array, ""]:
            which = jnp.searchsorted(jnp.array(places), jnp.asarray(step), side="right") - 1
            return peak * jnp.array(values, jnp.float32)[jnp.maximum(which, 0)]

        return stairs


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Repeat a schedule in cycles of equal length, each with a smaller peak if wanted.

    Cycle `k` of `C` covers the steps from `k N / C` on, rounded, and has the peak `decay^k`.

    Attributes:
        kind: Which schedule this is.
        each: The schedule of one cycle; its fractions are of a cycle's length.
        count: How many cycles `C`.
        decay: Peak of a cycle as a fraction of that before.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983 (warm restarts).

    Example:
        >>> rate = Cycles(each=Linear(warmup=0), count=2, decay=0.5).build(steps=8)
        >>> [round(float(rate(t)), 4) for t in range(8)]
        [1.0, 0.75, 0.5, 0.25, 0.5, 0.375, 0.25, 0.125]
    """

    kind: Literal["cycles"] = "cycles"
    each: Cosine | WSD | Linear = field(default_factory=Cosine)
    count: Positive = 1
    decay: Fraction = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)

    def build(self, *, steps: int, peak: float = 1.0) -> Schedule:
        """Make the function `step -> learning rate`; see `Cosine.build`.

        Raises:
            ValueError: There are more cycles than steps.
        """
        import jax.numpy as jnp

        if self.count > total(steps):
            raise ValueError(f"count = {self.count} cycles, but the run has {steps} steps")
        edges = [steps * k // self.count for k in range(self.count + 1)]
        curves = [self.each.build(steps=end - begin) for begin, end in pairwise(edges)]

        def rate(step: Any) -> Float[Array, ""]:
            t = jnp.asarray(step)
            multiple = curves[-1](t - edges[-2]) * self.decay ** (self.count - 1)
            for k in range(self.count - 2, -1, -1):
                multiple = jnp.where(t < edges[k + 1], curves[k](t - edges[k]) * self.decay**k, multiple)
            return peak * multiple

        return rate
