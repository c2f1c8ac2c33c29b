"""Schedule-free AdamW: an average of the iterates in place of a learning rate that decays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core.config import NonNegativeFloat
from styrax.core.tree import flatten, unflatten
from styrax.optim.elementwise import BELOW_ONE, Common, debias
from styrax.optim.guard import FusedTransformation, Verdict

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        max_rate: Largest rate so far.
        weight_sum: Sum of the weights of the average.
        b1: Share of the average in the trained weights, constant.
        z: The iterates that are averaged, float32, a tree like the parameters.
        nu: Second moments, float32, a tree like the parameters.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    max_rate: Float[Array, ""]
    weight_sum: Float[Array, ""]
    b1: Float[Array, ""]
    z: Any
    nu: Any

    def eval_params(self, params: Any) -> Any:
        """Give the average `x = (y - (1 - b1) z) / b1`; see `styrax.optim.evaluation.eval_params`."""
        z, found = flatten(self.z), flatten(params)
        b1 = next(iter(flatten(self.b1).values()))  # nnx.Optimizer wraps each array of its state
        for path in z:
            if path in found:
                x = _average(found[path].astype(jnp.float32), z[path], b1)
                found[path] = x.astype(found[path].dtype)
        return unflatten(params, found)


def schedule_free(
    learning_rate: float | Float[Array, ""],
    *,
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float | Mapping[str, float] = 1e-8,
    r: float = 0.0,
    weight_power: float = 2.0,
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """AdamW on iterates `z` whose average `x` is evaluated, with the gradient taken between them at `y`.

    The parameters that are trained are `y = b1 x + (1 - b1) z`. With `g` the gradient at `y` (scaled by the verdict),
    `t` counting applied updates from 1, `eta_t = learning_rate * schedule(t - 1)`, and per parameter a multiplier `k`
    and a decay `d`:

        nu = b2 nu + (1 - b2) g^2
        z' = z - k eta_t ( g / (sqrt(nu / (1 - b2^t)) + eps) + d y )
        weight_t = t^r (max_{i <= t} eta_i)^weight_power        c = weight_t / sum_{i <= t} weight_i
        x' = (1 - c) x + c z'
        update = y' - y = b1 c (z' - x) + (1 - b1) (z' - z)

    `schedule` is for the warm-up, such as `lambda t: jnp.minimum(1, (t + 1) / 2000)`; it should not decay. The
    weights of the average use the rate that `z` has moved by (optax 0.2.8 uses the next one). The state has `z` and
    `nu`, as much as AdamW's; `x` is derived from `z` and the parameters: `styrax.optim.eval_params(state, params)`.
    What batch norm has gathered belongs to `y` and must be gathered anew for `x`.

    Parameters in bfloat16 lose small updates here as in every optimizer, and with them the average: keep a float32
    master. Arguments not named here, `update`'s extra arguments and the handling of leaves
    are those of `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Share of the average in the trained weights, in (0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, for every parameter, or one by path; above 0.
        r: Power of `t` in the weights of the average, 0 or more.
        weight_power: Power of the largest rate in the weights of the average, 0 or more.
        weight_decay: Decay `d` of every parameter, or one by path, taken at `y`.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `ScheduleFreeState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed.
        ValueError: As `adamw`, and at `update` if `params` was not given.

    Source: Defazio et al. 2024, arXiv 2405.15682, algorithm 1; `schedulefree` 1.4.1, AdamWScheduleFreeReference.

    Example:
        >>> tx = schedule_free(0.5, weight_decay=0.0)
        >>> w = {"w": jnp.ones(1)}
        >>> updates, state = tx.update({"w": jnp.ones(1)}, tx.init(w), w)
        >>> y = {"w": w["w"] + updates["w"]}
        >>> [round(float(v["w"][0]), 4) for v in (y, state.z, state.eval_params(y))]
        [0.5, 0.5, 0.5]
    """
    common = Common("schedule_free", learning_rate, schedule, weight_decay, lr_multipliers, eps)
    common.check(
        "b1 must be above 0, got 0" if b1 == 0 else "",
        b1=(BELOW_ONE, b1),
        b2=(BELOW_ONE, b2),
        r=(NonNegativeFloat, r),
        weight_power=(NonNegativeFloat, weight_power),
    )

    def init(params: Any) -> ScheduleFreeState:
        leaves = common.leaves(params)
        count, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        # A copy: a step that donates parameters and state must not find one buffer in both.
        z = unflatten(params, {path: jnp.array(w, jnp.float32, copy=True) for path, w in leaves.items()})
        nu = unflatten(params, {path: jnp.zeros_like(w, jnp.float32) for path, w in leaves.items()})
        return ScheduleFreeState(count, common.rate(count), zero, jnp.zeros_like(zero), jnp.float32(b1), z, nu)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, ScheduleFreeState]:
        del extra
        grads, weights, zs, nus = (flatten(tree) for tree in (updates, params, state.z, state.nu))
        common.check_update(grads, zs, weights, needs_params=True)
        now = common.now(state, learning_rate, verdict)
        max_rate = jnp.maximum(now.rate, state.max_rate)
        weight = now.t**r * max_rate**weight_power
        weight_sum = state.weight_sum + weight
        c = jnp.where(weight_sum > 0, weight / jnp.where(weight_sum > 0, weight_sum, 1.0), 0.0)
        debias2 = debias(b2, now.t)
        steps = {}
        for path, g in grads.items():
            g, z = now.gradient(g), zs[path]
            y = jnp.asarray(weights[path]).astype(jnp.float32)
            nu = nus[path] = now.keep(b2 * nus[path] + (1.0 - b2) * (g * g), nus[path])
            direction = g / (jnp.sqrt(debias2 * nu) + common.epsilon(path))
            if decay := common.decay(path):
                direction = direction + decay * y
            moved = now.keep(-(common.multiplier(path) * now.rate) * direction, jnp.float32(-0.0))
            zs[path] = z + moved
            step = b1 * c * (zs[path] - _average(y, z, b1)) + (1.0 - b1) * moved
            steps[path] = now.keep(step, jnp.float32(-0.0))
        count, rate = common.advance(now, state)
        max_rate, weight_sum = now.keep(max_rate, state.max_rate), now.keep(weight_sum, state.weight_sum)
        trees = unflatten(state.z, zs), unflatten(state.nu, nus)
        return unflatten(updates, steps), ScheduleFreeState(count, rate, max_rate, weight_sum, state.b1, *trees)

    return FusedTransformation(init, update)


def _average(y: Any, z: Any, b1: Any) -> Any:
    # (y - (1 - b1) z) / b1, in the form that gives y exactly where z is y, as at the beginning.
    return y + (1.0 - b1) / b1 * (y - z)
