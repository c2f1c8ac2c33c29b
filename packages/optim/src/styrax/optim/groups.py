"""Groups of parameters by path, each with an optimizer of its own, or frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from styrax.core import UserError, nearest
from styrax.core.tree import flatten, match, unflatten
from styrax.optim.guard import FusedTransformation, Verdict, selected


class GroupsState(NamedTuple):
    """State of `groups`.

    Attributes:
        inner: Group -> the state of its optimizer, over a nested dictionary of its own parameters alone. A frozen group
            has none.
    """

    inner: dict[str, Any]


def groups(
    transformations: Mapping[str, optax.GradientTransformation | None],
    rules: Mapping[str, str],
    *,
    relative: Mapping[str, float] | None = None,
) -> FusedTransformation:
    """Treat groups of parameters apart.

    Each parameter belongs to the group of the first rule that fits its path. An optimizer sees the parameters of its
    group alone, as a nested dictionary by path, whatever the tree: dictionaries, `nnx.State`, lists, stacked layers. So
    it has no state for the others, and a frozen group has no state at all.

    Args:
        transformations: Group -> optimizer, or `None` for a group that is frozen: its updates are zeros.
        rules: Path pattern -> group, see `styrax.core.tree.match`; earlier rules win.
        relative: Group -> what a `learning_rate` for all is multiplied by for it; 1 where nothing is said.

    Returns:
        A transformation with state `GroupsState`. `update` takes `learning_rate` for all, or by group, and a verdict of
        `guard`, which it hands on.

    Raises:
        UserError: At `init`: parameters that fit no rule, rules that decide nothing or name no group, groups without
            parameters; all in one message.

    Example:
        >>> from styrax.optim import adamw
        >>> params = {"body": {"w": jnp.ones((2, 2))}, "head": {"w": jnp.ones(2)}, "old": jnp.ones(3)}
        >>> tx = groups({"slow": adamw(1e-3), "fast": adamw(1e-1), "frozen": None},
        ...             {"old": "frozen", "head/**": "fast", "**": "slow"})
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> [round(float(u.min()), 4) for u in (updates["body"]["w"], updates["head"]["w"], updates["old"])]
        [-0.0011, -0.11, -0.0]
        >>> sorted(state.inner)
        ['fast', 'slow']
    """
    rules = dict(rules)
    live = {name: tx for name, tx in transformations.items() if tx is not None}
    full = {name: optax.with_extra_args_support(tx) for name, tx in live.items()}

    def init(params: Any) -> GroupsState:
        leaves = flatten(params)
        check_rules(transformations, rules, leaves)
        members = assign(rules, leaves)
        return GroupsState({name: tx.init(_subset(leaves, members, name)) for name, tx in full.items()})

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, GroupsState]:
        grads, weights = flatten(updates), flatten(params)
        members = assign(rules, grads)
        if isinstance(learning_rate, Mapping):
            wrong = [f"{name!r}{nearest(name, full)}" for name in learning_rate if name not in full]
            if wrong:
                raise UserError(f"learning_rate: no group {', '.join(wrong)}; the groups are {', '.join(full)}")
        inner, steps = {}, {path: _nothing(grad) for path, grad in grads.items()}
        for name, tx in full.items():
            mine = _subset(grads, members, name)
            held = None if params is None else _subset(weights, members, name)
            rate = learning_rate
            if isinstance(learning_rate, Mapping):
                rate = learning_rate.get(name)
            elif learning_rate is not None:
                rate = learning_rate * (relative or {}).get(name, 1.0)
            more = extra if rate is None else {**extra, "learning_rate": rate}
            if verdict is None:
                moved, inner[name] = tx.update(mine, state.inner[name], held, **more)
            elif isinstance(live[name], FusedTransformation):
                moved, inner[name] = tx.update(mine, state.inner[name], held, verdict=verdict, **more)
            else:
                moved, inner[name] = selected(tx, verdict, mine, state.inner[name], held, more)
            steps |= flatten(moved)
        return unflatten(updates, steps), GroupsState(inner)

    return FusedTransformation(init, update)


def assign(rules: Mapping[str, str], paths: Any) -> dict[str, str]:
    """Give each path its group; a path that fits no rule is left out."""
    found = {path: next((group for pattern, group in rules.items() if match(pattern, path)), None) for path in paths}
    return {path: group for path, group in found.items() if group is not None}


def reset(tx: optax.GradientTransformation, state: Any, params: Any, group: str) -> Any:
    """Start one group's optimizer anew, and leave the others as they are.

    Args:
        tx: What `groups` gave, alone or within others, such as `guard`.
        state: Its state.
        params: The parameters.
        group: The group.

    Returns:
        The state, with the group's part as `init` makes it.

    Raises:
        UserError: The state has no such group, or no groups at all.

    Example:
        >>> from styrax.optim import adamw
        >>> params = {"a": jnp.ones(2), "b": jnp.ones(2)}
        >>> tx = groups({"one": adamw(0.1), "two": adamw(0.1)}, {"a": "one", "b": "two"})
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> state = reset(tx, state, params, "two")
        >>> int(state.inner["one"].count), int(state.inner["two"].count)
        (1, 0)
    """
    found = [part for part in jax.tree.leaves(state, is_leaf=_is_groups) if _is_groups(part)]
    if len(found) != 1:
        raise UserError(f"expected a state with groups(...) in it once, found it {len(found)} times in {type(state)}")
    (old,) = found
    if group not in old.inner:
        live = ", ".join(old.inner)
        raise UserError(f"no group {group!r} with a state{nearest(group, old.inner)}; the groups are {live}")

    def renewed(part: Any, fresh: Any) -> Any:
        return GroupsState({**part.inner, group: fresh.inner[group]}) if _is_groups(part) else part

    return jax.tree.map(renewed, state, tx.init(params), is_leaf=_is_groups)


def _is_groups(node: Any) -> bool:
    return isinstance(node, GroupsState)


def _subset(leaves: Mapping[str, Any], members: Mapping[str, str], name: str) -> dict[str, Any]:
    """Nest a group's leaves by the segments of their paths."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if members.get(path) != name:
            continue
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent.replace("%2F", "/").replace("%25", "%"), {})
        node[last.replace("%2F", "/").replace("%25", "%")] = leaf
    return tree


def _nothing(grad: Any) -> Any:
    # Adding a negative zero changes no bit of any weight.
    return jnp.full(jnp.shape(grad), -0.0, jnp.float32)


def check_rules(groups: Collection[str], rules: Mapping[str, str], leaves: Collection[str]) -> None:
    """Hold groups and rules to the paths of parameters.

    Raises:
        UserError: Parameters that fit no rule, rules that decide nothing or name no group, groups without parameters;
            all in one message.
    """
    members = assign(rules, leaves)
    problems = [f"no rule fits {path!r}{nearest(path, rules)}" for path in leaves if path not in members]
    deciding = {next(pattern for pattern in rules if match(pattern, path)) for path in members}
    for pattern, group in rules.items():
        if group not in groups:
            problems.append(f"rule {pattern!r} names group {group!r}{nearest(group, groups)}, which is none")
        if not any(match(pattern, path) for path in leaves):
            problems.append(f"rule {pattern!r} fits no parameter{nearest(pattern, leaves)}")
        elif pattern not in deciding:
            problems.append(f"rule {pattern!r} decides nothing: earlier rules take all it fits")
    problems += [f"group {name!r} has no parameter" for name in groups if name not in members.values()]
    if problems:
        raise UserError("\n  ".join(["parameter groups:", *problems]))
