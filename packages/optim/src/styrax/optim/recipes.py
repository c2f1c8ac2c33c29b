"""Recipes: an optimizer as a frozen config, built for given parameters and a given number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from styrax.core import nearest
from styrax.core.config import Fraction, NonNegativeFloat, PositiveFloat, check
from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise
from styrax.optim.roles import DECAY_ROLES, ROLES, Role, Table, describe
from styrax.optim.schedules import WSD, Cosine

if TYPE_CHECKING:
    import optax
    from jaxtyping import Array, Float


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with a schedule, weight decay by role, clipping by global norm, and non-finite steps skipped.

    Weight decay goes to matrices and the output head. Norm scales, biases and scalars have none. Embedding
    tables have none either: a row gets a gradient only when its token occurs but would shrink on every step,
    which starves rare tokens and lets small embeddings blow up the gradient of the first layers (OLMo 2,
    arXiv 2501.00656). A table that is also the
    output head counts as an embedding. Add `"embed"` to `decay_roles` for the GPT-2 habit of decaying every
    matrix.

    Attributes:
        kind: Which recipe this is.
        learning_rate: Peak learning rate; the default is that of GPT-3 Small.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        decay_roles: Roles of the parameters that decay.
        lr_multipliers: Multiplier on the learning rate by role; 1 for a role not named.
        roles: Path pattern to role, before the default rules.
        clip_norm: Largest global norm of the gradient; absent for no clipping.
        skip_nonfinite: Skip a step whose gradient has an infinity or a NaN.
        schedule: How the learning rate moves: `cosine`, `wsd`, `linear`, `inverse_sqrt`, `piecewise` or `cycles`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}}
        >>> recipe = AdamW(learning_rate=1e-3, schedule=Cosine(warmup=10))
        >>> tx = recipe.build(params, steps=100)
        >>> round(float(recipe.metrics(tx.init(params))["learning_rate"]), 6)
        0.0001
    """

    kind: Literal["adamw"] = "adamw"
    learning_rate: NonNegativeFloat = 6e-4
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    decay_roles: tuple[Role, ...] = DECAY_ROLES
    lr_multipliers: dict[Role, NonNegativeFloat] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    clip_norm: NonNegativeFloat | None = 1.0
    skip_nonfinite: bool = True
    schedule: Cosine | WSD | Linear | InverseSqrt | Piecewise | Cycles = field(default_factory=Cosine)

    def __post_init__(self) -> None:
        """Check the values, and then what one field alone cannot tell."""
        check(self)
        problems = [f"{name} must be below 1, got {b}" for name, b in (("b1", self.b1), ("b2", self.b2)) if b >= 1]
        named = {"decay_roles": self.decay_roles, "lr_multipliers": self.lr_multipliers}
        for name, found in {**named, "roles": self.roles.values()}.items():
            wrong = [role for role in found if role not in ROLES]
            problems += [f"{name}: {role!r} is no role{nearest(role, ROLES)}" for role in wrong]
        if problems:
            raise ValueError("\n".join(problems))

    def describe(self, params: Any) -> Table:
        """Tell how each parameter is treated; `print` the result.

        Args:
            params: Tree of arrays or of `jax.ShapeDtypeStruct`s.

        Raises:
            UserError: The rules in `roles` do not fit the parameters.
        """
        return describe(
            params,
            self.roles,
            weight_decay=self.weight_decay,
            decay_roles=self.decay_roles,
            lr_multipliers=self.lr_multipliers,
        )

    def build(self, params: Any, *, steps: int) -> optax.GradientTransformationExtraArgs:
        """Make the optimizer.

        Args:
            params: Tree of arrays or of `jax.ShapeDtypeStruct`s; only paths and shapes are read.
            steps: Number of steps of the whole run, 1 or more. The schedule is a function of it, so a run
                resumed with another number goes on along the schedule of that number.

        Raises:
            UserError: The rules in `roles` do not fit the parameters.
            ValueError: `steps` is not an integer of 1 or more.
        """
        from styrax.optim.adamw import adamw
        from styrax.optim.guard import guard

        table = self.describe(params)
        inner = adamw(
            self.learning_rate,
            schedule=self.schedule.build(steps=steps),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay={row.path: row.decay for row in table},
            lr_multipliers={row.path: row.lr for row in table},
        )
        return guard(inner, clip_norm=self.clip_norm, skip_nonfinite=self.skip_nonfinite)

    def metrics(self, opt_state: Any) -> dict[str, Float[Array, ""]]:
        """Read the scalars to log, see `styrax.optim.metrics`."""
        from styrax.optim.metrics import metrics

        return metrics(opt_state)
