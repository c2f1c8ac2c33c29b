"""What to log from an optimizer's state, wherever in it the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from styrax.core.tree import flatten
from styrax.optim.groups import GroupsState
from styrax.optim.guard import GuardState

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def metrics(state: Any) -> dict[str, Float[Array, ""]]:
    """Read the scalars to log out of an optimizer state; works inside and outside `jax.jit`.

    Args:
        state: State of `guard`, alone or anywhere within a chain, also as `nnx.Optimizer` holds it.

    Returns:
        float32 scalars whose keys depend on the optimizer alone: `grad_norm` (before clipping), `clip_scale`
        (factor put on the gradient, 0 for a skipped step), `skipped` (steps skipped so far), and
        `learning_rate` of the last applied update if the state has one (`learning_rate/NAME` for each of several
        groups). The first three are of the last call of `update`, so a skipped step shows its non-finite norm.
        A guard with `zclip` adds `norm_mean` and `norm_std`, what the next norm is judged by; one with `spikes` adds
        `spikes`, the steps skipped for that (they are in `skipped` too).

    Raises:
        ValueError: The state holds no `GuardState`, or more than one.

    Example:
        >>> from styrax.optim import adamw, guard
        >>> state = guard(adamw(0.1)).init({"w": jnp.ones(2)})
        >>> {name: round(float(x), 3) for name, x in sorted(metrics(state).items())}
        {'clip_scale': 1.0, 'grad_norm': 0.0, 'learning_rate': 0.1, 'skipped': 0.0}
    """
    guards = _outermost(state, lambda node: isinstance(node, GuardState))
    if len(guards) != 1:
        advice = "give it the state of one of them" if guards else "wrap the optimizer in guard(...)"
        raise ValueError(f"metrics needs the state of one guard, found {len(guards)} in {type(state)}; {advice}")
    found = {name: getattr(guards[0], name) for name in ("grad_norm", "clip_scale", "skipped")}
    if "mean" in getattr(guards[0].zclip, "_fields", ()):
        found["norm_mean"], found["norm_std"] = guards[0].zclip.mean, guards[0].zclip.variance
    if "skipped" in getattr(guards[0].spikes, "_fields", ()):
        found["spikes"] = guards[0].spikes.skipped
    rates = _outermost(state, lambda node: "learning_rate" in getattr(node, "_fields", ()))
    if len(rates) == 1:
        found["learning_rate"] = rates[0].learning_rate
    for of in _outermost(state, lambda node: isinstance(node, GroupsState)):
        found |= {
            f"learning_rate/{name}": x.learning_rate for name, x in of.inner.items() if hasattr(x, "learning_rate")
        }
    # A number may be wrapped in a variable; its tree then still has one leaf.
    numbers = {name: jnp.asarray(next(iter(flatten(x).values())), jnp.float32) for name, x in found.items()}
    if "norm_std" in numbers:
        numbers["norm_std"] = jnp.sqrt(numbers["norm_std"])
    return numbers


def _outermost(state: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """Find the parts of a state that are wanted, but not parts of parts."""
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=wanted) if wanted(leaf)]
