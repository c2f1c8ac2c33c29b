"""Adaptive gradient clipping: each unit's gradient is held to a share of the unit's own norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from styrax.core.config import NonNegativeFloat, PositiveFloat, mistakes
from styrax.core.errors import UserError, nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.guard import FusedTransformation, Verdict, check_floating, obeyed
from styrax.optim.roles import ROLES, Role
from styrax.optim.specs import ParamSpec, need_axes


def agc(
    inner: optax.GradientTransformation,
    clipping: float = 0.01,
    eps: float = 1e-3,
    *,
    specs: Mapping[str, ParamSpec],
    exclude: Collection[Role] = ("head",),
) -> FusedTransformation:
    """Clip the gradient of every unit to a share of the norm of its weights, before an optimizer.

    With `w` and `g` the weights and the gradient of one unit, and `s` the verdict's scale (1 without a guard),

        g' = g min(1, clipping max(|w|, eps) / |s g|)

    A unit of a matrix or a head is one output: the norms are over its input axes, for each copy (layer, expert) and
    output by itself. A unit of an embedding is one row, the vector of one token. A vector is one unit (for each copy),
    and a scalar is one. A unit with a gradient of zeros has zeros.

    Args:
        inner: The optimizer: any of optax, or one that takes the guard's verdict. It sees the clipped gradient; extra
            arguments of `update` are passed to it.
        clipping: Largest `|g| / |w|` to let pass; 0.01 is for batches of thousands of images, 0.02 to 0.16 for smaller.
        eps: Least norm of weights to count with, so that weights of zero can move; above 0.
        specs: Path -> description, from `styrax.optim.specs`.
        exclude: Roles that are not clipped. The source leaves out the last layer, for it trains worse if clipped.

    Returns:
        A transformation with the state of `inner`.

    Raises:
        UserError: A constant is out of range or a role is none; at `init`, a parameter has no description, or one
            whose axes nobody gave (all are listed).
        ValueError: At `init`, a parameter is no real floating array; at `update`, one to clip by was not given.

    Source: Brock et al. 2021, arXiv 2102.06171, section 4 (its units, as in `optax.adaptive_grad_clip`).

    Example:
        >>> w = {"w": jnp.ones((4, 2))}
        >>> tx = agc(optax.sgd(1.0), 0.5, specs={"w": ParamSpec("matrix", "io")})
        >>> updates, _ = tx.update({"w": jnp.ones((4, 2)) * jnp.array([0.25, 4.0])}, tx.init(w), w)
        >>> [float(x) for x in updates["w"][0]]
        [-0.25, -0.5]
    """
    problems = mistakes({"clipping": (NonNegativeFloat, clipping), "eps": (PositiveFloat, eps)})
    problems += [f"exclude: {role!r} is no role{nearest(str(role), ROLES)}" for role in exclude if role not in ROLES]
    if problems:
        raise UserError("\n  ".join(["agc:", *problems]))

    def init(params: Any) -> Any:
        leaves = flatten(params)
        check_floating(leaves, "parameter")
        missing = [f"{path!r}{nearest(path, specs)}" for path in leaves if path not in specs]
        if missing:
            raise UserError("\n  ".join(["agc: `specs` have nothing for these parameters:", *missing]))
        need_axes(specs, [path for path, w in leaves.items() if _by_axes(specs[path], jnp.ndim(w), exclude)], "agc")
        return inner.init(params)

    def update(
        updates: Any, state: Any, params: Any = None, *, verdict: Verdict | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        grads, weights = flatten(updates), flatten(params)
        clipped = [path for path in grads if specs[path].role not in exclude]
        missing = [path for path in clipped if path not in weights]
        if missing:
            raise ValueError("agc: `params` was not given or lacks " + ", ".join(map(repr, missing)))
        for path in clipped:
            g = jnp.asarray(grads[path]).astype(jnp.float32)
            axes = _within(specs[path], g.ndim)
            norm, weight = _norm(g, axes), _norm(weights[path], axes)
            norm = norm if verdict is None else norm * verdict.scale
            limit = clipping * jnp.maximum(weight, eps)
            # A limit and a norm of 0 must not make a NaN.
            grads[path] = g * jnp.where(norm > limit, limit / norm, 1.0)
        return obeyed(inner, verdict, unflatten(updates, grads), state, params, extra)

    return FusedTransformation(init, update)


def _by_axes(spec: ParamSpec, ndim: int, exclude: Collection[str]) -> bool:
    return spec.role not in exclude and spec.role in ("matrix", "embed", "head") and ndim > 1


def _within(spec: ParamSpec, ndim: int) -> tuple[int, ...]:
    """Give the axes that one unit has."""
    if spec.role in ("matrix", "head") and spec.in_axes:
        return spec.in_axes
    if spec.role == "embed" and spec.out_axes:
        return spec.out_axes
    return tuple(axis for axis in range(ndim) if axis not in spec.stack_axes)


def _norm(x: Any, axes: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.asarray(x).astype(jnp.float32)), axis=axes, keepdims=True))
