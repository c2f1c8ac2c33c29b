"""AdEMAMix: Adam with a second, slow average of the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core.config import NonNegativeFloat, Positive
from styrax.optim.elementwise import BELOW_ONE, Common, Leaf, Now, Step, debias, elementwise
from styrax.optim.guard import FusedTransformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class AdemamixState(NamedTuple):
    """State of `ademamix`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        mu: Fast average of the gradients, float32, a tree like the parameters.
        slow: Slow average of the gradients, float32, a tree like the parameters.
        nu: Second moments, float32, a tree like the parameters.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    slow: Any
    nu: Any


def ademamix(
    learning_rate: float | Float[Array, ""],
    *,
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    alpha: float = 5.0,
    warmup: int | None = None,
    eps: float | Mapping[str, float] = 1e-8,
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """Adam whose step has a slow average of the gradients added, with decoupled weight decay.

    With `g` the gradient (scaled by the verdict), `t` counting applied updates from 1, and per parameter `w` a
    multiplier `k` and a decay `d`:

        mu = b1 mu + (1 - b1) g       slow = b3_t slow + (1 - b3_t) g       nu = b2 nu + (1 - b2) g^2
        direction = ( mu / (1 - b1^t) + alpha_t slow ) / ( sqrt(nu / (1 - b2^t)) + eps )
        update = -k eta (direction + d w),              eta = learning_rate * schedule(t - 1)

    `slow` has no bias correction: it fills over about `1 / (1 - b3)` updates. With `s = min(1, t / warmup)` (1 without
    a warm-up), `alpha_t = s alpha`, and the horizon of the slow average grows linearly from that of the fast one:

        1 / ln b3_t = (1 - s) / ln b1 + s / ln b3

    Arguments not named here, `update`'s extra arguments and the handling of leaves are those of `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the fast average, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        b3: Decay of the slow average, in [0, 1).
        alpha: Weight of the slow average, 0 or more.
        warmup: Updates until `alpha` and `b3` are reached; the authors take all of the run. `None` begins with them,
            which diverges easily at a large `alpha`.
        eps: Added to the root of the second moment, for every parameter, or one by path; above 0.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `AdemamixState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed.
        ValueError: As `adamw`.

    Source: Pagliardini et al. 2024, arXiv 2409.03137, algorithm 1 and appendix A.1.

    Example:
        >>> tx = ademamix(1.0, b3=0.5, alpha=2.0, warmup=2, weight_decay=0.0)
        >>> w = {"w": jnp.ones(1)}
        >>> updates, _ = tx.update(w, tx.init(w), w)  # 1 + alpha_1 (1 - b3_1) = 1 + 1 * (1 - 0.76)
        >>> [round(u, 3) for u in updates["w"].tolist()]
        [-1.167]
    """
    common = Common("ademamix", learning_rate, schedule, weight_decay, lr_multipliers, eps)
    common.check(
        b1=(BELOW_ONE, b1),
        b2=(BELOW_ONE, b2),
        b3=(BELOW_ONE, b3),
        alpha=(NonNegativeFloat, alpha),
        warmup=(Positive | None, warmup),
    )
    # 1 / ln b, minus the horizon of an average in updates; almost 0 for b = 0, so that exp(1 / it) is 0.
    horizon1, horizon3 = (1 / math.log(b) if b else -1e-30 for b in (b1, b3))

    def slow_at(t: Float[Array, ""]) -> tuple[Any, Any]:
        if warmup is None:
            return alpha, 1.0 - b3
        s = jnp.minimum(t / warmup, 1.0)
        # 1 - b3_t by expm1: 0.9999 in float32 is off by half a thousandth in its distance from 1.
        return alpha * s, -jnp.expm1(1.0 / ((1.0 - s) * horizon1 + s * horizon3))

    def rule(now: Now) -> Step:
        debias1, debias2 = debias(b1, now.t), debias(b2, now.t)
        alpha_t, share = slow_at(now.t)

        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            g, (mu, slow, nu) = leaf.g, leaf.slots
            mu = now.keep(b1 * mu + (1.0 - b1) * g, mu)
            slow = now.keep(slow + share * (g - slow), slow)
            nu = now.keep(b2 * nu + (1.0 - b2) * (g * g), nu)
            return (debias1 * mu + alpha_t * slow) / (jnp.sqrt(debias2 * nu) + common.epsilon(leaf.path)), (
                mu,
                slow,
                nu,
            )

        return step

    return elementwise(common, AdemamixState, 3, rule)
