"""Muon for matrices, AdamW for everything else, in one transformation that decides by role and never by rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from styrax.core.config import Fraction, Positive, mistakes
from styrax.core.errors import UserError, nearest
from styrax.optim.elementwise import BELOW_ONE, ByPath, Common, Now, Schedule
from styrax.optim.guard import FusedTransformation
from styrax.optim.matrices import batched, matrixwise, moments
from styrax.optim.orthogonalize import Form, Iteration, find_iteration, orthogonalize
from styrax.optim.specs import ParamSpec
from styrax.optim.spreading import spread
from styrax.optim.together import Together

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Scale = Literal["original", "spectral", "rms"]


class MuonState(NamedTuple):
    """State of `muon`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update of the matrices (before the first: the rate it will have).
        mu: Momentum, float32, a tree like the parameters with nothing in place of those that are no matrices.
        nu: With `normalize`, the mean square per output, float32, such a tree of arrays whose axes of inputs are 1;
            otherwise `None`.
        adam: State of the AdamW that has the rest.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any
    adam: Any


@dataclass(frozen=True, kw_only=True)
class MomentumWarmup:
    """A momentum that begins low, while the gradient changes fast, and rises along a line.

        momentum = start + (end - start) min(1, k / steps)        with k updates applied before

    Attributes:
        start: Of the first update, in [0, 1).
        end: After `steps` updates and for good, in [0, 1).
        steps: Updates from one to the other; above 0.

    Raises:
        UserError: One of them is out of range; all are listed.

    Source: the speed runs of github.com/KellerJordan/modded-nanogpt, whose numbers are the defaults.

    Example:
        >>> [round(float(MomentumWarmup(steps=4)(jnp.int32(k))), 3) for k in (0, 2, 9)]
        [0.85, 0.9, 0.95]
    """

    start: float = 0.85
    end: float = 0.95
    steps: int = 300

    def __post_init__(self) -> None:
        fields = (("start", Fraction, self.start), ("end", Fraction, self.end), ("steps", Positive, self.steps))
        problems = mistakes({name: (limit, value) for name, limit, value in fields})
        problems += [f"{name} must be below 1, got 1" for name in ("start", "end") if getattr(self, name) == 1]
        if problems:
            raise UserError("\n  ".join(["MomentumWarmup:", *problems]))

    def __call__(self, count: Any) -> Float[Array, ""]:
        """Give the momentum of the update after `count` others."""
        part = jnp.minimum(jnp.asarray(count, jnp.float32) / self.steps, 1.0)
        return self.start + (self.end - self.start) * part


def muon(
    learning_rate: float | Float[Array, ""],
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Schedule | None = None,
    momentum: float | Callable[[Any], Any] = 0.95,
    nesterov: bool = True,
    scale: Scale = "original",
    iteration: str | Iteration = "standard",
    form: Form = "plain",
    dtype: Any = jnp.float32,
    normalize: bool = False,
    b2: float = 0.95,
    weight_decay: ByPath = 0.1,
    lr_multipliers: ByPath = 1.0,
    adam: Mapping[str, Any] | None = None,
    orthogonalize_sharding: Literal["stack", "none"] = "stack",
    mesh: Mesh | AbstractMesh | None = None,
    stack_axes: Collection[str] | None = None,
) -> FusedTransformation:
    """Momentum whose singular values are all brought near 1, for the parameters whose role is `matrix`.

    For each matrix (each copy and head of a parameter is one), with `m` inputs, `n` outputs and the symbols of `adamw`:

        mu = momentum mu + (1 - momentum) g
        u = momentum mu + (1 - momentum) g   with nesterov, else   u = mu
        o = orthogonalize(u)
        normalize:  nu = b2 nu + (1 - b2) mean of o^2 over inputs
                    p = o / (sqrt(nu) + 1e-8);   o = p ||o||_F / ||p||_F
        original:   s = sqrt(max(1, n / m))        a good rate is 0.02 to 0.05
        spectral:   s = sqrt(n / m)                a good rate does not change with the width
        rms:        s = 0.2 sqrt(max(m, n))        updates as large as AdamW's: use AdamW's rate and decay
        update = -k eta ( s o + d w )

    Embeddings, heads, vectors and scalars are updated by `adamw` with the same schedule, decays and multipliers. A
    matrix whose axes nobody gave is refused by name. Matrices of equal shape, or equal when transposed, are
    orthogonalized as one batch, so that many separate layers compile as few products.

    On several devices each takes whole matrices of a batch (see `styrax.optim.spreading.spread`): an all-to-all there
    and one back, whichever axes of the parameters are split, and none if the layers themselves are.

    `update` takes `learning_rate` and `verdict` as `adamw` does; with `learning_rate`, AdamW's own rate changes in
    proportion.

    Args:
        learning_rate: Peak learning rate of the matrices.
        specs: Path -> role and axes, from `styrax.optim.specs`.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        momentum: Decay of the momentum, in [0, 1); or a function of the updates applied so far that gives it, such as
            `MomentumWarmup`.
        nesterov: Whether to look ahead. There is no correction of the bias, as the norm does not matter.
        scale: Which factor `s`.
        iteration: See `orthogonalize`.
        form: See `orthogonalize`.
        dtype: See `orthogonalize`.
        normalize: Whether to even out the outputs (NorMuon).
        b2: Decay of the mean square of `normalize`, in [0, 1).
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.
        adam: Arguments of AdamW for the rest: `learning_rate` (by default the one above), `b1`, `b2` (0.9, 0.95),
            `eps` (1e-10), `weight_decay`.
        orthogonalize_sharding: `"none"` leaves the matrices as the compiler likes.
        mesh: The mesh to spread them over if `jax.set_mesh` has set none and the arrays do not tell (see
            `styrax.optim.spreading.mesh_of`): those that lie on one do, also while `jax.jit` traces.
        stack_axes: Axes of the mesh to spread them over; `None` for all.

    Returns:
        A transformation with state `MuonState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no choice; all are listed. At `init`: a parameter is not in `specs`, or
            a matrix has no axes.
        ValueError: As `adamw`.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; rms: Liu et al. 2025, arXiv 2502.16982; spectral:
        Bernstein and Newhouse 2024, arXiv 2410.21265; normalize: Li et al. 2025, arXiv 2510.05491.

    Example:
        >>> from styrax.optim.specs import specs
        >>> params = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
        >>> tx = muon(0.1, specs=specs(params), iteration="refined", weight_decay=0.0)
        >>> grads = {"kernel": jnp.array([[3.0, 0.0], [0.0, -4.0]]), "bias": jnp.array([5.0, -5.0])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> [round(float(u), 3) for u in jnp.diag(updates["kernel"])], [round(float(u), 3) for u in updates["bias"]]
        ([-0.1, 0.1], [-0.1, 0.1])
    """
    common = Common("muon", learning_rate, schedule, weight_decay, lr_multipliers)
    _check_choices(scale, orthogonalize_sharding)
    find_iteration(iteration, form)
    common.check(b2=(BELOW_ONE, b2), **({} if callable(momentum) else {"momentum": (BELOW_ONE, momentum)}))

    def orthogonal(x: Array) -> Array:
        return orthogonalize(x, iteration=iteration, form=form, dtype=dtype)

    whole = spread(orthogonal, mesh, stack_axes) if orthogonalize_sharding == "stack" else orthogonal

    def begin(leaves: dict[str, Any]) -> tuple[dict[str, Any] | None, ...]:
        nu = {path: jnp.zeros(_outputs(specs[path], w.shape), jnp.float32) for path, w in leaves.items()}
        return *moments(leaves, 1), nu if normalize else None

    def step(now: Now, same: Together, grads: dict[str, Any], slots: tuple[Any, ...]) -> Any:
        mu, nu, matrices = {}, {}, {}
        b1 = jnp.asarray(momentum(now.count), jnp.float32) if callable(momentum) else momentum
        for path, g in grads.items():
            m = mu[path] = now.keep(b1 * slots[0][path] + (1.0 - b1) * g, slots[0][path])
            ahead = b1 * m + (1.0 - b1) * g if nesterov else m
            matrices[path] = (same.specs[path].to_matrices(ahead),)
        found = {}
        for path, o in batched(whole, matrices, wide=True).items():
            spec, shape = same.specs[path], grads[path].shape
            o = spec.from_matrices(o, shape)
            if normalize:
                nu[path], o = _even(now, spec, slots[1][path], o, b2)
            found[path] = _factor(scale, spec, shape) * o
        return found, (mu, nu), True

    return matrixwise(common, MuonState, specs, {"eps": 1e-10, **(adam or {})}, begin, step)


def _factor(scale: Scale, spec: ParamSpec, shape: tuple[int, ...]) -> float:
    # Of one head: each is a map of its own.
    inputs, outputs = spec.fan_in(shape), spec.fan_out(shape) // spec.heads
    if scale == "rms":
        return 0.2 * max(inputs, outputs) ** 0.5
    ratio = outputs / inputs
    return (max(1.0, ratio) if scale == "original" else ratio) ** 0.5


def _outputs(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis in spec.in_axes else n for axis, n in enumerate(shape))


def _even(now: Now, spec: ParamSpec, nu: Array, o: Array, b2: float) -> tuple[Array, Array]:
    nu = now.keep(b2 * nu + (1.0 - b2) * jnp.mean(jnp.square(o), axis=spec.in_axes, keepdims=True), nu)
    even = o / (jnp.sqrt(nu) + 1e-8)
    before, after = (spec.to_matrices(x) for x in (o, even))
    old, new = (jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True)) for x in (before, after))
    return nu, spec.from_matrices(after * (old / jnp.maximum(new, 1e-8)), o.shape)


def _check_choices(scale: Any, sharding: Any) -> None:
    problems = [
        f"{name}: expected one of {', '.join(allowed)}, got {value!r}{nearest(str(value), allowed)}"
        for name, value, allowed in (
            ("scale", scale, ("original", "spectral", "rms")),
            ("orthogonalize_sharding", sharding, ("stack", "none")),
        )
        if value not in allowed
    ]
    if problems:
        raise UserError("\n  ".join(["muon:", *problems]))
