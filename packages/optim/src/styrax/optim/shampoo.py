"""Shampoo: gradients divided by the roots of their covariances on both sides, with steps as long as Adam's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from styrax.core.config import Positive
from styrax.optim.elementwise import ABOVE_ZERO, BELOW_ONE, ByPath, Common, Now, Schedule, debias
from styrax.optim.factor import eigh
from styrax.optim.guard import FusedTransformation
from styrax.optim.matrices import EXACT, gram_products, matrixwise, moments, on_stacks, side_slots
from styrax.optim.specs import ParamSpec
from styrax.optim.spreading import spread
from styrax.optim.together import Together

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class ShampooState(NamedTuple):
    """State of `shampoo`.

    Every tree is like the parameters, with nothing in place of those that are no matrices; all arrays are float32.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update of the matrices (before the first: the rate it will have).
        mu: First moments, shaped like the parameters.
        nu: Second moments, shaped like the parameters, for the length of Adam's step.
        left: Averages of `g g^T`, `[matrices, inputs, inputs]`; nothing where there are too many inputs.
        right: Averages of `g^T g`, `[matrices, outputs, outputs]`; nothing where there are too many outputs.
        left_root: Inverse root of `left` when it was last computed.
        right_root: Inverse root of `right` when it was last computed.
        adam: State of the AdamW that has the rest.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any
    left: Any
    right: Any
    left_root: Any
    right_root: Any
    adam: Any

    stacked_fields = ("left", "right", "left_root", "right_root")


def shampoo(
    learning_rate: float | Float[Array, ""] = 1.8e-3,
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Schedule | None = None,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-12,
    adam_eps: float = 1e-8,
    frequency: int = 10,
    max_precond_dim: int = 8192,
    weight_decay: ByPath = 0.01,
    lr_multipliers: ByPath = 1.0,
    adam: Mapping[str, Any] | None = None,
) -> FusedTransformation:
    """Momentum between the inverse fourth roots of the average `g g^T` and `g^T g`, as long as the step of Adam.

    For each matrix (each copy and head of a parameter is one), `[inputs, outputs]`, with the symbols of `adamw`:

        mu = b1 mu + (1 - b1) g;     nu = b2 nu + (1 - b2) g^2
        L = b2 L + (1 - b2) g g^T;   R = b2 R + (1 - b2) g^T g
        at the first of every `frequency` updates:   PL = (L / (1 - b2^t))^(-1/4);   PR = (R / (1 - b2^t))^(-1/4)
        m = mu / (1 - b1^t)
        a = m / (sqrt(nu / (1 - b2^t)) + adam_eps)
        s = PL m PR;   update = -k eta ( s ||a||_F / ||s||_F + d w )

    A root is taken of the eigenvalues, from which the smallest is subtracted if it is negative and to which `eps` is
    added. A side with more than `max_precond_dim` rows is left out and the other one's power is then -1/2; a matrix
    with two such sides has the step `a`. Embeddings, heads, vectors and scalars are updated by `adamw` with the same
    schedule, decays and multipliers. A matrix whose axes nobody gave is refused by name. Matrices of equal shape are
    one batch.

    On several devices each takes whole matrices of a batch (see `styrax.optim.spreading.spread`): the gradient and the
    momentum there and the step back move by an all-to-all each, and so do the sides unless their copies lie on the
    devices already, as `styrax.optim.sharding.init` lays those of stacked layers whose number the devices divide.

    `update` takes `learning_rate` and `verdict` as `adamw` does; with `learning_rate`, AdamW's own rate changes in
    proportion.

    Args:
        learning_rate: Peak learning rate of the matrices.
        specs: Path -> role and axes, from `styrax.optim.specs`.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment and of `L` and `R`, in [0, 1).
        eps: Added to the eigenvalues, in units of the squared gradient; above 0.
        adam_eps: Added to the root of the second moment; above 0.
        frequency: Updates from one computation of the roots to the next.
        max_precond_dim: Longest side that has a statistic.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.
        adam: Arguments of AdamW for the rest: `learning_rate` (by default the one above), `b1`, `b2` (0.9, 0.95),
            `eps` (1e-8), `weight_decay`.

    Returns:
        A transformation with state `ShampooState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range; all are listed. At `init`: a parameter is not in `specs`, or a matrix has
            no axes.
        ValueError: As `adamw`.

    Source: Gupta et al. 2018, arXiv 1802.09568; grafting and eigenvalues: Shi et al. 2023, arXiv 2309.06497, without
        their division of long sides into blocks.

    Example:
        >>> from styrax.optim.specs import specs
        >>> params = {"kernel": jnp.eye(2)}
        >>> tx = shampoo(0.1, specs=specs(params), weight_decay=0.0)
        >>> grads = {"kernel": jnp.array([[3.0, 0.0], [0.0, -4.0]])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> [round(float(u), 3) for u in jnp.diag(updates["kernel"])]
        [-0.1, 0.1]
    """
    common = Common("shampoo", learning_rate, schedule, weight_decay, lr_multipliers)
    common.check(
        b1=(BELOW_ONE, b1),
        b2=(BELOW_ONE, b2),
        eps=(ABOVE_ZERO, eps),
        adam_eps=(ABOVE_ZERO, adam_eps),
        frequency=(Positive, frequency),
        max_precond_dim=(Positive, max_precond_dim),
    )

    def begin(leaves: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        return *moments(leaves, 2), *side_slots(specs, leaves, max_precond_dim)

    def one(now: Now, g: Array, mu: Array, nu: Array, *sides: Array) -> tuple[Array, ...]:
        axes = [axis for axis in (1, 2) if g.shape[axis] <= max_precond_dim]
        mu = now.keep(b1 * mu + (1.0 - b1) * g, mu)
        nu = now.keep(b2 * nu + (1.0 - b2) * jnp.square(g), nu)
        larger = debias(b2, now.t)
        m = mu * debias(b1, now.t)
        direction = m / (jnp.sqrt(nu * larger) + adam_eps)
        if not axes:
            return direction, mu, nu
        due = now.keep(now.count % frequency == 0, jnp.zeros((), jnp.bool_))

        def preconditioned(g: Array, m: Array, *sides: Array) -> tuple[Array, ...]:
            grams, roots = sides[: len(axes)], sides[len(axes) :]
            grams = [now.keep(b2 * old + (1.0 - b2) * new, old) for old, new in zip(grams, gram_products(g, axes))]
            roots = jax.lax.cond(
                due,
                lambda grams, roots: [_power(larger * gram, -0.5 / len(axes), eps) for gram in grams],
                lambda grams, roots: roots,
                grams,
                list(roots),
            )
            for axis, root in zip(axes, roots):
                m = jnp.matmul(*((root, m) if axis == 1 else (m, root)), precision=EXACT)
            return m, *grams, *roots

        step, *new = spread(preconditioned, home=len(sides))(g, m, *sides)
        return step * (_norm(direction) / jnp.maximum(_norm(step), 1e-30)), mu, nu, *new

    def step(now: Now, same: Together, grads: dict[str, Any], slots: tuple[Any, ...]) -> tuple[Any, ...]:
        return *on_stacks(same.specs, functools.partial(one, now), grads, slots, whole=2), True

    return matrixwise(common, ShampooState, specs, dict(adam or {}), begin, step)


def _power(gram: Array, power: float, eps: float) -> Array:
    values, vectors = eigh(gram)
    values = values - jnp.minimum(values[:, :1], 0.0) + eps
    return jnp.einsum("nij,nj,nkj->nik", vectors, values**power, vectors, precision=EXACT)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True))
