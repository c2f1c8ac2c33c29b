"""What to log from an optimizer's state, wherever in it the numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from styrax.core.tree import flatten
from styrax.optim.adamw import AdamWState
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
        `learning_rate` of the last applied update if the optimizer is `adamw`. The first three
        are of the last call of `update`, so a skipped step shows its non-finite norm.

    Raises:
        ValueError: The state holds no `GuardState`, or more than one.

    Example:
        >>> from styrax.optim import adamw, guard
        >>> state = guard(adamw(0.1)).init({"w": jnp.ones(2)})
        >>> {name: round(float(x), 3) for name, x in sorted(metrics(state).items())}
        {'clip_scale': 1.0, 'grad_norm': 0.0, 'learning_rate': 0.1, 'skipped': 0.0}
    """
    guards = _find(state, GuardState)
    if len(guards) != 1:
        advice = "give it the state of one of them" if guards else "wrap the optimizer in guard(...)"
        raise ValueError(f"metrics needs the state of one guard, found {len(guards)} in {type(state)}; {advice}")
    found = {name: getattr(guards[0], name) for name in ("grad_norm", "clip_scale", "skipped")}
    rates = _find(state, AdamWState)
    if len(rates) == 1:
        found["learning_rate"] = rates[0].learning_rate
    # A number may be wrapped in a variable; its tree then still has one leaf.
    return {name: jnp.asarray(next(iter(flatten(x).values())), jnp.float32) for name, x in found.items()}


def _find(state: Any, kind: type) -> list[Any]:
    found = []
    for leaf in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind)):
        if isinstance(leaf, kind):
            found.append(leaf)
    return found
