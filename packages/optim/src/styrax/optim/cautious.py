"""Caution around any optimizer: no step against the gradient's sign, no decay against the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from styrax.core.tree import flatten, unflatten
from styrax.optim.elementwise import Common, layer_axes
from styrax.optim.guard import FusedTransformation
from styrax.optim.specs import ParamSpec


def cautious(
    inner: optax.GradientTransformation,
    *,
    mask: bool = True,
    weight_decay: float | Mapping[str, float] = 0.0,
    cautious_decay: bool = False,
    lr_multipliers: float | Mapping[str, float] = 1.0,
    specs: Mapping[str, ParamSpec] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Mask the updates of an optimizer where they go up the gradient, and decay with or without caution.

    With `u` the inner update, `g` the gradient, and per parameter `w` a multiplier `k` and a decay `d`:

        m = 1 where u g < 0, else 0                     u' = u m / max(mean(m), 0.001)          (`mask`)
        p = 1 where u' w < 0, else 0                    (`cautious_decay`; p = 1 without it)
        update = u' - k eta d p w

    `eta` is the `learning_rate` in the inner state after its update. The mean is over one parameter tensor; over one
    layer where `specs` say which axes are stacks. The inner optimizer must not decay itself, for its decay would be
    masked as a part of `u`: `cautious(adamw(1e-3, weight_decay=0.0), weight_decay=0.1)`.

    Args:
        inner: The optimizer. Extra arguments of `update` are passed to it.
        mask: Whether to mask.
        weight_decay: Decay `d` of every parameter, or one by path.
        cautious_decay: Whether to decay only where the update already makes the weight smaller.
        lr_multipliers: Multiplier `k` of every parameter, or one by path, on the rate of the decay alone: the updates
            have theirs from the inner optimizer.
        specs: Path -> description, from `styrax.optim.specs`; only the stacked axes are read.

    Returns:
        A transformation with the state of `inner`, a `FusedTransformation` if `inner` is one. The updates are float32.

    Raises:
        UserError: A decay or a multiplier is out of range.
        ValueError: At `init`, there is decay but the inner state has no `learning_rate`, or a mapping lacks a
            parameter; at `update`, a parameter to decay was not given.

    Source: Liang et al. 2024, arXiv 2411.16085, algorithm 1; Chen et al. 2025, arXiv 2510.12402 (decay).

    Example:
        >>> tx = cautious(optax.chain(optax.trace(0.9), optax.scale(-1.0)))
        >>> w = {"w": jnp.zeros(2)}
        >>> _, state = tx.update({"w": jnp.array([4.0, 4.0])}, tx.init(w), w)
        >>> updates, _ = tx.update({"w": jnp.array([1.0, -1.0])}, state, w)  # momentum 4.6, 2.6
        >>> [round(float(u), 2) + 0.0 for u in updates["w"]]  # the half that is left counts twice
        [-9.2, 0.0]
    """
    common = Common("cautious", 1.0, None, weight_decay, lr_multipliers)
    common.check()
    decays = bool(any(weight_decay.values()) if isinstance(weight_decay, Mapping) else weight_decay)
    fused = isinstance(inner, FusedTransformation)
    inner = inner if fused else optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        common.leaves(params)
        state = inner.init(params)
        if decays and not hasattr(state, "learning_rate"):
            raise ValueError(
                f"cautious: weight decay needs a learning rate, but the inner state ({type(state).__name__}) has no "
                "`learning_rate`; wrap the optimizer itself, not a chain or a guard around it"
            )
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads, weights, verdict = flatten(updates), flatten(params), extra.get("verdict")
        common.check_update(grads, grads, weights, needs_params=False)
        updates, state = inner.update(updates, state, params, **extra)
        steps = flatten(updates)
        for path, u in steps.items():
            u = jnp.asarray(u).astype(jnp.float32)
            if mask:
                kept = u * jnp.asarray(grads[path]).astype(jnp.float32) < 0
                share = jnp.mean(kept, axis=layer_axes(specs, path, u.ndim), keepdims=True, dtype=jnp.float32)
                u = jnp.where(kept, u / jnp.maximum(share, 1e-3), -0.0)
            if decay := common.decay(path):
                w = jnp.asarray(weights[path]).astype(jnp.float32)
                smaller = (u * w < 0) if cautious_decay else True
                step = u - common.multiplier(path) * state.learning_rate * decay * jnp.where(smaller, w, 0.0)
                u = step if verdict is None else jnp.where(verdict.apply, step, -0.0)
            steps[path] = u
        return unflatten(updates, steps), state

    return FusedTransformation(init, update) if fused else optax.GradientTransformationExtraArgs(init, update)
