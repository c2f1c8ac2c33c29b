"""Which rules for logical axes are in force while a program is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from styrax.core.errors import UserError
from styrax.core.mesh import DEFAULT_RULES, Rules


class _Fixed(Mapping[str, tuple[str, ...]]):
    """Rules that nobody can change, and that can be part of a key."""

    def __init__(self, rules: Rules) -> None:
        self._rules = {name: tuple(axes) for name, axes in rules.items()}
        self._hash = hash(frozenset(self._rules.items()))

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return self._rules == (other._rules if isinstance(other, _Fixed) else other)

    def __repr__(self) -> str:
        return repr(self._rules)


# JAX makes it a part of the key of everything that it keeps of a function: of traces, and of compiled programs.
_in_force = jax.make_user_context(_Fixed(DEFAULT_RULES))


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Let rules decide what layers split over which mesh axes, where they do it by hand.

    `styrax.core.mesh.shardings` says where arrays lie. Some layers also have to know it: experts that exchange tokens,
    a sequence that goes round a ring, layers in stages, kernels that the compiler cannot split. They look at the rules
    that are in force while they are traced. So trace with the rules by which the arrays lie; `fit` of styrax-train
    does.

    Rules are a part of the key by which `jax.jit` finds what it has compiled: a function that is called under other
    rules is traced again, and one that is called under the same finds its program. A program that was compiled ahead,
    by `lower` and `compile`, keeps the rules under which it was lowered.

    They hold in this thread, until the block ends; other threads have their own.

    Args:
        rules: Logical axis -> mesh axes, all of them: those that are left out are not taken from `DEFAULT_RULES`, and
            who asks for one gets the error of `styrax.core.mesh.spec`.

    Raises:
        UserError: A rule is no tuple of names; all such are listed.

    Example:
        >>> with use_rules({**DEFAULT_RULES, "seq": ("tensor",)}):
        ...     rules_in_force()["seq"]
        ('tensor',)
        >>> rules_in_force()["seq"]
        ('context',)
    """
    with _in_force(_fixed(rules)):
        yield


def rules_in_force() -> Rules:
    """Give the rules of the innermost `use_rules`, or `DEFAULT_RULES`.

    Returns:
        Logical axis -> mesh axes; it cannot be changed.

    Example:
        >>> rules_in_force() == DEFAULT_RULES
        True
    """
    return _in_force.value


def _fixed(rules: Rules) -> _Fixed:
    if isinstance(rules, _Fixed):
        return rules
    if not isinstance(rules, Mapping):
        raise UserError(f"rules: expected logical axis -> mesh axes, such as DEFAULT_RULES, got {rules!r}")
    problems = [
        f"rules[{name!r}]: expected a tuple of names of mesh axes, such as ('fsdp',), got {axes!r}"
        for name, axes in rules.items()
        if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes)
    ]
    if problems:
        raise UserError("\n".join(problems))
    return _Fixed(rules)
