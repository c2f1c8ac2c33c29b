"""Parts by name: what installed distributions offer through entry points."""

import functools
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from styrax.core.errors import UsageError, UserError, nearest

#: What a group's members are called, and which distribution of ours offers some.
GROUPS = {
    "styrax.models": ("model", "styrax-models"),
    "styrax.data": ("data part", "styrax-data"),
    "styrax.optim": ("optimizer", "styrax-optim"),
    "styrax.checkpoint": ("checkpointer", "styrax-checkpoint"),
    "styrax.trackers": ("tracker", "styrax-core"),
    "styrax.schemas": ("schema", "styrax-train"),
    "styrax.recipes": ("recipe", "styrax-train"),
}


def names(group: str) -> list[str]:
    """List the names that a group offers, sorted, with nothing imported.

    Example:
        >>> "jsonl" in names("styrax.trackers")
        True
    """
    return sorted({entry.name for entry in _offered(tuple(sys.path)).select(group=group)})


def find(group: str, name: str) -> EntryPoint:
    """Find an entry point by name, with nothing imported.

    Raises:
        UsageError: Nothing has that name; says the nearest one and what to install.
        UserError: Two distributions offer different objects under it.
    """
    found = _named(group, name)
    if not found:  # perhaps it was installed since
        _offered.cache_clear()
        found = _named(group, name)
    if not found:
        raise UsageError(missing(group, name, names(group)))
    if len(found) > 1:
        providers = " and ".join(map(origin, found.values()))
        raise UserError(f"{name!r} in {group} comes from both {providers}; uninstall one")
    return next(iter(found.values()))


@functools.lru_cache(maxsize=2)
def _offered(path: tuple[str, ...]) -> EntryPoints:
    """Read what all distributions on the path offer, once: there are dozens of files."""
    return entry_points()  # pyright: ignore[reportReturnType]


def _named(group: str, name: str) -> dict[str, EntryPoint]:
    return {entry.value: entry for entry in _offered(tuple(sys.path)).select(group=group, name=name)}


def resolve(group: str, name: str) -> Any:
    """Import the object that is registered as `name` in an entry-point group.

    Args:
        group: For example `"styrax.models"`.
        name: For example `"decoder"`.

    Returns:
        The registered object: a class, a function or a module.

    Raises:
        UsageError: Nothing has that name; says the nearest one and what to install.
        UserError: Several distributions have it, or its module cannot be imported.

    Example:
        >>> resolve("styrax.trackers", "jsonl").__name__
        'JsonlConfig'
    """
    entry = find(group, name)
    try:
        return entry.load()
    except Exception as error:
        raise UserError(
            f"{name!r} in {group} is unavailable: {type(error).__name__}: {error} (while importing {origin(entry)})"
        ) from error


def missing(group: str, name: str, offered: Iterable[str]) -> str:
    """Word the message for a name that a group does not offer."""
    offered = sorted(offered)
    kind, provider = GROUPS.get(group, (group.rpartition(".")[2], ""))
    hint = f"; pip install {provider}" if provider else ""
    if not offered:
        return f"no {kind} named {name!r}: nothing installed offers any{hint}"
    # With a near name at hand the reader has a typo, not a missing distribution.
    near = nearest(name, offered)
    return f"no {kind} named {name!r}{near}; installed: {', '.join(offered)}{'' if near else hint}"


def origin(entry: EntryPoint) -> str:
    """Say where an entry point comes from."""
    dist = entry.dist
    return f"{entry.value} of {dist.name} {dist.version}" if dist else entry.value
