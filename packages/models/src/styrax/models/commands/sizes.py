"""Numbers for people, and JSON for programs."""

from __future__ import annotations

import json
import re
from typing import Any

from styrax.core import UsageError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def sized(count: float) -> str:
    """Write a number of bytes.

    Example:
        >>> sized(999), sized(1_500_000)
        ('999 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def counted(count: float) -> str:
    """Write a large number in short.

    Example:
        >>> counted(134_515_008), counted(950)
        ('134.5 M', '950')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def read_size(text: str) -> int:
    """Read a number of bytes, such as "5GB" or "200 MiB".

    Raises:
        UsageError: It is none.

    Example:
        >>> read_size("5GB"), read_size("1 MiB")
        (5000000000, 1048576)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise UsageError(f"expected a size such as 5GB or 200MiB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def print_json(record: Any) -> None:
    """Print a record as JSON that any program reads."""
    print(json.dumps(record, indent=2, default=str, allow_nan=False))
