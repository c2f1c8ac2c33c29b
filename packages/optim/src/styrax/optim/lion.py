"""Lion: the sign of a momentum, with one moment in the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.optim.elementwise import BELOW_ONE, Common, Leaf, Now, Step, elementwise
from styrax.optim.guard import FusedTransformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class LionState(NamedTuple):
    """State of `lion`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        mu: Momentum, float32, a tree like the parameters.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any


def lion(
    learning_rate: float | Float[Array, ""],
    *,
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """Step by the sign of the momentum, with decoupled weight decay.

    With `g` the gradient (scaled by the verdict), and per parameter `w` a multiplier `k` and a decay `d`:

        direction = sign(b1 mu + (1 - b1) g)
        mu = b2 mu + (1 - b2) g
        update = -k eta (direction + d w),              eta = learning_rate * schedule(updates applied)

    Every element moves by `eta`, so the learning rate is 3 to 10 times smaller than AdamW's and the decay as many
    times larger. Arguments not named here, `update`'s extra arguments and the handling of leaves are those of
    `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Share of the old momentum in the direction, in [0, 1).
        b2: Decay of the momentum, in [0, 1).
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `LionState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed.
        ValueError: As `adamw`.

    Source: Chen et al. 2023, arXiv 2302.06675, algorithm 2.

    Example:
        >>> tx = lion(0.5, weight_decay=0.0)
        >>> w = {"w": jnp.ones(3)}
        >>> updates, _ = tx.update({"w": jnp.array([4.0, -2.0, 0.0])}, tx.init(w), w)
        >>> [abs(u) if u == 0 else u for u in updates["w"].tolist()]
        [-0.5, 0.5, 0.0]
    """
    common = Common("lion", learning_rate, schedule, weight_decay, lr_multipliers)
    common.check(b1=(BELOW_ONE, b1), b2=(BELOW_ONE, b2))

    def rule(now: Now) -> Step:
        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            (mu,) = leaf.slots
            direction = jnp.sign(b1 * mu + (1.0 - b1) * leaf.g)
            return direction, (now.keep(b2 * mu + (1.0 - b2) * leaf.g, mu),)

        return step

    return elementwise(common, LionState, 1, rule)
