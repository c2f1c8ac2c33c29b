"""An average of the weights beside the training, for evaluation: exponential, or over the tail of the run."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import optax

from styrax.core.config import Fraction, NonNegative, mistakes
from styrax.core.errors import UserError
from styrax.core.tree import flatten, unflatten
from styrax.optim.guard import FusedTransformation, check_floating
from styrax.optim.matrices import hollow
from styrax.optim.precision import LOW, rounded

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class AveragedState(NamedTuple):
    """State of `averaged`.

    Attributes:
        inner: State of the optimizer.
        seen: Applied updates so far; skipped steps do not count.
        average: Average of the weights, float32, a tree like the parameters.
    """

    inner: Any
    seen: Int[Array, ""]
    average: Any

    def eval_params(self, params: Any) -> Any:
        """Give the average in the parameters' dtypes; see `styrax.optim.evaluation.eval_params`."""
        average = flatten(self.average)
        return unflatten(
            params,
            {path: average[path].astype(w.dtype) if path in average else w for path, w in flatten(params).items()},
        )


def averaged(
    inner: optax.GradientTransformation, *, decay: float = 0.999, start: int = 0, without: Collection[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Keep an average of the weights that an optimizer makes, without touching the training.

    With `w` the weights after an update, rounded as they are in their own dtype, and `n` counting the applied updates
    after the first `start`:

        average = average + c (w - average),            c = (1 - decay) / (1 - decay^n)

    which is the exponential average with Adam's bias correction: the first `w` counts in full, and 0.999 is no worse
    than a plain mean before 1,000 updates. `decay = 1` is its limit `c = 1 / n`, the plain mean of the tail that begins
    after `start` updates (Polyak and Ruppert). Until then `average` is `w`.

    `styrax.optim.eval_params(state, params)` gives the average. On a step that the guard skips nothing moves, if the
    inner transformation takes its verdict (`adamw` and its like) or the guard is outside.

    Args:
        inner: The optimizer. Its updates are passed on as they are, and extra arguments of `update` are passed to it.
        decay: Of the average, in [0, 1]; 1 is the plain mean.
        start: Applied updates before the average begins.
        without: Paths of parameters that have no average, such as frozen ones.

    Returns:
        A transformation with state `AveragedState`, a `FusedTransformation` if `inner` is one.

    Raises:
        UserError: `decay` or `start` is out of range.
        ValueError: At `init`, a parameter is not a real floating array; at `update`, `params` was not given.

    Source: Polyak and Juditsky 1992; Morales-Brotons et al. 2024, arXiv 2411.18704 (exponential averages of weights).

    Example:
        >>> tx = averaged(optax.sgd(0.5), decay=0.9)
        >>> w = {"w": jnp.ones(1)}
        >>> updates, state = tx.update({"w": jnp.ones(1)}, tx.init(w), w)
        >>> float(state.average["w"][0])
        0.5
    """
    problems = mistakes({"decay": (Fraction, decay), "start": (NonNegative, start)})
    if problems:
        raise UserError("\n  ".join(["averaged:", *problems]))
    fused = isinstance(inner, FusedTransformation)
    inner = inner if fused else optax.with_extra_args_support(inner)

    def init(params: Any) -> AveragedState:
        leaves = flatten(params)
        check_floating(leaves, "parameter")
        # A copy: a step that donates parameters and state must not find one buffer in both.
        average = {path: jnp.array(w, jnp.float32, copy=True) for path, w in leaves.items() if path not in without}
        tree = unflatten(hollow(params, average.keys()), average)
        return AveragedState(inner.init(params), jnp.zeros((), jnp.int32), tree)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AveragedState]:
        average, weights = flatten(state.average), flatten(params)
        missing = [path for path in average if path not in weights]
        if missing:
            raise ValueError("averaged: `params` was not given or lacks " + ", ".join(map(repr, missing)))
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        verdict, steps = extra.get("verdict"), flatten(updates)
        seen: Any = optax.safe_increment(state.seen)
        n = jnp.maximum(seen - start, 1)
        share = _share(decay, n.astype(jnp.float32))
        if verdict is not None:
            seen = jnp.where(verdict.apply, seen, state.seen)
        for path, old in average.items():
            dtype = jnp.asarray(weights[path]).dtype
            w = jnp.asarray(weights[path] + steps[path] if path in steps else weights[path])
            # As `optax.apply_updates` leaves it; XLA may drop a conversion down and up again, but not this.
            w = rounded(w.astype(jnp.float32), dtype) if dtype in LOW else w.astype(jnp.float32)
            new = jnp.where(n == 1, w, old + share * (w - old))  # the first to the bit
            average[path] = new if verdict is None else jnp.where(verdict.apply, new, old)
        return updates, AveragedState(inner_state, seen, unflatten(state.average, average))

    return FusedTransformation(init, update) if fused else optax.GradientTransformationExtraArgs(init, update)


def _share(decay: float, n: Float[Array, ""]) -> Any:
    if decay == 1.0:
        return 1.0 / n
    # 1 - decay^n without the cancellation in float32.
    return 1.0 if decay == 0.0 else (1.0 - decay) / -jnp.expm1(n * math.log(decay))
