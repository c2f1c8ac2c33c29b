"""The nearest semi-orthogonal matrix, roughly, by a few matrix products: what Muon does to its momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from styrax.core.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Form = Literal["plain", "gram"]


@dataclass(frozen=True)
class Iteration:
    """Coefficients of a Newton-Schulz iteration.

    Attributes:
        coefficients: `(a, b, c)` of each step, which maps a singular value `s` to `a s + b s^3 + c s^5`.
        margin: The matrix is divided by `margin` times its Frobenius norm first.
        band: Where the steps take all singular values from 0.01 to 1 of the divided matrix, in exact arithmetic.
        source: Where the coefficients come from.
    """

    coefficients: tuple[tuple[float, float, float], ...]
    margin: float
    band: tuple[float, float]
    source: str


_QUINTIC = (3.4445, -4.7750, 2.0315)

ITERATIONS: Mapping[str, Iteration] = MappingProxyType(
    {
        "standard": Iteration((_QUINTIC,) * 5, 1.0, (0.682, 1.134), "Jordan 2024, kellerjordan.github.io/posts/muon"),
        "dion": Iteration(
            (
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            ),
            1.0,
            (0.978, 1.032),
            "microsoft/dion, newton_schulz_triton.py",
        ),
        "polar_express": Iteration(
            (
                (8.156554524902461, -22.48329292557795, 15.878769915207462),
                (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
            ),
            1.02,
            (0.859, 1.141),
            "Amsel et al. 2025, arXiv 2505.16932",
        ),
        "refined": Iteration(
            ((_QUINTIC,) * 8) + ((2.0, -1.5, 0.5),) * 2,
            1.0,
            (0.999, 1.001),
            "eight standard steps, two of Halley's kind",
        ),
    }
)
"""Name -> coefficients, from fewest digits right to most."""


def orthogonalize(
    x: Float[Array, "*stack rows cols"],
    *,
    iteration: str | Iteration = "standard",
    form: Form = "plain",
    dtype: Any = jnp.float32,
    eps: float = 1e-7,
    restart: int = 2,
) -> Float[Array, "*stack rows cols"]:
    """Bring all singular values of matrices near 1 and keep their singular vectors.

    A matrix with more rows than columns is transposed first and back at the end. With `a, b, c` and `margin` of
    the iteration:

        X = x / (margin ||x||_F + eps)
        plain:  each step   A = X X^T;    X = a X + (b A + c A A) X
        gram:   R = X X^T, Q = I;   each step   P = a I + b R + c R R;   Q = P Q;   R = P R P;   at the end X = Q X

    Both give the same in exact arithmetic. The gram form multiplies by the long side only at the start, at the
    restart and at the end, which for a matrix three times as long as wide saves a quarter of the work of five
    steps (a third without the restart). Rounding makes its `R` drift from `Q X X^T Q^T`, so after `restart` steps it
    begins anew from `X = Q X`, once.

    The singular values end in the `band` of the iteration where `x`'s are above a hundredth of its norm; smaller
    ones end between 0 and the band. Zeros give zeros.

    Args:
        x: Matrices; axes before the last two are copies.
        iteration: A name in `ITERATIONS`, or coefficients.
        form: Which of the two ways to compute it.
        dtype: Of the products: float32, or bfloat16 as usual on accelerators. The norm is float32 in any case.
        eps: Added to the norm.
        restart: After how many steps the gram form begins anew; 0 for never.

    Returns:
        float32, shaped like `x`.

    Raises:
        UserError: There is no such iteration or form, or `restart` is negative.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; gram form: Dao-AILab/gram-newton-schulz.

    Example:
        >>> q = orthogonalize(jnp.array([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]), iteration="refined")
        >>> [[round(float(v), 2) + 0 for v in row] for row in q]
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    chosen = find_iteration(iteration, form)
    if restart < 0:
        raise UserError(f"restart: expected 0 or more, got {restart}")
    tall = x.shape[-2] > x.shape[-1]
    x = x.astype(jnp.float32)
    if tall:
        x = jnp.swapaxes(x, -1, -2)
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = (x / (chosen.margin * norm + eps)).astype(dtype)
    if form == "plain":
        for a, b, c in chosen.coefficients:
            gram = x @ jnp.swapaxes(x, -1, -2)
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    else:
        for rows in (chosen.coefficients[:restart], chosen.coefficients[restart:]):
            x = _gram_steps(x, rows) if rows else x
    x = x.astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if tall else x


def _gram_steps(x: Array, rows: tuple[tuple[float, float, float], ...]) -> Array:
    r = x @ jnp.swapaxes(x, -1, -2)
    eye = jnp.eye(x.shape[-2], dtype=x.dtype)
    q = eye
    for number, (a, b, c) in enumerate(rows):
        p = a * eye + b * r + c * (r @ r)
        q = p @ q if number else p
        if number + 1 < len(rows):
            r = p @ r @ p
    return q @ x


def find_iteration(iteration: str | Iteration, form: str = "plain") -> Iteration:
    """Look an iteration up and check the form, so that a mistake shows before anything is compiled.

    Raises:
        UserError: There is no such iteration or form.
    """
    if form not in ("plain", "gram"):
        raise UserError(f"form: expected 'plain' or 'gram', got {form!r}")
    if isinstance(iteration, Iteration):
        return iteration
    if iteration not in ITERATIONS:
        names = ", ".join(ITERATIONS)
        raise UserError(f"iteration: expected one of {names}, got {iteration!r}{nearest(iteration, ITERATIONS)}")
    return ITERATIONS[iteration]
