"""Adafactor: second moments of a matrix as one row and one column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core.config import NonNegativeFloat, Positive
from styrax.optim.elementwise import (
    ABOVE_ZERO,
    BELOW_ONE,
    Common,
    Leaf,
    Now,
    Step,
    as_it_lies,
    elementwise,
    layer_axes,
)
from styrax.optim.guard import FusedTransformation
from styrax.optim.specs import ParamSpec, need_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class AdafactorState(NamedTuple):
    """State of `adafactor`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        rows: Second moments, float32, a tree like the parameters; of a factored one their mean over the outputs, with
            axes of 1 there.
        columns: Mean over the inputs, with axes of 1 there; a scalar where nothing is factored.
        mu: First moments, float32, a tree like the parameters; `None` with `b1 = 0`.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    rows: Any
    columns: Any
    mu: Any = None


def adafactor(
    learning_rate: float | Float[Array, ""],
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.0,
    decay_power: float = 0.8,
    eps: float = 1e-30,
    clip: float | None = 1.0,
    scale_by_parameter: bool = True,
    min_scale: float = 1e-3,
    min_size: int = 128,
    weight_decay: float | Mapping[str, float] = 0.0,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """Steps of unit size from factored second moments, relative to the size of the weights.

    With `g` the gradient (scaled by the verdict), `t` counting applied updates from 1, `rms` over one layer, and per
    parameter `w` a multiplier `k` and a decay `d`:

        b2_t = 1 - t^-decay_power
        R = b2_t R + (1 - b2_t) mean over outputs (g^2 + eps)       C = likewise over inputs
        V = R C / mean over inputs of R                 (V = b2_t V + (1 - b2_t) (g^2 + eps) where nothing is factored)
        u = g / sqrt(V)
        u = u / max(1, rms(u) / clip)
        u = u max(rms(w), min_scale)                    with scale_by_parameter
        mu = b1 mu + (1 - b1) u                         with b1 > 0; then mu in place of u
        update = -k eta (u + d w),                      eta = learning_rate * schedule(t - 1)

    A parameter is factored if its inputs and its outputs number at least `min_size`. This is optax's algorithm except
    that `specs` say what inputs, outputs and stacked layers are, where optax takes the two largest axes, be one of them
    the layers, and one `rms` for all layers; and that the decay is multiplied by the learning rate. Arguments not named
    here, `update`'s extra arguments and the handling of leaves are those of `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        specs: Path -> description, from `styrax.optim.specs`.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1); 0 has none and saves its memory.
        decay_power: How the second moments' decay approaches 1; above 0.
        eps: Added to the squares; above 0.
        clip: Largest root mean square of a layer's step before the rate; `None` for no limit.
        scale_by_parameter: Whether steps are relative to the layer's weights.
        min_scale: Least size that a layer's weights count with; 0 or more.
        min_size: Least number of inputs and of outputs to factor.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `AdafactorState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed. At `init`, the axes of a parameter with more
            than two are not known.
        ValueError: As `adamw`, and at `update` if `params` was not given but is needed.

    Source: Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5.

    Example:
        >>> from styrax.optim.specs import specs
        >>> w = {"w": jnp.full((2, 3), 0.5)}
        >>> tx = adafactor(0.1, specs=specs(w), min_size=2)
        >>> updates, state = tx.update({"w": jnp.ones((2, 3))}, tx.init(w), w)
        >>> state.rows["w"].shape, state.columns["w"].shape, round(float(updates["w"][0, 0]), 4)
        ((2, 1), (1, 3), -0.05)
    """
    common = Common("adafactor", learning_rate, schedule, weight_decay, lr_multipliers)
    common.check(
        b1=(BELOW_ONE, b1),
        decay_power=(ABOVE_ZERO, decay_power),
        eps=(ABOVE_ZERO, eps),
        clip=(ABOVE_ZERO | None, clip),
        min_scale=(NonNegativeFloat, min_scale),
        min_size=(Positive, min_size),
    )

    def is_factored(path: str, shape: tuple[int, ...]) -> bool:
        spec = specs[path]
        if spec.role in ("vector", "scalar"):
            return False
        need_axes(specs, [path], "adafactor")
        return min(spec.fan_in(shape), spec.fan_out(shape)) >= min_size

    def moments(path: str, x: Any) -> tuple[Any, Any]:
        if not is_factored(path, x.shape):
            return x, jnp.ones((), jnp.float32)
        spec = specs[path]
        return jnp.mean(x, axis=spec.out_axes, keepdims=True), jnp.mean(x, axis=spec.in_axes, keepdims=True)

    def make(path: str, w: Any) -> tuple[Any, ...]:
        # Reduced as in the update, so that on a mesh with explicit axes they lie as they will.
        zeros = jnp.zeros_like(w, jnp.float32)
        return (*moments(path, zeros), zeros) if b1 else moments(path, zeros)

    def rule(now: Now) -> Step:
        fresh = now.t**-decay_power

        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            g, (rows, columns, *mu) = leaf.g, leaf.slots
            axes = layer_axes(specs, leaf.path, g.ndim)
            seen, across = moments(leaf.path, g * g + eps)
            rows = now.keep(as_it_lies(rows + fresh * (seen - rows), rows), rows)
            if is_factored(leaf.path, g.shape):
                columns = now.keep(as_it_lies(columns + fresh * (across - columns), columns), columns)
                mean = jnp.mean(rows, axis=specs[leaf.path].in_axes, keepdims=True)
                u = g * jnp.sqrt(mean / rows) / jnp.sqrt(columns)
            else:
                u = g / jnp.sqrt(rows)
            if clip is not None:
                u = u / jnp.maximum(1.0, _rms(u, axes) / clip)
            if scale_by_parameter:
                u = u * jnp.maximum(_rms(leaf.weight, axes), min_scale)
            if mu:
                u = now.keep(b1 * mu[0] + (1.0 - b1) * u, mu[0])
                return u, (rows, columns, u)
            return u, (rows, columns)

        return step

    slots = 3 if b1 else 2
    return elementwise(common, AdafactorState, slots, rule, make=make, needs_params=scale_by_parameter, reduced=True)


def _rms(x: Any, axes: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True))
