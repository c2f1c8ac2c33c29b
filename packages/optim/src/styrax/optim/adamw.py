"""AdamW in one loop over the arrays, with its learning rate in the state and its moments in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.optim.elementwise import BELOW_ONE, Common, Leaf, Now, Step, debias, elementwise
from styrax.optim.guard import FusedTransformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class AdamWState(NamedTuple):
    """State of `adamw`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        mu: First moments, float32, a tree like the parameters.
        nu: Second moments, float32, a tree like the parameters.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any


def adamw(
    learning_rate: float | Float[Array, ""],
    *,
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float | Mapping[str, float] = 1e-8,
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """Adam with decoupled weight decay.

    With `t` counting applied updates from 1, `s` the verdict's scale (1 without a guard), and per parameter
    `w` a multiplier `k` and a decay `d`:

        g = s * gradient
        mu = b1 mu + (1 - b1) g                     nu = b2 nu + (1 - b2) g^2
        eta = learning_rate * schedule(t - 1)
        update = -k eta ( mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + d w )

    Everything is computed in float32 and the updates are float32; `optax.apply_updates` adds them before it
    rounds to the parameters' dtype. Leaves are paired by path, so the state made from an `nnx.State` takes
    gradients in a plain dictionary. A leaf absent from the gradient (`None`, `MaskedNode`) is left alone.

    `update` takes two extra arguments: `learning_rate`, a number or traced scalar in place of the one given
    here, so that one compiled step serves a sweep; and `verdict`, which `styrax.optim.guard` passes.

    Args:
        learning_rate: Peak learning rate.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, for every parameter, or one by path; above 0.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `AdamWState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed.
        ValueError: At `init`, a parameter is not a real floating array or a
            mapping lacks it; at `update`, the gradient does not fit the state.

    Source: Kingma and Ba 2015, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv 1711.05101,
        algorithm 2 (the decay is multiplied by the learning rate, as in PyTorch and optax).

    Example:
        >>> tx = adamw(0.5, weight_decay=0.0)
        >>> w = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.array([4.0, -2.0])}, tx.init(w), w)
        >>> [round(float(u), 4) for u in updates["w"]], float(state.learning_rate)
        ([-0.5, 0.5], 0.5)
    """
    common = Common("adamw", learning_rate, schedule, weight_decay, lr_multipliers, eps)
    common.check(b1=(BELOW_ONE, b1), b2=(BELOW_ONE, b2))

    def rule(now: Now) -> Step:
        debias1, debias2 = debias(b1, now.t), debias(b2, now.t)

        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            g, (mu, nu) = leaf.g, leaf.slots
            mu = now.keep(b1 * mu + (1.0 - b1) * g, mu)
            nu = now.keep(b2 * nu + (1.0 - b2) * (g * g), nu)
            return debias1 * mu / (jnp.sqrt(debias2 * nu) + common.epsilon(leaf.path)), (mu, nu)

        return step

    return elementwise(common, AdamWState, 2, rule)
