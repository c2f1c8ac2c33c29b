"""SOAP: Adam in the slowly turning eigenbases of Shampoo's preconditioner."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from styrax.core.config import Positive
from styrax.optim.elementwise import ABOVE_ZERO, BELOW_ONE, ByPath, Common, Now, Schedule, debias
from styrax.optim.factor import eigh, orthogonal
from styrax.optim.guard import FusedTransformation
from styrax.optim.matrices import EXACT, gram_products, matrixwise, moments, on_stacks, side_slots
from styrax.optim.specs import ParamSpec
from styrax.optim.spreading import spread
from styrax.optim.together import Together

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class SoapState(NamedTuple):
    """State of `soap`.

    Every tree is like the parameters, with nothing in place of those that are no matrices; all arrays are float32.

    Attributes:
        count: Updates applied so far; skipped steps do not count, the first call does.
        learning_rate: Rate of the last applied update of the matrices (before the first: the rate it will have).
        mu: First moments, shaped like the parameters, not rotated.
        nu: Second moments of the rotated gradients, shaped like the parameters.
        left: Averages of `g g^T`, `[matrices, inputs, inputs]`; nothing where there are too many inputs.
        right: Averages of `g^T g`, `[matrices, outputs, outputs]`; nothing where there are too many outputs.
        left_basis: Eigenvectors of `left`, roughly, as columns.
        right_basis: Eigenvectors of `right`, roughly, as columns.
        adam: State of the AdamW that has the rest.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any
    adam: Any

    stacked_fields = ("left", "right", "left_basis", "right_basis")


def soap(
    learning_rate: float | Float[Array, ""] = 3e-3,
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Schedule | None = None,
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    frequency: int = 10,
    max_precond_dim: int = 10_000,
    weight_decay: ByPath = 0.01,
    lr_multipliers: ByPath = 1.0,
    adam: Mapping[str, Any] | None = None,
) -> FusedTransformation:
    """Adam on gradients that are rotated into the eigenbases of their average `g g^T` and `g^T g`.

    For each matrix (each copy and head of a parameter is one), `[inputs, outputs]`, with the symbols of `adamw`:

        first call:  L = (1 - b) g g^T;   R = (1 - b) g^T g;   QL, QR = their eigenvectors, greatest eigenvalue first;
                     update = 0
        after it, with t counting the calls from 1:
            mu = b1 mu + (1 - b1) g;      r = QL^T g QR;      nu = b2 nu + (1 - b2) r^2
            a = sqrt(1 - b2^t) / (1 - b1^t)
            update = -k eta ( a QL [ QL^T mu QR / (sqrt(nu) + eps) ] QR^T + d w )
            L = b L + (1 - b) g g^T;      R = b R + (1 - b) g^T g
            every `frequency` calls, on each side:
                sort the columns of Q by diag(Q^T L Q), greatest first, and the side's axis of nu with them
                Q = the orthogonal factor of L Q

    `mu` is kept as it is and rotated when it is used, which is the same as turning it along with each new basis. A
    side with more than `max_precond_dim` rows is not rotated. Embeddings, heads, vectors and scalars are updated by
    `adamw`, from the first call on, with the same schedule, decays and multipliers. A matrix whose axes nobody gave is
    refused by name. Matrices of equal shape are one batch.

    On several devices each takes whole matrices of a batch (see `styrax.optim.spreading.spread`): the gradient and both
    moments there, the step and the second moment back move by an all-to-all each, and so do the sides unless their
    copies lie on the devices already, as `styrax.optim.sharding.init` lays those of stacked layers whose number the
    devices divide.

    `update` takes `learning_rate` and `verdict` as `adamw` does; with `learning_rate`, AdamW's own rate changes in
    proportion.

    Args:
        learning_rate: Peak learning rate of the matrices.
        specs: Path -> role and axes, from `styrax.optim.specs`.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        shampoo_beta: Decay `b` of `L` and `R`, in [0, 1); `None` for `b2`.
        eps: Added to the root of the second moment; above 0.
        frequency: Calls from one new basis to the next.
        max_precond_dim: Longest side that is rotated.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.
        adam: Arguments of AdamW for the rest: `learning_rate` (by default the one above), `b1`, `b2` (0.9, 0.95),
            `eps` (1e-8), `weight_decay`.

    Returns:
        A transformation with state `SoapState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range; all are listed. At `init`: a parameter is not in `specs`, or a matrix has
            no axes.
        ValueError: As `adamw`.

    Source: Vyas et al. 2024, arXiv 2409.11321, algorithm 3, as in github.com/nikhilvyas/SOAP, but for the decay, which
        is of the weights before the update.

    Example:
        >>> from styrax.optim.specs import specs
        >>> params = {"kernel": jnp.eye(2)}
        >>> tx = soap(0.1, specs=specs(params), weight_decay=0.0)
        >>> grads = {"kernel": jnp.array([[3.0, 0.0], [0.0, -4.0]])}
        >>> first, state = tx.update(grads, tx.init(params), params)
        >>> second, state = tx.update(grads, state, params)
        >>> float(jnp.abs(first["kernel"]).max()), [round(float(u), 3) for u in jnp.diag(second["kernel"])]
        (0.0, [-0.1, 0.1])
    """
    common = Common("soap", learning_rate, schedule, weight_decay, lr_multipliers)
    beta = b2 if shampoo_beta is None else shampoo_beta
    common.check(
        b1=(BELOW_ONE, b1),
        b2=(BELOW_ONE, b2),
        shampoo_beta=(BELOW_ONE, beta),
        eps=(ABOVE_ZERO, eps),
        frequency=(Positive, frequency),
        max_precond_dim=(Positive, max_precond_dim),
    )

    def begin(leaves: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        return *moments(leaves, 2), *side_slots(specs, leaves, max_precond_dim)

    def one(now: Now, g: Array, mu: Array, nu: Array, *sides: Array) -> tuple[Array, ...]:
        mu = now.keep(jnp.where(now.count > 0, b1 * mu + (1.0 - b1) * g, mu), mu)

        def rotated(g: Array, mu: Array, nu: Array, *sides: Array) -> tuple[Array, ...]:
            return _rotated_step(now, (g, mu, nu, *sides), b1, b2, beta, eps, frequency, max_precond_dim)

        direction, after, *new = spread(rotated, home=len(sides))(g, mu, nu, *sides)
        return direction, mu, now.keep(jnp.where(now.count > 0, after, nu), nu), *new

    def step(now: Now, same: Together, grads: dict[str, Any], slots: tuple[Any, ...]) -> tuple[Any, ...]:
        return *on_stacks(same.specs, functools.partial(one, now), grads, slots, whole=2), now.count > 0

    return matrixwise(common, SoapState, specs, dict(adam or {}), begin, step)


def _rotated_step(
    now: Now, arrays: tuple[Array, ...], b1: float, b2: float, beta: float, eps: float, frequency: int, limit: int
) -> tuple[Array, ...]:
    # `mu` is new, all the others are old. What becomes of `nu` in the first or a skipped call is thrown away.
    g, mu, nu, *rest = arrays
    # The statistics of the sides that are rotated come first, then their bases.
    axes = [axis for axis in (1, 2) if g.shape[axis] <= limit]
    grams, bases = rest[: len(axes)], rest[len(axes) :]
    nu = b2 * nu + (1.0 - b2) * jnp.square(_rotate(g, axes, bases))
    t = jnp.maximum(now.count, 1).astype(jnp.float32)
    a = debias(b1, t) / jnp.sqrt(debias(b2, t))
    direction = a * _rotate(_rotate(mu, axes, bases) / (jnp.sqrt(nu) + eps), axes, bases, back=True)
    grams = [now.keep(beta * old + (1.0 - beta) * new, old) for old, new in zip(grams, gram_products(g, axes))]

    turn = jnp.where(now.count == 0, 1, jnp.where(now.count % frequency == 0, 2, 0))
    branches = (lambda state: state, _first, lambda state: _next(state, axes))
    nu, _, bases = jax.lax.switch(now.keep(turn, jnp.zeros_like(turn)), branches, (nu, grams, bases))
    return (direction, nu, *grams, *bases)


def _rotate(x: Array, axes: list[int], bases: list[Array], *, back: bool = False) -> Array:
    for axis, q in zip(axes, bases):
        if axis == 1:
            x = jnp.einsum("nji,njk->nik" if not back else "nij,njk->nik", q, x, precision=EXACT)
        else:
            x = jnp.einsum("nij,njk->nik" if not back else "nij,nkj->nik", x, q, precision=EXACT)
    return x


def _first(state: tuple[Array, list[Array], list[Array]]) -> tuple[Array, list[Array], list[Array]]:
    nu, grams, _ = state
    return nu, grams, [jnp.flip(eigh(gram)[1], axis=2) for gram in grams]


def _next(state: tuple[Array, list[Array], list[Array]], axes: list[int]) -> tuple[Array, list[Array], list[Array]]:
    nu, grams, bases = state
    turned = []
    for axis, gram, q in zip(axes, grams, bases):
        product = jnp.matmul(gram, q, precision=EXACT)
        order = jnp.argsort(-jnp.sum(q * product, axis=1), axis=1)
        nu = jnp.take_along_axis(nu, order[:, :, None] if axis == 1 else order[:, None, :], axis=axis)
        turned.append(orthogonal(jnp.take_along_axis(product, order[:, None, :], axis=2)))
    return nu, grams, turned
