"""The weights to evaluate and to ship, derived from the state and the weights that are trained."""

from __future__ import annotations

from typing import Any

import jax


def eval_params(state: Any, params: Any) -> Any:
    """Give the weights to evaluate: those of schedule-free training, of an average, or the trained ones.

    Nothing is swapped in place: `params` stay what the next update needs, and what comes back is for evaluation and
    export only. Every part of the state that has a method `eval_params` replaces the leaves that it holds; parts inside
    such a part are not asked.

    Args:
        state: State of any transformation, however nested.
        params: The trained weights, as they are after the update that made `state`.

    Returns:
        A tree like `params`, with its dtypes. Without such a part it is `params`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from styrax.optim.averaging import averaged
        >>> tx = averaged(optax.sgd(1.0), decay=1.0)
        >>> w = {"w": jnp.zeros(1)}
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     updates, state = tx.update({"w": -jnp.ones(1)}, state, w)
        ...     w = optax.apply_updates(w, updates)
        >>> float(w["w"][0]), float(eval_params(state, w)["w"][0])  # of 1 and 2
        (2.0, 1.5)
    """
    for part in jax.tree.leaves(state, is_leaf=_derives):
        if _derives(part):
            params = part.eval_params(params)
    return params


def _derives(node: Any) -> bool:
    return callable(getattr(type(node), "eval_params", None))
