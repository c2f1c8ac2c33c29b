"""Tree paths and the flat names of other formats: `layers/attn/kernel` is `layers.attn.kernel` there.

A path is what `styrax.core.tree.flatten` writes: keys joined by `/`, in which `%25` is a percent sign and `%2F` a
slash. A flat name joins the same keys by another separator and escapes that one instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.formats.base import refuse

T = TypeVar("T")


def flat_name(path: str, separator: str = ".") -> str:
    """Write a tree path as a flat name.

    Args:
        path: Keys joined by `/`.
        separator: Between the keys; empty for a path of one key only, which keeps whatever it has.

    Example:
        >>> flat_name("layers/0/kernel"), flat_name("a.b/c")
        ('layers.0.kernel', 'a%2Eb.c')
        >>> flat_name("a%2Fb", separator="")
        'a/b'
    """
    if not separator:
        return path.replace("%2F", "/").replace("%25", "%") if "/" not in path else path
    escape = _escaped(separator)
    return path if separator == "/" else path.replace(separator, escape).replace("/", separator)


def tree_path(name: str, separator: str = ".") -> str:
    """Read a flat name as a tree path; the inverse of `flat_name`.

    Args:
        name: Keys joined by the separator.
        separator: Empty to take the whole name as one key.

    Example:
        >>> tree_path("layers.0.kernel"), tree_path("a%2Eb.c")
        ('layers/0/kernel', 'a.b/c')
        >>> tree_path("100%/a"), tree_path("a/b", separator="")
        ('100%25%2Fa', 'a%2Fb')
    """
    if not separator:
        return name.replace("%", "%25").replace("/", "%2F")
    escape = _escaped(separator)
    known = "%25|%2F" if separator == "/" else f"%25|%2F|{re.escape(escape)}"
    # A percent sign that begins none of our escapes was written by someone else, and stands for itself.
    name = re.sub(rf"({known})|%", lambda found: found[1] or "%25", name)
    if separator == "/":
        return name
    return name.replace("/", "%2F").replace(separator, "/").replace(escape, separator)


def renamed(things: Iterable[tuple[str, str, T]], where: Path) -> dict[str, T]:
    """Give things new names.

    Args:
        things: Old name, new name, thing.
        where: The file, for the error text.

    Raises:
        CheckpointError: Two have the same new name; all such are listed.
    """
    found: dict[str, T] = {}
    first: dict[str, str] = {}
    problems = []
    for old, new, thing in things:
        if new in found:
            problems.append(f"{first[new]!r} and {old!r} are both {new!r}")
            continue
        found[new], first[new] = thing, old
    refuse(where, problems, "Choose another separator, or leave one of each out")
    return found


def _escaped(separator: str) -> str:
    # With two characters `a:` + `::` + `b` could not be told from `a` + `::` + `:b`.
    if len(separator) != 1 or separator.isalnum() or separator == "%":
        raise CheckpointError(
            f"separator: expected one character that is no letter, digit or '%', or none, got {separator!r}"
        )
    return "".join(f"%{byte:02X}" for byte in separator.encode())
