"""PSGD with Kronecker factors: a preconditioner on each side that is fitted to gradients and noise, never inverted."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from styrax.core.config import NonNegative, Positive
from styrax.optim.elementwise import ABOVE_ZERO, BELOW_ONE, ByPath, Common, Now, Schedule, debias
from styrax.optim.guard import FusedTransformation
from styrax.optim.matrices import EXACT, matrixwise, moments, on_stacks, stack_shape
from styrax.optim.specs import ParamSpec
from styrax.optim.spreading import spread
from styrax.optim.together import Together

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32

FLAT, DECAY, LEAST = 500, 0.001, 0.03
"""Updates with a fit at each, then how fast its frequency falls, and how far."""


class KronState(NamedTuple):
    """State of `kron`.

    Every tree is like the parameters, with nothing in place of those that are no matrices; all arrays are float32.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update of the matrices (before the first: the rate it will have).
        mu: First moments, shaped like the parameters.
        left: Factors of the inputs: upper triangles `[matrices, inputs, inputs]`, or diagonals `[matrices, inputs]`.
        right: Factors of the outputs, likewise.
        adam: State of the AdamW that has the rest.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    left: Any
    right: Any
    adam: Any

    stacked_fields = ("left", "right")


def kron(
    learning_rate: float | Float[Array, ""] = 3e-4,
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Schedule | None = None,
    b1: float = 0.9,
    precond_lr: float = 0.1,
    max_size_triangular: int = 8192,
    seed: int = 0,
    weight_decay: ByPath = 0.0,
    lr_multipliers: ByPath = 1.0,
    adam: Mapping[str, Any] | None = None,
) -> FusedTransformation:
    """Momentum times a fitted preconditioner, which makes it as white as noise.

    For each matrix (each copy and head of a parameter is one), `[inputs, outputs]`, with the symbols of `adamw`:

        mu = b1 mu + (1 - b1) g;     m = mu / (1 - b1^t)
        when a fit is due (`fit_due`), with V standard normal:
            every hundredth time first scale QL and QR so that their greatest entries are equal
            G = m + sqrt(2^-23) mean|m| V
            A = QL G QR^T;           B = QL^-T V QR^-1
            QL = QL - precond_lr triu(A A^T - B B^T) / bound(A A^T + B B^T) QL
            QR = QR - precond_lr triu(A^T A - B^T B) / bound(A^T A + B^T B) QR
        u = QL^T QL m QR^T QR
        update = -k eta ( u min(1, 1.1 / (rms(u) + 1e-6)) + d w )

    `bound` is a lower bound of the greatest singular value. A side with more than `max_size_triangular` rows, or with
    one, has a diagonal factor, whose bound is its greatest entry. A matrix of zeros leaves its factors alone, which
    would grow without end. Embeddings, heads, vectors and scalars are updated by `adamw` with the same schedule, decays
    and multipliers. A matrix whose axes nobody gave is refused by name. Matrices of equal shape are one batch.

    The noise depends on the seed, the update, the path and the copy alone, so a resumed run and all replicas draw the
    same.

    On several devices each takes whole matrices of a batch (see `styrax.optim.spreading.spread`): the momentum there
    and the step back move by an all-to-all each, and so do the sides unless their copies lie on the devices already, as
    `styrax.optim.sharding.init` lays those of stacked layers whose number the devices divide.

    `update` takes `learning_rate` and `verdict` as `adamw` does; with `learning_rate`, AdamW's own rate changes in
    proportion.

    Args:
        learning_rate: Peak learning rate of the matrices.
        specs: Path -> role and axes, from `styrax.optim.specs`.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        precond_lr: How far a fit goes; above 0.
        max_size_triangular: Longest side that has a triangular factor.
        seed: Of the noise.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.
        adam: Arguments of AdamW for the rest: `learning_rate` (by default the one above), `b1`, `b2` (0.9, 0.95),
            `eps` (1e-8), `weight_decay`.

    Returns:
        A transformation with state `KronState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range; all are listed. At `init`: a parameter is not in `specs`, or a matrix has
            no axes.
        ValueError: As `adamw`.

    Source: Li 2018, arXiv 1512.04202, and Pooladzandi and Li 2024, arXiv 2402.04553, as in
        github.com/evanatyourservice/kron_torch, which counts the updates between fits where this has a formula.

    Example:
        >>> from styrax.optim.specs import specs
        >>> params = {"kernel": jnp.eye(2)}
        >>> tx = kron(0.1, specs=specs(params))
        >>> updates, state = tx.update({"kernel": jnp.eye(2)}, tx.init(params), params)
        >>> updates["kernel"].shape, [side.shape for side in (state.left["kernel"], state.right["kernel"])]
        ((2, 2), [(1, 2, 2), (1, 2, 2)])
    """
    common = Common("kron", learning_rate, schedule, weight_decay, lr_multipliers)
    common.check(
        b1=(BELOW_ONE, b1),
        precond_lr=(ABOVE_ZERO, precond_lr),
        max_size_triangular=(Positive, max_size_triangular),
        seed=(NonNegative, seed),
    )

    def factor(copies: int, side: int) -> Array:
        diagonal = side == 1 or side > max_size_triangular
        return jnp.ones((copies, side)) if diagonal else jnp.zeros((copies, side, side)) + jnp.eye(side)

    def begin(leaves: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        shapes = {path: stack_shape(specs[path], w.shape) for path, w in leaves.items()}
        return *moments(leaves, 1), *(
            {path: factor(shape[0], shape[axis]) for path, shape in shapes.items()} for axis in (1, 2)
        )

    def one(now: Now, g: Array, mu: Array, keys: Array, left: Array, right: Array) -> tuple[Array, ...]:
        mu = now.keep(b1 * mu + (1.0 - b1) * g, mu)
        due, number = fit_due(now.count)
        due = now.keep(due, jnp.zeros((), jnp.bool_))

        def whitened(m: Array, keys: Array, left: Array, right: Array) -> tuple[Array, ...]:
            def fitted(keys: Array, left: Array, right: Array) -> tuple[Array, Array]:
                noise = jax.vmap(
                    lambda key: jax.random.normal(jax.random.wrap_key_data(key, impl="threefry2x32"), m.shape[1:])
                )
                return _fit(m, noise(keys), left, right, precond_lr, number % 100 == 0)

            left, right = jax.lax.cond(due, fitted, lambda keys, left, right: (left, right), keys, left, right)
            u = m
            for times in (_times, _times_transposed):
                u = times(left, u)
                u = jnp.swapaxes(times(right, jnp.swapaxes(u, 1, 2)), 1, 2)
            return u, keys, left, right

        u, keys, left, right = spread(whitened, home=3)(mu * debias(b1, now.t), keys, left, right)
        rms = jnp.sqrt(jnp.mean(jnp.square(u), axis=(1, 2), keepdims=True))
        return u * jnp.minimum(1.0, 1.1 / (rms + 1e-6)), mu, keys, left, right

    def step(now: Now, same: Together, grads: dict[str, Any], slots: tuple[Any, ...]) -> tuple[Any, ...]:
        mu, left, right = slots
        keys = {}
        for first in grads:
            paths = same.members[first]
            copies = left[first].shape[0] // len(paths)
            keys[first] = jnp.concatenate([noise_keys(seed, now.count, path, copies) for path in paths])
        one_now = functools.partial(one, now)
        directions, (mu, _, left, right) = on_stacks(same.specs, one_now, grads, (mu, keys, left, right), whole=1)
        return directions, (mu, left, right), True

    return matrixwise(common, KronState, specs, dict(adam or {}), begin, step)


def fit_due(count: Int[Array, ""]) -> tuple[Bool[Array, ""], Int[Array, ""]]:
    """Tell whether the factors are fitted in the update after `count` others, and which fit it is, from 1.

    At first they are in every update; after 500 the frequency falls as `exp(-(count - 500) / 1000)` to 3 %.

    Example:
        >>> [int(fit_due(jnp.int32(count))[1]) for count in (0, 99, 500, 5000)]
        [1, 100, 500, 1499]
    """

    def fits(t: Array) -> Array:
        # The integral of the frequency, so that nothing needs to be counted.
        falling = -math.log(LEAST) / DECAY
        late = jnp.maximum(t - FLAT, 0.0)
        fell = (1.0 - jnp.exp(-DECAY * jnp.minimum(late, falling))) / DECAY
        return jnp.floor(jnp.minimum(t, FLAT) + fell + LEAST * jnp.maximum(late - falling, 0.0)).astype(jnp.int32)

    before, after = fits(count.astype(jnp.float32)), fits(count.astype(jnp.float32) + 1.0)
    return (count < FLAT) | (after > before), jnp.where(count < FLAT, count + 1, after)


def noise_keys(seed: int, count: Any, path: str, copies: int) -> UInt32[Array, "copies 2"]:
    """Make the keys of the noise of one parameter in one update."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(path.encode()))
    return jax.random.key_data(jax.random.split(jax.random.fold_in(key, count), copies))


def _fit(m: Array, v: Array, left: Array, right: Array, rate: float, balance: Any) -> tuple[Array, Array]:
    old = left, right
    most = [jnp.max(jnp.abs(q.reshape(q.shape[0], -1)), axis=1) for q in old]
    mean = jnp.sqrt(most[0] * most[1])
    left, right = (
        q * jnp.where(balance, mean / top, 1.0).reshape(-1, *(1,) * (q.ndim - 1)) for q, top in zip(old, most)
    )
    g = m + (2.0**-23) ** 0.5 * jnp.mean(jnp.abs(m), axis=(1, 2), keepdims=True) * v
    a = jnp.swapaxes(_times(right, jnp.swapaxes(_times(left, g), 1, 2)), 1, 2)
    b = jnp.swapaxes(_solve(right, jnp.swapaxes(_solve(left, v), 1, 2)), 1, 2)
    sides = ((left, a, b), (right, jnp.swapaxes(a, 1, 2), jnp.swapaxes(b, 1, 2)))
    some = jnp.max(jnp.abs(m), axis=(1, 2)) > 0
    new = (_step(q, a, b, rate) for q, a, b in sides)
    left, right = (jnp.where(some.reshape(-1, *(1,) * (q.ndim - 1)), q, before) for q, before in zip(new, old))
    return left, right


def _step(q: Array, a: Array, b: Array, rate: float) -> Array:
    tiny = jnp.finfo(jnp.float32).tiny
    if q.ndim == 2:
        one, two = (jnp.sum(jnp.square(x), axis=2) for x in (a, b))
        return q - rate * (one - two) / (jnp.max(one + two, axis=1, keepdims=True) + tiny) * q
    one, two = (jnp.einsum("nij,nkj->nik", x, x, precision=EXACT) for x in (a, b))
    bound = _norm_bound(one + two)[:, None, None] + tiny
    return q - rate * jnp.matmul(jnp.triu(one - two) / bound, q, precision=EXACT)


def _norm_bound(x: Array) -> Array:
    # Of the greatest singular value of symmetric matrices, by one step from their longest column.
    top = jnp.max(jnp.abs(x), axis=(1, 2))
    x = x / jnp.where(top > 0, top, 1.0)[:, None, None]
    longest = jnp.argmax(jnp.sum(jnp.square(x), axis=1), axis=1)
    row = jnp.einsum("ni,nij->nj", jnp.take_along_axis(x, longest[:, None, None], axis=2)[:, :, 0], x, precision=EXACT)
    row = row / jnp.maximum(jnp.linalg.norm(row, axis=1, keepdims=True), 1e-30)
    return top * jnp.linalg.norm(jnp.einsum("nj,nij->ni", row, x, precision=EXACT), axis=1)


def _times(q: Array, x: Array) -> Array:
    return q[:, :, None] * x if q.ndim == 2 else jnp.matmul(q, x, precision=EXACT)


def _times_transposed(q: Array, x: Array) -> Array:
    return _times(q, x) if q.ndim == 2 else jnp.einsum("nji,njk->nik", q, x, precision=EXACT)


def _solve(q: Array, x: Array) -> Array:
    # With the transpose of the triangle.
    return x / q[:, :, None] if q.ndim == 2 else jax.scipy.linalg.solve_triangular(q, x, trans=1)
