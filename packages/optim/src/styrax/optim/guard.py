"""A guard around an optimizer: one norm of the gradient and its history decide clipping, skipping and the log."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from styrax.core.tree import flatten
from styrax.optim.spikes import Spikes, ZClip

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Verdict(NamedTuple):
    """What one look at the gradient decides.

    Attributes:
        norm: Global norm of the gradient before clipping.
        scale: Factor for the gradient; 0 when the step is skipped.
        apply: Whether the step is taken.
    """

    norm: Float[Array, ""]
    scale: Float[Array, ""]
    apply: Bool[Array, ""]


class GuardState(NamedTuple):
    """State of `guard`.

    Attributes:
        inner: State of the guarded transformation.
        grad_norm: Global norm of the last gradient before clipping, whatever it was.
        clip_scale: Factor that was put on that gradient; 0 when the step was skipped.
        skipped: How many steps were skipped so far, whatever for.
        zclip: State of `ZClip`; empty without.
        spikes: State of `Spikes`; empty without.
    """

    inner: Any
    grad_norm: Float[Array, ""]
    clip_scale: Float[Array, ""]
    skipped: Int[Array, ""]
    zclip: Any = ()
    spikes: Any = ()


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation whose `update` takes a `verdict` and obeys it inside its own loop over the arrays.

    `guard` gives such a transformation the raw gradient and the verdict. On `verdict.apply == False` its
    state must come back bit for bit and its updates must be zeros, without looking at the gradient.
    """


def measure(updates: Any, *, clip_norm: float | None = 1.0, skip_nonfinite: bool = True) -> Verdict:
    """Judge a gradient from its global norm.

        n = sqrt(sum g^2) in float32;   scale = min(1, clip_norm / n);   apply = n is finite

    `n` is finite only if every element is. A gradient whose squares overflow float32 counts as non-finite.

    Args:
        updates: Gradients, real floating arrays of any dtype.
        clip_norm: Largest norm to let pass; `None` passes all. 0 and a gradient of zeros are both allowed.
        skip_nonfinite: Whether a non-finite norm stops the step.

    Raises:
        ValueError: Some leaves are not real floating arrays (all are listed), or `clip_norm` is negative or NaN.

    Source: Pascanu et al. 2013, arXiv 1211.5063, algorithm 1.

    Example:
        >>> verdict = measure({"w": jnp.array([3.0, 4.0])}, clip_norm=1.0)
        >>> float(verdict.norm), round(float(verdict.scale), 6)
        (5.0, 0.2)
    """
    check_clip_norm(clip_norm)
    leaves = flatten(updates)
    check_floating(leaves, "gradient")
    squares = [jnp.sum(jnp.square(jnp.asarray(g).astype(jnp.float32))) for g in leaves.values()]
    norm = jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))
    scale = jnp.ones((), jnp.float32)
    if clip_norm is not None:
        scale = jnp.where(norm > clip_norm, clip_norm / norm, scale)
    if not skip_nonfinite:
        return Verdict(norm, scale, jnp.ones((), jnp.bool_))
    apply = jnp.isfinite(norm)
    return Verdict(norm, jnp.where(apply, scale, 0.0), apply)


def guard(
    inner: optax.GradientTransformation,
    *,
    clip_norm: float | None = 1.0,
    skip_nonfinite: bool = True,
    zclip: ZClip | None = None,
    spikes: Spikes | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm and skip steps with a non-finite or a far too large gradient, in one pass before `inner`.

    There is one norm, in float32, of the gradient as it comes: `grad_norm` in the state is the number that was clipped
    by. Of `clip_norm` and the limit that `zclip` sets from the norms so far, the smaller counts. A step is skipped if
    its norm is not finite, or if `spikes` finds it far above the last ones; a finite norm is in both histories even
    then. Clipping by parameter is not done here but by `agc` inside: `guard(agc(adamw(...), specs=...))`.

    On a skipped step every leaf of the inner state keeps its bits (counts included), the updates are zeros,
    and `skipped` grows by one. The rest of the time `inner` sees `scale * g` in float32. Its state keeps the
    dtypes of `inner.init`, so the whole state can be carried through `jax.lax.scan`.

    A `FusedTransformation`, such as `adamw`, takes the verdict itself and then neither a clipped copy of the
    gradient nor a second copy of the state exists. Any other transformation (a chain or mask around `adamw`
    is one) is wrapped in selects, for which XLA may copy its state.

    Args:
        inner: What to guard. Extra arguments of `update` are passed on to it.
        clip_norm: Largest global norm, in the units of the gradient; `None` does not clip.
        skip_nonfinite: Skip a step whose gradient has an infinity or a NaN.
        zclip: Clip norms that are outliers; see `styrax.optim.ZClip`.
        spikes: Skip norms that are spikes; see `styrax.optim.Spikes`.

    Returns:
        A transformation with state `GuardState`. It has the leaves of the options in use alone.

    Raises:
        ValueError: `clip_norm` is negative or NaN, or `zclip` or `spikes` is not what it should be.

    Example:
        >>> tx = guard(optax.sgd(1.0), clip_norm=1.0)
        >>> w = jnp.zeros(2)
        >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(w), w)
        >>> [float(u) == 0 for u in updates], int(state.skipped)
        ([True, True], 1)
    """
    check_clip_norm(clip_norm)
    for name, given, kind in (("zclip", zclip, ZClip), ("spikes", spikes, Spikes)):
        if given is not None and not isinstance(given, kind):
            raise ValueError(f"{name} must be a {kind.__name__}(...) or None, got {given!r}")

    def init(params: Any) -> GuardState:
        one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
        histories = [() if of is None else of.init() for of in (zclip, spikes)]
        return GuardState(inner.init(params), zero, one, jnp.zeros((), jnp.int32), *histories)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, GuardState]:
        norm, scale, apply = measure(updates, clip_norm=clip_norm, skip_nonfinite=skip_nonfinite)
        norms, last = (), ()
        if zclip is not None:
            limit, norms = zclip.update(norm, state.zclip)
            scale = jnp.minimum(scale, jnp.where(norm > limit, limit / norm, 1.0))
        if spikes is not None:
            spike, last = spikes.update(norm, state.spikes)
            scale, apply = jnp.where(spike, 0.0, scale), apply & ~spike
        updates = jax.tree.map(_apart, updates)
        updates, inner_state = obeyed(inner, Verdict(norm, scale, apply), updates, state.inner, params, extra)
        skipped = state.skipped + jnp.logical_not(apply).astype(jnp.int32)
        return updates, GuardState(inner_state, norm, scale, skipped, norms, last)

    return optax.GradientTransformationExtraArgs(init, update)


def selected(
    inner: Any, verdict: Verdict, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Run a transformation that knows no verdict, and keep what it had where the step is not taken."""
    # Zero times NaN is NaN, so a skipped gradient is replaced, not multiplied.
    grads = jax.tree.map(
        lambda g: jnp.where(verdict.apply, jnp.asarray(g).astype(jnp.float32) * verdict.scale, 0.0), updates
    )
    updates, new = inner.update(grads, state, params, **extra)
    # A negative zero is the only number that adds to every float, zeros included, without changing its bits.
    updates = jax.tree.map(lambda u: jnp.where(verdict.apply, u, jnp.asarray(-0.0, u.dtype)), updates)
    return updates, jax.tree.map(lambda a, b: jnp.where(verdict.apply, _as(a, b), b), new, state)


def obeyed(
    inner: Any, verdict: Verdict | None, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Run any transformation below one that was given a verdict, or none: what a wrapper calls for what it wraps."""
    if isinstance(inner, FusedTransformation):
        extra = extra if verdict is None else {**extra, "verdict": verdict}
        return inner.update(updates, state, params, **extra)
    inner = optax.with_extra_args_support(inner)
    if verdict is None:
        return inner.update(updates, state, params, **extra)
    return selected(inner, verdict, updates, state, params, extra)


def _apart(g: Any) -> Any:
    """Let what follows convert a gradient of 16 bits for itself.

    XLA would convert it once for the norm and for what follows, and keep the whole gradient in float32 from one to the
    other. What follows must wait for the norm in any case.
    """
    return jax.lax.optimization_barrier(g) if jnp.dtype(_dtype(g)).itemsize < 4 else g


def _as(new: Any, old: Any) -> Any:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def check_clip_norm(clip_norm: Any) -> None:
    """Refuse what is no norm; a traced one may be anything.

    Raises:
        ValueError: It is negative, NaN, or no number.
    """
    if clip_norm is None or isinstance(clip_norm, jax.Array):
        return
    if not isinstance(clip_norm, numbers.Real) or not float(clip_norm) >= 0:
        raise ValueError(f"clip_norm must be 0 or more, or None for no clipping; got {clip_norm!r}")


def check_floating(leaves: dict[str, Any], what: str) -> None:
    """Refuse leaves that are not real floating arrays.

    Raises:
        ValueError: Lists every such leaf by path.
    """
    wrong = {path: _dtype(x) for path, x in leaves.items() if not jnp.issubdtype(_dtype(x), jnp.floating)}
    if wrong:
        lines = [f"{len(wrong)} {what}(s) are not real floating arrays; mask them out or cast them:"]
        lines += [f"  {path or '(root)'}: {dtype}" for path, dtype in wrong.items()]
        raise ValueError("\n".join(lines))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
