"""MARS-AdamW: Adam on a gradient that is corrected by its change since the last step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core.config import NonNegativeFloat
from styrax.optim.elementwise import BELOW_ONE, Common, Leaf, Now, Step, debias, elementwise, layer_axes
from styrax.optim.guard import FusedTransformation
from styrax.optim.specs import ParamSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class MarsState(NamedTuple):
    """State of `mars`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        mu: First moments of the corrected gradient, float32, a tree like the parameters.
        nu: Second moments of the corrected gradient, float32, a tree like the parameters.
        last: The last gradient, as scaled by the verdict, float32, a tree like the parameters.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any
    last: Any


def mars(
    learning_rate: float | Float[Array, ""],
    *,
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.95,
    b2: float = 0.99,
    gamma: float = 0.025,
    eps: float | Mapping[str, float] = 1e-8,
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
    specs: Mapping[str, ParamSpec] | None = None,
) -> FusedTransformation:
    """AdamW on a variance-reduced gradient, with decoupled weight decay.

    With `g` the gradient (scaled by the verdict), `g_last` that of the last applied update (zeros before the first),
    `t` counting applied updates from 1, and per parameter `w` a multiplier `k` and a decay `d`:

        c = g + gamma b1 / (1 - b1) (g - g_last)                c = c / max(1, ||c||)
        mu = b1 mu + (1 - b1) c                                 nu = b2 nu + (1 - b2) c^2
        direction = mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps)
        update = -k eta (direction + d w),                      eta = learning_rate * schedule(t - 1)

    This is the form with one gradient a step ("approximate" in the paper). The norm is that of one parameter tensor; of
    one layer where `specs` say which axes are stacks, so that stacked layers do as a loop over layers would. The
    authors give one-axis parameters to AdamW instead: use `styrax.optim.groups`.

    Arguments not named here, `update`'s extra arguments and the handling of leaves are those of `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        gamma: Strength of the correction, 0 or more.
        eps: Added to the root of the second moment, for every parameter, or one by path; above 0.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.
        specs: Path -> description, from `styrax.optim.specs`; only the stacked axes are read.

    Returns:
        A transformation with state `MarsState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed.
        ValueError: As `adamw`.

    Source: Yuan et al. 2024, arXiv 2411.10438, algorithm 2, with the clip of equation 10.

    Example:
        >>> tx = mars(0.5, weight_decay=0.0)
        >>> w = {"w": jnp.ones(2)}
        >>> updates, _ = tx.update({"w": jnp.array([4.0, -2.0])}, tx.init(w), w)
        >>> [round(u, 4) for u in updates["w"].tolist()]
        [-0.5, 0.5]
    """
    common = Common("mars", learning_rate, schedule, weight_decay, lr_multipliers, eps)
    common.check(
        b1=(BELOW_ONE, b1), b2=(BELOW_ONE, b2), gamma=(NonNegativeFloat, gamma)
    )  # fmt: skip

    def rule(now: Now) -> Step:
        debias1, debias2 = debias(b1, now.t), debias(b2, now.t)

        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            g, (mu, nu, last) = leaf.g, leaf.slots
            c = g + (gamma * b1 / (1.0 - b1)) * (g - last)
            axes = layer_axes(specs, leaf.path, c.ndim)
            c = c / jnp.maximum(jnp.sqrt(jnp.sum(c * c, axis=axes, keepdims=True)), 1.0)
            mu = now.keep(b1 * mu + (1.0 - b1) * c, mu)
            nu = now.keep(b2 * nu + (1.0 - b2) * (c * c), nu)
            return debias1 * mu / (jnp.sqrt(debias2 * nu) + common.epsilon(leaf.path)), (mu, nu, now.keep(g, last))

        return step

    return elementwise(common, MarsState, 3, rule)
