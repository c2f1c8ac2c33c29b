"""The recipes of algorithms that go over the parameters one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from styrax.core.config import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat
from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise
from styrax.optim.recipe import Recipe
from styrax.optim.recipe_parts import Treatment
from styrax.optim.roles import Role
from styrax.optim.schedules import WSD, Cosine, amount

if TYPE_CHECKING:
    from styrax.optim.guard import FusedTransformation


@dataclass(frozen=True, kw_only=True)
class AdamW(Recipe):
    """AdamW with a schedule, weight decay by role, clipping by global norm, and non-finite steps skipped.

    Attributes:
        learning_rate: Peak learning rate; the default is that of GPT-3 Small.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}}
        >>> recipe = AdamW(learning_rate=1e-3, schedule=Cosine(warmup=10))
        >>> tx = recipe.build(params, steps=100)
        >>> round(float(recipe.metrics(tx.init(params))["learning_rate"]), 6)
        0.0001
    """

    kind: Literal["adamw"] = "adamw"
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.adamw import adamw

        return adamw(self.learning_rate, b1=self.b1, b2=self.b2, eps=treatment.epsilon(self.eps), **treatment.common)


@dataclass(frozen=True, kw_only=True)
class Lion(Recipe):
    """Lion: the sign of an interpolated momentum, with half the state of AdamW; see `styrax.optim.lion`.

    Attributes:
        learning_rate: Peak learning rate, a third to a tenth of AdamW's.
        b1: Share of the momentum in the direction.
        b2: Decay of the momentum.
    """

    kind: Literal["lion"] = "lion"
    learning_rate: NonNegativeFloat = 1e-4
    b1: Fraction = 0.9
    b2: Fraction = 0.99

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.lion import lion

        return lion(self.learning_rate, b1=self.b1, b2=self.b2, **treatment.common)


@dataclass(frozen=True, kw_only=True)
class AdEMAMix(Recipe):
    """AdEMAMix: AdamW with a second, far slower momentum; see `styrax.optim.ademamix`.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        b3: Decay of the slow moment.
        alpha: Weight of the slow moment.
        warmup: Over how many steps `alpha` and `b3` rise: an integer is a number of steps, a number with a point a
            fraction of all; 0 for none.
        eps: Added to the root of the second moment.
    """

    kind: Literal["ademamix"] = "ademamix"
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    b3: Fraction = 0.9999
    alpha: NonNegativeFloat = 5.0
    warmup: NonNegative | Fraction = 1.0
    eps: PositiveFloat = 1e-8

    below_one = ("b1", "b2", "b3")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.ademamix import ademamix

        return ademamix(
            self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            b3=self.b3,
            alpha=self.alpha,
            warmup=amount(self.warmup, treatment.steps) or None,
            eps=treatment.epsilon(self.eps),
            **treatment.common,
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Recipe):
    """Schedule-free AdamW: an average of the iterates is evaluated, see `styrax.optim.schedule_free`.

    Evaluate and ship `recipe.eval_params(opt_state, params)`, not the parameters.

    Attributes:
        b1: Share of the average in the trained weights.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        r: Power of the step in the weights of the average.
        weight_power: Power of the largest learning rate in them.
        schedule: How the learning rate moves: it should warm up and not decay.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    r: NonNegativeFloat = 0.0
    weight_power: NonNegativeFloat = 2.0
    schedule: Cosine | WSD | Linear | InverseSqrt | Piecewise | Cycles = field(default_factory=lambda: WSD(decay=0))

    below_one = ("b1", "b2")

    @property
    def derives_weights(self) -> bool:
        """Whether `eval_params` gives other weights than those that are trained: it does."""
        return True

    def problems(self) -> list[str]:
        """Say what does not fit together."""
        found = super().problems()
        if self.extras.cautious or self.extras.cautious_decay:
            found.append(
                "extras.cautious: the average is derived from the updates, which must not be masked; leave it out"
            )
        if self.extras.average is not None:
            found.append("extras.average: the evaluated weights are an average already; leave it out")
        return found

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.schedule_free import schedule_free

        return schedule_free(
            self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            eps=treatment.epsilon(self.eps),
            r=self.r,
            weight_power=self.weight_power,
            **treatment.common,
        )


@dataclass(frozen=True, kw_only=True)
class Mars(Recipe):
    """MARS: AdamW on gradients whose variance is reduced by the ones before, see `styrax.optim.mars`.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        gamma: How much of the difference to the gradient before is added.
        eps: Added to the root of the second moment.
    """

    kind: Literal["mars"] = "mars"
    b1: Fraction = 0.95
    b2: Fraction = 0.99
    gamma: NonNegativeFloat = 0.025
    eps: PositiveFloat = 1e-8

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.mars import mars

        return mars(
            self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            gamma=self.gamma,
            eps=treatment.epsilon(self.eps),
            specs=treatment.specs,
            **treatment.common,
        )


@dataclass(frozen=True, kw_only=True)
class Prodigy(Recipe):
    """Prodigy: AdamW that estimates its learning rate, see `styrax.optim.prodigy`.

    Attributes:
        learning_rate: Multiple of the estimate; leave it at 1.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment, in units of the estimate.
        d0: First estimate.
        d_coef: Multiple of every estimate.
        use_bias_correction: Correct the moments for their start at zero.
        safeguard_warmup: Leave the learning rate out of the estimate, for a warm-up that is long.
    """

    kind: Literal["prodigy"] = "prodigy"
    transferable = "Prodigy estimates the learning rate itself; leave it out"
    learning_rate: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat = 0.0
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    d0: PositiveFloat = 1e-6
    d_coef: PositiveFloat = 1.0
    use_bias_correction: bool = False
    safeguard_warmup: bool = False

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.prodigy import prodigy

        return prodigy(
            self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            d0=self.d0,
            d_coef=self.d_coef,
            use_bias_correction=self.use_bias_correction,
            safeguard_warmup=self.safeguard_warmup,
            **treatment.common,
        )


@dataclass(frozen=True, kw_only=True)
class Adafactor(Recipe):
    """Adafactor: the second moment of a matrix as a row and a column, see `styrax.optim.adafactor`.

    Attributes:
        learning_rate: Peak learning rate, relative to the size of a parameter.
        b1: Decay of the first moment; 0 has none.
        decay_power: How the decay of the second moment approaches 1.
        clip: Largest root mean square of an update; absent for no limit.
        scale_by_parameter: Multiply the learning rate by the size of the parameter.
        min_size: Shortest side of a matrix whose second moment is factored.
    """

    kind: Literal["adafactor"] = "adafactor"
    transferable = "Adafactor's learning rate is relative to the size of a parameter; leave it out"
    learning_rate: NonNegativeFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0
    b1: Fraction = 0.0
    decay_power: PositiveFloat = 0.8
    clip: PositiveFloat | None = 1.0
    scale_by_parameter: bool = True
    min_size: Positive = 128

    below_one = ("b1",)

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.adafactor import adafactor

        return adafactor(
            self.learning_rate,
            specs=treatment.specs,
            b1=self.b1,
            decay_power=self.decay_power,
            clip=self.clip,
            scale_by_parameter=self.scale_by_parameter,
            min_size=self.min_size,
            **treatment.common,
        )


@dataclass(frozen=True, kw_only=True)
class AdamMini(Recipe):
    """Adam-mini: one second moment for each block, half the state of AdamW; see `styrax.optim.adam_mini`.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moments.
        eps: Added to the root of the second moment.
    """

    kind: Literal["adam_mini"] = "adam_mini"
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.adam_mini import adam_mini

        return adam_mini(
            self.learning_rate,
            specs=treatment.specs,
            b1=self.b1,
            b2=self.b2,
            eps=treatment.epsilon(self.eps),
            **treatment.common,
        )


@dataclass(frozen=True, kw_only=True)
class EightBitAdamW(Recipe):
    """AdamW whose moments have eight bits a number, see `styrax.optim.eight_bit_adamw`.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        block: Numbers along the last axis that share a scale.
        min_size: Smallest parameter whose moments are quantised.
        keep: Roles of the parameters that stay in float32.
    """

    kind: Literal["eight_bit_adamw"] = "eight_bit_adamw"
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    block: Positive = 256
    min_size: Positive = 4096
    keep: tuple[Role, ...] = ("embed",)

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.eight_bit import eight_bit_adamw

        return eight_bit_adamw(
            self.learning_rate,
            specs=treatment.specs,
            b1=self.b1,
            b2=self.b2,
            eps=treatment.epsilon(self.eps),
            block=self.block,
            min_size=self.min_size,
            keep=self.keep,
            **treatment.common,
        )
