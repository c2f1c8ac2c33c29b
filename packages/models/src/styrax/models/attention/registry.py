"""Implementations by name. Those that come with the package are imported when they are first chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from styrax.core import UserError
from styrax.core.errors import nearest
from styrax.models.attention.call import Call

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.layers.mask import Mask

AUTO = "auto"
# Name -> module that has `attend` and `supports`.
_BUILT_IN = {
    "reference": "styrax.models.attention.reference",
    "blocked": "styrax.models.attention.blocked",
    "jax.nn": "styrax.models.attention.jax_nn",
    "splash": "styrax.models.attention.splash",
    "ring": "styrax.models.attention.ring",
    "cudnn": "styrax.models.attention.cudnn",
}
# Platform -> what "auto" tries, in order, after "ring"; "reference" can do everything.
_ORDER = {
    "cpu": ("blocked",),
    "tpu": ("splash",),
    "gpu": ("cudnn", "jax.nn"),
}
_registered: dict[str, Implementation] = {}


class Attend(Protocol):
    """Computes attention as `styrax.models.layers.attend.attend` says, which calls it.

    That has put zeros where `mask.queries` and `mask.keys` are false, and clears the output there, so an
    implementation needs no care for rows that see nothing, as long as they come out finite.
    """

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_heads keys head_dim"],
        value: Float[Array, "batch kv_heads keys value_dim"],
        mask: Mask,
        /,
        *,
        scale: float,
        softcap: float | None,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "batch seq heads value_dim"]:
        """Attend."""
        ...


class Implementation(NamedTuple):
    """One way to compute attention.

    Attributes:
        attend: Computes it.
        supports: Says why it cannot do a call, a line for each reason; no line means that it can.
    """

    attend: Attend
    supports: Callable[[Call], Sequence[str]]


def register(name: str, attend: Attend, *, supports: Callable[[Call], Sequence[str]] | None = None) -> None:
    """Make an implementation known by a name, for the `attention` of a config.

    Registered again, a name means the new one from then on; what `jax.jit` has compiled stays as it is.

    Args:
        name: Any but "auto" and the names that come with the package.
        attend: Computes attention; see `Attend`.
        supports: Says why it cannot do a call, a line for each reason, as `Call.expects` does; `None` means that it
            can do all.

    Raises:
        UserError: The name is taken.

    Example:
        >>> from styrax.models.attention import get, register
        >>> register("mine", get("reference").attend, supports=lambda call: call.expects(sinks=[False]))
        >>> get("mine").supports(Call(platform="cpu", dtype="float32", seq=1, keys=1, head_dim=2, value_dim=2))
        []
    """
    if name == AUTO or name in _BUILT_IN:
        raise UserError(f"register: the name {name!r} is taken; expected none of {', '.join((AUTO, *_BUILT_IN))}")
    _registered[name] = Implementation(attend, supports or (lambda call: ()))


def names() -> tuple[str, ...]:
    """List the implementations, those that come with the package first.

    >>> names()[:3]
    ('reference', 'blocked', 'jax.nn')
    """
    return (*_BUILT_IN, *_registered)


def check_name(name: str) -> None:
    """Refuse a name that means nothing.

    Args:
        name: "auto" or one of `names`.

    Raises:
        UserError: It is neither.

    Example:
        >>> check_name("splash")
        >>> try:
        ...     check_name("splosh")
        ... except UserError as error:
        ...     print(str(error)[-37:])
        got 'splosh' (did you mean 'splash'?)
    """
    known = (AUTO, *names())
    if name not in known:
        raise UserError(f"attention: expected {', '.join(known)}, got {name!r}{nearest(name, known)}")


def get(name: str) -> Implementation:
    """Give one implementation.

    Args:
        name: One of `names`.

    Raises:
        UserError: There is none of that name.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILT_IN:
        known = names()
        raise UserError(f"attention: expected {', '.join(known)}, got {name!r}{nearest(name, known)}")
    module = importlib.import_module(_BUILT_IN[name])
    return Implementation(module.attend, module.supports)


def choose(name: str, call: Call) -> str:
    """Find the implementation for a call.

    Args:
        name: One of `names`, or "auto": the fastest for the platform among those that can do it.
        call: What is asked for.

    Returns:
        One of `names`.

    Raises:
        UserError: The named one cannot do the call; all reasons are listed.

    Example:
        >>> choose("auto", Call(platform="cpu", dtype="float32", seq=8, keys=8, head_dim=4, value_dim=4))
        'blocked'
    """
    order = ("ring", *_ORDER.get(call.platform, ()), "reference")
    if name == AUTO:
        return next(each for each in order if not get(each).supports(call))
    check_name(name)
    reasons = list(get(name).supports(call))
    if reasons:
        able = [each for each in names() if not get(each).supports(call)]
        raise UserError(
            f"attention = {name!r} cannot do what is asked for:\n  "
            + "\n  ".join(reasons)
            + f"\nset attention to {AUTO!r}, or to one that can: {', '.join(able)}"
        )
    return name
