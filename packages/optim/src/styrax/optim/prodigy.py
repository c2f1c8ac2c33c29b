"""Prodigy: AdamW that finds its learning rate while it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core.config import NonNegativeFloat
from styrax.core.tree import flatten, unflatten
from styrax.optim.elementwise import ABOVE_ZERO, BELOW_ONE, Common, Leaf, debias
from styrax.optim.guard import FusedTransformation, Verdict

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

SLOTS = ("mu", "nu", "s", "start")


class ProdigyState(NamedTuple):
    """State of `prodigy`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: The factor on the estimate at the last applied update (before the first: what it will be).
        d: Estimate of the distance to the solution; the rate in effect is `learning_rate` times it.
        d_max: Largest estimate so far.
        numerator: Running sum that the estimate is made of.
        mu: First moments times `d`, float32, a tree like the parameters.
        nu: Second moments times `d^2`, float32, a tree like the parameters.
        s: Running sum of gradients, float32, a tree like the parameters.
        start: The parameters at the beginning, float32, a tree like them.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    d: Float[Array, ""]
    d_max: Float[Array, ""]
    numerator: Float[Array, ""]
    mu: Any
    nu: Any
    s: Any
    start: Any


def prodigy(
    learning_rate: float | Float[Array, ""] = 1.0,
    *,
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float | None = None,
    eps: float = 1e-8,
    d0: float = 1e-6,
    d_coef: float = 1.0,
    growth_rate: float | None = None,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    weight_decay: float | Mapping[str, float] = 0.0,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """AdamW whose rate is an estimate of the distance between the first weights and the solution.

    With `g` the gradient (scaled by the verdict), `t` counting applied updates from 1, `w_0` the first weights, sums
    over all elements of all parameters, and per parameter `w` a multiplier `k` and a decay `c`:

        eta = d learning_rate * schedule(t - 1)         times sqrt(1 - b2^t) / (1 - b1^t) with use_bias_correction
        numerator = b3 numerator + d / d0 eta sum g (w_0 - w)
        s = b3 s + d / d0 eta g                         (d in place of eta with safeguard_warmup)
        mu = b1 mu + (1 - b1) d g                       nu = b2 nu + (1 - b2) d^2 g^2
        estimate = d_coef numerator / sum |s|           d_max = max(d_max, estimate)
        d' = min(d_max, growth_rate max(d, estimate if d = d0))
        update = -k eta (mu / (sqrt(nu) + d' eps) + c w)

    The defaults are those of the authors' package (optax 0.2.8 always has the bias correction). Leave `learning_rate`
    at 1 and give a schedule that ends low; a warm-up wants `safeguard_warmup`. A parameter with `k = 0` has no part in
    the estimate. Arguments not named here, `update`'s extra arguments and the handling of leaves are those of
    `styrax.optim.adamw`.

    Args:
        learning_rate: Factor on the estimate.
        schedule: Multiple of it as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        b3: Decay of the sums of the estimate, in [0, 1); `None` is the root of `b2`.
        eps: Added to the root of the second moment; above 0.
        d0: First estimate; above 0.
        d_coef: Factor on every estimate; above 0. Change this rather than `learning_rate`.
        growth_rate: Largest growth of the estimate in one update, such as 1.02; `None` for no limit.
        use_bias_correction: Whether the rate has Adam's bias correction.
        safeguard_warmup: Keep the rate out of the denominator of the estimate, so that a warm-up does not inflate it.
        weight_decay: Decay of every parameter, or one by path.
        lr_multipliers: Multiplier of every parameter, or one by path.

    Returns:
        A transformation with state `ProdigyState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed.
        ValueError: As `adamw`, and at `update` if `params` was not given.

    Source: Mishchenko and Defazio 2023, arXiv 2306.06101, algorithm 4; `prodigyopt` 1.1.2.

    Example:
        >>> tx = prodigy(d0=1e-3)
        >>> w = {"w": jnp.ones(1)}
        >>> updates, state = tx.update({"w": jnp.ones(1)}, tx.init(w), w)
        >>> [round(x, 6) for x in (*updates["w"].tolist(), float(state.d))]  # 0.1 / sqrt(0.001) of 0.001
        [-0.003162, 0.001]
    """
    b3 = math.sqrt(b2) if b3 is None and isinstance(b2, float) and b2 >= 0 else b3
    common = Common("prodigy", learning_rate, schedule, weight_decay, lr_multipliers)
    common.check(
        b1=(BELOW_ONE, b1),
        b2=(BELOW_ONE, b2),
        b3=(BELOW_ONE, 0.0 if b3 is None else b3),
        eps=(ABOVE_ZERO, eps),
        d0=(ABOVE_ZERO, d0),
        d_coef=(ABOVE_ZERO, d_coef),
        growth_rate=(NonNegativeFloat | None, growth_rate),
    )
    b3 = 0.0 if b3 is None else b3

    def init(params: Any) -> ProdigyState:
        leaves = common.leaves(params)
        count, d = jnp.zeros((), jnp.int32), jnp.full((), d0, jnp.float32)
        zeros = (
            unflatten(params, {path: jnp.zeros_like(w, jnp.float32) for path, w in leaves.items()}) for _ in range(3)
        )
        # A copy: a step that donates parameters and state must not find one buffer in both.
        start = unflatten(params, {path: jnp.array(w, jnp.float32, copy=True) for path, w in leaves.items()})
        return ProdigyState(count, common.rate(count), d, jnp.copy(d), jnp.zeros_like(d), *zeros, start=start)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, ProdigyState]:
        del extra
        grads, weights = flatten(updates), flatten(params)
        mu, nu, s, start = (flatten(getattr(state, name)) for name in SLOTS)
        common.check_update(grads, mu, weights, needs_params=True)
        now = common.now(state, learning_rate, verdict)
        d = state.d
        eta = d * now.rate
        if use_bias_correction:
            eta = eta * debias(b1, now.t) / jnp.sqrt(debias(b2, now.t))
        share = d / d0 * (d if safeguard_warmup else eta)
        product = jnp.zeros((), jnp.float32)
        total = jnp.zeros((), jnp.float32)
        leaves = {path: Leaf(path, now.gradient(g), weights[path], ()) for path, g in grads.items()}
        for path, leaf in leaves.items():
            g = leaf.g
            if common.multiplier(path):
                product = product + jnp.sum(g * (start[path] - leaf.weight))
                s[path] = now.keep(b3 * s[path] + share * g, s[path])
                total = total + jnp.sum(jnp.abs(s[path]))
            mu[path] = now.keep(b1 * mu[path] + (1.0 - b1) * d * g, mu[path])
            nu[path] = now.keep(b2 * nu[path] + (1.0 - b2) * (d * g) ** 2, nu[path])
        numerator = b3 * state.numerator + d / d0 * eta * product
        # Gradients of zero so far say nothing: the estimate stays.
        estimate = jnp.where(total > 0, d_coef * numerator / jnp.where(total > 0, total, 1.0), 0.0)
        new = jnp.where(d == jnp.float32(d0), jnp.maximum(d, estimate), d)
        d_max = jnp.maximum(state.d_max, estimate)
        new = d_max if growth_rate is None else jnp.minimum(d_max, new * growth_rate)
        now = now._replace(rate=eta)
        steps = {
            path: common.update(now, leaf, mu[path] / (jnp.sqrt(nu[path]) + new * eps)) for path, leaf in leaves.items()
        }
        count, _ = common.advance(now, state)
        held = (now.keep(a, b) for a, b in ((new, d), (d_max, state.d_max), (numerator, state.numerator)))
        rate = now.keep(common.rate(state.count, learning_rate), state.learning_rate)
        trees = (unflatten(getattr(state, name), slot) for name, slot in zip(SLOTS, (mu, nu, s, start)))
        return unflatten(updates, steps), ProdigyState(count, rate, *held, *trees)

    return FusedTransformation(init, update)
