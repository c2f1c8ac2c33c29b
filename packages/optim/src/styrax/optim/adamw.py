"""AdamW in one loop over the arrays, with its learning rate in the state and its moments in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import optax

from styrax.core.errors import nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.guard import FusedTransformation, Verdict, check_floating

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
    eps: float = 1e-8,
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
        eps: Added to the root of the second moment; above 0.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `AdamWState`, whose structure, shapes and dtypes never change.

    Raises:
        ValueError: A constant is out of range; at `init`, a parameter is not a real floating array or a
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
    _check_constants(b1, b2, eps)
    decays, multipliers = _by_path(weight_decay), _by_path(lr_multipliers)

    peak = learning_rate

    def rate_at(count: Any, peak: Any) -> Float[Array, ""]:
        rate = jnp.asarray(peak, jnp.float32)
        return rate if schedule is None else rate * jnp.asarray(schedule(count), jnp.float32)

    def init(params: Any) -> AdamWState:
        leaves = flatten(params)
        check_floating(leaves, "parameter")
        _check_paths(leaves, weight_decay=weight_decay, lr_multipliers=lr_multipliers)
        count = jnp.zeros((), jnp.int32)
        mu, nu = ({path: jnp.zeros_like(w, jnp.float32) for path, w in leaves.items()} for _ in range(2))
        return AdamWState(count, rate_at(count, peak), unflatten(params, mu), unflatten(params, nu))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, AdamWState]:
        del extra
        grads, mu, nu, weights = (flatten(tree) for tree in (updates, state.mu, state.nu, params))
        _check_update(grads, mu, weights, decays)

        def keep(new: Any, old: Any) -> Any:
            return new if verdict is None else jnp.where(verdict.apply, new, old)

        rate = rate_at(state.count, peak if learning_rate is None else learning_rate)
        t = (state.count + 1).astype(jnp.float32)
        debias1, debias2 = _debias(b1, t), _debias(b2, t)
        steps = {}
        for path, g in grads.items():
            g = jnp.asarray(g).astype(jnp.float32)
            if verdict is not None:
                g = g * verdict.scale
            # Select first and step from the result: a step from the values before the select would keep the
            # old moments alive past their replacement, and XLA would copy them.
            m = mu[path] = keep(b1 * mu[path] + (1.0 - b1) * g, mu[path])
            v = nu[path] = keep(b2 * nu[path] + (1.0 - b2) * (g * g), nu[path])
            step = debias1 * m / (jnp.sqrt(debias2 * v) + eps)
            if decay := decays(path):
                step = step + decay * jnp.asarray(weights[path]).astype(jnp.float32)
            # Adding a negative zero changes no bit of any weight; adding a positive one turns -0 into 0.
            steps[path] = keep(-(multipliers(path) * rate) * step, jnp.float32(-0.0))
        count = keep(optax.safe_increment(state.count), state.count)
        rate = keep(rate, state.learning_rate)
        state = AdamWState(count, rate, unflatten(state.mu, mu), unflatten(state.nu, nu))
        return unflatten(updates, steps), state

    return FusedTransformation(init, update)


def _debias(b: float, t: Float[Array, ""]) -> Float[Array, ""]:
    # 1 / (1 - b^t) without the cancellation of 1 - b^t in float32, which at b = 0.999 costs three digits.
    return jnp.ones((), jnp.float32) if b == 0 else -1.0 / jnp.expm1(t * math.log(b))


def _by_path(value: float | Mapping[str, float]) -> Callable[[str], float]:
    if isinstance(value, Mapping):
        return value.__getitem__
    return lambda path: value


def _check_constants(b1: float, b2: float, eps: float) -> None:
    problems = [f"{name} must be in [0, 1), got {b}" for name, b in (("b1", b1), ("b2", b2)) if not 0 <= b < 1]
    if not eps > 0:
        problems.append(f"eps must be above 0, got {eps}")
    if problems:
        raise ValueError("adamw: " + "; ".join(problems))


def _check_paths(leaves: Mapping[str, Any], **by_path: float | Mapping[str, float]) -> None:
    # More names than parameters are fine: `optax.masked` hides some of those that a recipe was built for.
    lines = [
        f"  {name} has nothing for {path!r}{nearest(path, value)}"
        for name, value in by_path.items()
        if isinstance(value, Mapping)
        for path in leaves
        if path not in value
    ]
    if lines:
        raise ValueError("\n".join(["adamw: the numbers by path do not fit the parameters:", *lines]))


def _check_update(
    grads: Mapping[str, Any],
    mu: Mapping[str, Any],
    weights: Mapping[str, Any],
    decays: Callable[[str], float],
) -> None:
    lines = []
    for path, g in grads.items():
        if path not in mu:
            lines.append(f"  {path!r} has a gradient but no state{nearest(path, mu)}")
        elif jnp.shape(g) != jnp.shape(mu[path]):
            lines.append(f"  {path!r}: gradient {jnp.shape(g)}, state {jnp.shape(mu[path])}")
        elif decays(path) and path not in weights:
            lines.append(f"  {path!r} has weight decay, but `params` was not given or lacks it")
    if lines:
        raise ValueError("\n".join(["adamw: the gradient does not fit the state:", *lines]))
