"""Adam-mini: AdamW with one second moment for each block of a parameter, in half the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from styrax.core.tree import match
from styrax.optim.elementwise import (
    BELOW_ONE,
    Common,
    Leaf,
    Now,
    Step,
    as_it_lies,
    debias,
    elementwise,
    gathered,
)
from styrax.optim.guard import FusedTransformation
from styrax.optim.specs import ParamSpec, need_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FULL = ("**/*bias",)
"""Patterns of the vectors with a second moment for each element; the rest, norm scales, have one for all."""


class AdamMiniState(NamedTuple):
    """State of `adam_mini`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        mu: First moments, float32, a tree like the parameters.
        nu: Second moments, float32, one a block: axes that a block goes along are 1, and where outputs are divided into
            heads the first axis of the outputs is the heads and the others are 1.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any


def adam_mini(
    learning_rate: float | Float[Array, ""],
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float | Mapping[str, float] = 1e-8,
    full: tuple[str, ...] = FULL,
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """AdamW whose second moment is a mean over each block of a parameter, with decoupled weight decay.

    With `g` the gradient (scaled by the verdict), `t` counting applied updates from 1, and per parameter `w` a
    multiplier `k` and a decay `d`:

        mu = b1 mu + (1 - b1) g                         nu = b2 nu + (1 - b2) mean over the block of g^2
        direction = mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps)
        update = -k eta (direction + d w),              eta = learning_rate * schedule(t - 1)

    The blocks, in each stacked layer alone:

        matrix with heads (query, key)      all that leads to one head
        other matrix, head                  all that leads to one output
        embed                               the row of one token
        vector                              all of it; each element alone if its path fits `full` (biases)

    So give `heads` in the `specs` to query and key only: the authors divide values by output. State is about half of
    AdamW's. Arguments not named here, `update`'s extra arguments and the handling of leaves are those of
    `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        specs: Path -> description, from `styrax.optim.specs`.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, for every parameter, or one by path; above 0.
        full: Path patterns of vectors whose elements are blocks of their own.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `AdamMiniState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number; all are listed. At `init`, the axes of a parameter with more
            than two are not known.
        ValueError: As `adamw`.

    Source: Zhang et al. 2024, arXiv 2406.16793, algorithms 1 and 3; `adam_mini` 1.1.1.

    Example:
        >>> from styrax.optim.specs import specs
        >>> w = {"q": {"kernel": jnp.ones((4, 6))}, "up": {"kernel": jnp.ones((4, 6))}, "norm": {"scale": jnp.ones(4)}}
        >>> state = adam_mini(1e-3, specs=specs(w, heads={"q/kernel": 2})).init(w)
        >>> state.nu["q"]["kernel"].shape, state.nu["up"]["kernel"].shape, state.nu["norm"]["scale"].shape
        ((1, 2), (1, 6), (1,))
    """
    common = Common("adam_mini", learning_rate, schedule, weight_decay, lr_multipliers, eps)
    common.check(b1=(BELOW_ONE, b1), b2=(BELOW_ONE, b2))

    def along(path: str, ndim: int) -> tuple[int, ...]:
        spec = specs[path]
        if spec.role in ("vector", "scalar"):
            alone = any(match(pattern, path) for pattern in full)
            return () if alone else tuple(axis for axis in range(ndim) if axis not in spec.stack_axes)
        return spec.out_axes if spec.role == "embed" else spec.in_axes

    def has_heads(path: str) -> bool:
        return specs[path].heads > 1 and specs[path].role in ("matrix", "head")

    def means(path: str, x: Any) -> Any:
        if not x.size:
            return x  # which has no mean
        x = jnp.mean(x, axis=along(path, x.ndim), keepdims=True)
        return _by_head(specs[path], x) if has_heads(path) else x

    def make(path: str, w: Any) -> tuple[Any, ...]:
        if specs[path].role not in ("vector", "scalar"):
            need_axes(specs, [path], "adam_mini")
        zeros = jnp.zeros_like(w, jnp.float32)
        # Reduced as in the update, so that on a mesh with explicit axes they lie as they will.
        return zeros, means(path, zeros)

    def rule(now: Now) -> Step:
        debias1, debias2 = debias(b1, now.t), debias(b2, now.t)

        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            g, (mu, nu) = leaf.g, leaf.slots
            mu = now.keep(b1 * mu + (1.0 - b1) * g, mu)
            nu = now.keep(as_it_lies(b2 * nu + (1.0 - b2) * means(leaf.path, g * g), nu), nu)
            size = debias1 / (jnp.sqrt(debias2 * nu) + common.epsilon(leaf.path))
            if has_heads(leaf.path):
                size = _to_outputs(specs[leaf.path], size, g.shape)
            return mu * size, (mu, nu)

        return step

    return elementwise(common, AdamMiniState, 2, rule, make=make)


def _by_head(spec: ParamSpec, x: Any) -> Any:
    # x has axes of 1 for the inputs. Heads are the slowest of the outputs, as in `to_matrices`. The means are few, so
    # they are gathered before a reshape.
    first, *rest = spec.out_axes
    if x.shape[first] == spec.heads:
        return jnp.mean(x, axis=tuple(rest), keepdims=True) if rest else x
    order = _outputs_last(spec, x.ndim)
    moved = gathered(jnp.transpose(x, order))
    kept = moved.shape[: x.ndim - len(spec.out_axes)]
    means = jnp.mean(moved.reshape(*kept, spec.heads, -1), axis=-1)
    return jnp.transpose(means.reshape(*kept, spec.heads, *(1 for _ in rest)), _inverse(order))


def _to_outputs(spec: ParamSpec, x: Any, shape: tuple[int, ...]) -> Any:
    # A number for each head to one for each output; what broadcasts over the inputs is left as it is.
    if shape[spec.out_axes[0]] == spec.heads:
        return x
    order = _outputs_last(spec, x.ndim)
    moved = gathered(jnp.transpose(x, order))
    outputs = [shape[axis] for axis in spec.out_axes]
    kept = moved.shape[: x.ndim - len(outputs)]
    spread = jnp.repeat(moved.reshape(*kept, spec.heads), spec.fan_out(shape) // spec.heads, axis=-1)
    return jnp.transpose(spread.reshape(*kept, *outputs), _inverse(order))


def _outputs_last(spec: ParamSpec, ndim: int) -> list[int]:
    return [axis for axis in range(ndim) if axis not in spec.out_axes] + list(spec.out_axes)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
