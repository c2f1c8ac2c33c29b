"""Learning rate as a pure function of the step: a multiple of the peak, in float32.

Both schedules warm up as `(t + 1) / W`, so the first step already moves the parameters, and both are known
from the total number of steps alone: a run resumed with a larger total follows the schedule of that total
from where it stands.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from styrax.core.config import Fraction, NonNegative

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Schedule = Callable[[Any], "Float[Array, '']"]


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Warm up linearly, then follow half a cosine down to a fraction of the peak.

    With `t` the step counted from 0, `N` the total and `W` the warm-up steps,

        p = clip((t - W) / (N - W), 0, 1)
        multiple(t) = min(1, (t + 1) / W) * (f + (1 - f) (1 + cos(pi p)) / 2)

    `f` is reached at `t = N`, one past the last step, so the last step is not wasted either. Fewer steps than
    `W` give a run that is all warm-up.

    Attributes:
        kind: Which schedule this is.
        warmup: Warm-up `W`: an integer is a number of steps, a number with a point a fraction of the total.
        final: Learning rate at the end, `f`, as a fraction of the peak.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5 (one period, no restart).

    Example:
        >>> rate = Cosine(warmup=2, final=0.5).build(steps=4, peak=0.1)
        >>> [round(float(rate(t)), 4) for t in range(5)]
        [0.05, 0.1, 0.1, 0.075, 0.05]
    """

    kind: Literal["cosine"] = "cosine"
    warmup: NonNegative | Fraction = 0.05
    final: Fraction = 0.1

    def __post_init__(self) -> None:
        """Check the values."""
        check_amounts("Cosine", warmup=self.warmup, final=fraction(self.final))

    def build(self, *, steps: int, peak: float = 1.0) -> Schedule:
        """Make the function `step -> learning rate`, which is an optax schedule.

        Args:
            steps: Total number of steps `N`, 1 or more.
            peak: Largest learning rate; 1 gives multiples of the peak.

        Raises:
            ValueError: `steps` is not an integer of 1 or more.
        """
        import jax.numpy as jnp

        warm = warm_up(self.warmup, total(steps))
        start = amount(self.warmup, steps)

        def rate(step: Any) -> Float[Array, ""]:
            t = jnp.asarray(step, jnp.float32)
            p = jnp.clip((t - start) / max(steps - start, 1), 0.0, 1.0)
            return peak * warm(t) * (self.final + (1.0 - self.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * p)))

        return rate


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm up linearly, stay at the peak, then decay linearly over the last steps.

    With `t` the step counted from 0, `N` the total, `W` and `D` the warm-up and decay steps,

        multiple(t) = min((t + 1) / W, f + (1 - f) (N - t) / D, 1)

    Up to the decay nothing depends on `N`, so one long run serves several lengths. A warm-up that runs into
    the decay (a very short run) is cut by it.

    Attributes:
        kind: Which schedule this is.
        warmup: Warm-up `W`: an integer is a number of steps, a number with a point a fraction of the total.
        decay: Decay `D`, in the same way; 0 stays at the peak to the end.
        final: Learning rate at the end, `f`, as a fraction of the peak; reached one past the last step.

    Source: Hu et al. 2024 (MiniCPM), arXiv 2404.06395, section 4.

    Example:
        >>> rate = WSD(warmup=2, decay=2).build(steps=6)
        >>> [round(float(rate(t)), 4) for t in range(7)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    kind: Literal["wsd"] = "wsd"
    warmup: NonNegative | Fraction = 0.05
    decay: NonNegative | Fraction = 0.2
    final: Fraction = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_amounts("WSD", warmup=self.warmup, decay=self.decay, final=fraction(self.final))

    def build(self, *, steps: int, peak: float = 1.0) -> Schedule:
        """Make the function `step -> learning rate`, which is an optax schedule.

        Args:
            steps: Total number of steps `N`, 1 or more.
            peak: Largest learning rate; 1 gives multiples of the peak.

        Raises:
            ValueError: `steps` is not an integer of 1 or more.
        """
        import jax.numpy as jnp

        warm = warm_up(self.warmup, total(steps))
        length = amount(self.decay, steps)

        def rate(step: Any) -> Float[Array, ""]:
            t = jnp.asarray(step, jnp.float32)
            left = jnp.clip((steps - t) / max(length, 1), 0.0, 1.0)
            return peak * jnp.minimum(warm(t), self.final + (1.0 - self.final) * left)

        return rate


def amount(given: int | float, steps: int) -> int:
    """Turn an amount into steps: an integer is a number of them, a number with a point a fraction of all."""
    return given if isinstance(given, int) else round(given * steps)


def warm_up(given: int | float, steps: int) -> Callable[[Any], Any]:
    """Make the function of the step that rises as `(t + 1) / W` to 1."""
    import jax.numpy as jnp

    length = max(amount(given, steps), 1)
    return lambda t: jnp.minimum((t + 1.0) / length, 1.0)


def total(steps: int) -> int:
    """Refuse a total that is none."""
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or not 1 <= steps < 2**31:
        raise ValueError(
            f"a schedule needs the total number of steps, an integer from 1 to 2**31 - 1; got steps={steps!r}"
        )
    return steps


def fraction(value: Any) -> Any:
    """Take 0 and 1 for the fractions 0.0 and 1.0, and anything else as it is."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def check_amounts(owner: str, **values: int | float) -> None:
    """Refuse amounts that are neither steps nor fractions."""
    problems = []
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{name} must be a number, got {value!r}")
        elif isinstance(value, int) and not 0 <= value < 2**31:
            problems.append(f"{name}={value} must be a number of steps, 0 or more, below 2**31")
        elif isinstance(value, float) and not 0.0 <= value <= 1.0:
            steps = name != "final" and 1 < value < 2**31
            hint = f"; write {int(value)} for a number of steps" if steps else ""
            problems.append(f"{name}={value} must be a fraction from 0.0 to 1.0{hint}")
    if problems:
        raise ValueError(f"{owner}: " + "; ".join(problems))
