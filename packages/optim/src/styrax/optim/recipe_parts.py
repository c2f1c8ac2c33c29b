"""The tables within a recipe, and what its algorithm is told about the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from styrax.core.config import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seed, check
from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise
from styrax.optim.roles import DECAY_ROLES, Role
from styrax.optim.schedules import WSD, Cosine
from styrax.optim.spikes import Spikes, ZClip
from styrax.optim.transfer import CompleteP, MuP, UMuP

if TYPE_CHECKING:
    from styrax.optim.specs import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What the parameters are, and what follows from it.

    Weight decay goes to matrices and the output head. Norm scales, biases and scalars have none. Embedding tables have
    none either: a row gets a gradient only when its token occurs but would shrink on every step, which starves rare
    tokens and lets small embeddings blow up the gradient of the first layers (OLMo 2, arXiv 2501.00656). A table that
    is also the output head counts as an embedding. Add `"embed"` to `decay_roles` for the GPT-2 habit of decaying
    every matrix.

    Attributes:
        roles: Path pattern to role, before the default rules.
        axes: Path pattern to a letter for each axis, `s` stacked, `i` input, `o` output, where shape does not tell.
        heads: Path pattern to the number of heads that the outputs are divided into.
        decay_roles: Roles of the parameters that decay.
        lr_multipliers: Multiplier on the learning rate by role; 1 for a role not named.
    """

    roles: dict[str, Role] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    heads: dict[str, Positive] = field(default_factory=dict)
    decay_roles: tuple[Role, ...] = DECAY_ROLES
    lr_multipliers: dict[Role, NonNegativeFloat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)

    def specs(self, params: Any) -> dict[str, ParamSpec]:
        """Describe every parameter; see `styrax.optim.specs`."""
        from styrax.optim.specs import specs

        return specs(params, roles_by_path=self.roles, axes=self.axes, heads=self.heads)


@dataclass(frozen=True, kw_only=True)
class Average:
    """An average of the weights, to evaluate and to ship in their place; see `styrax.optim.averaged`.

    Attributes:
        decay: Of the average; 1 is the plain mean.
        start: Updates before it begins: an integer is a number of them, a number with a point a fraction of all.
    """

    decay: Fraction = 0.999
    start: NonNegative | Fraction = 0

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What can be had around any algorithm.

    Attributes:
        skip_nonfinite: Skip a step whose gradient has an infinity or a NaN.
        zclip: Clip gradients whose norm is far above the last ones; absent for no such clipping.
        spikes: Skip a step whose gradient's norm is a spike among the last ones; absent for no such skipping.
        agc: Largest norm of the gradient of a unit as a share of that of its weights; absent for no such clipping.
        cautious: Leave out the part of each update that goes up the gradient.
        cautious_decay: Decay only where the update makes the weight smaller.
        average: Keep an average of the weights to evaluate; absent for none.
        precision: How parameters of 16 bits keep small updates: `master`, `split`, `stochastic` or `kahan`; absent to
            round them off.
        seed: Of stochastic rounding.
        transfer: From which smaller model the settings come: `mup`, `completep` or `umup`; absent for this one.
    """

    skip_nonfinite: bool = True
    zclip: ZClip | None = None
    spikes: Spikes | None = None
    agc: PositiveFloat | None = None
    cautious: bool = False
    cautious_decay: bool = False
    average: Average | None = None
    precision: Literal["master", "split", "stochastic", "kahan"] | None = None
    seed: Seed = 0
    transfer: MuP | CompleteP | UMuP | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are treated in another way than the rest.

    Attributes:
        paths: Path patterns of its parameters; a parameter belongs to the first group that takes it.
        frozen: Leave them as they are; they then have no state.
        learning_rate: Peak, in place of the recipe's.
        weight_decay: In place of the recipe's.
        schedule: In place of the recipe's.
        optimizer: Other settings of the algorithm, such as `{b2 = 0.99}`, or another algorithm with its own defaults,
            such as `{kind = "lion"}`.
    """

    paths: tuple[str, ...] = ()
    frozen: bool = False
    learning_rate: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    schedule: Cosine | WSD | Linear | InverseSqrt | Piecewise | Cycles | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values, and then what one field alone cannot tell."""
        check(self)
        given = [name for name in ("learning_rate", "weight_decay", "schedule", "optimizer") if getattr(self, name)]
        problems = [] if self.paths else ["paths: expected one pattern or more"]
        if self.frozen and given:
            problems.append(f"frozen: nothing is updated, so {', '.join(given)} has no meaning")
        problems += [
            f"optimizer.{key}: write it beside `optimizer`, not in it"
            for key in ("learning_rate", "weight_decay", "schedule")
            if key in self.optimizer
        ]
        if problems:
            raise ValueError("\n".join(problems))


class Treatment(NamedTuple):
    """What a recipe's algorithm is told about its parameters.

    Attributes:
        specs: Path -> role and axes.
        lr: Path -> multiplier on the learning rate.
        decay: Path -> weight decay.
        eps: Path -> multiplier on Adam's epsilon; empty where it is 1 for all.
        schedule: Step -> multiple of the peak.
        steps: Of the whole run.
    """

    specs: dict[str, ParamSpec]
    lr: dict[str, float]
    decay: dict[str, float]
    eps: dict[str, float]
    schedule: Any
    steps: int

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that every algorithm takes."""
        return {"schedule": self.schedule, "weight_decay": self.decay, "lr_multipliers": self.lr}

    def epsilon(self, eps: float) -> float | dict[str, float]:
        """Give Adam's epsilon, by path if it is not the same for all."""
        return {path: eps * times for path, times in self.eps.items()} or eps
