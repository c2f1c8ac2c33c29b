"""What decides a sequence of batches, compared with what decided another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from styrax.core.errors import nearest


def changed(here: Mapping[str, Any], saved: Mapping[str, Any], allow: Sequence[str] = ()) -> list[str]:
    """Say which settings are not those that were saved, a line each.

    Args:
        here: Name -> value now.
        saved: Name -> value then.
        allow: Names of settings that may differ.

    Example:
        >>> changed({"seed": 1, "rows": 8}, {"seed": 0, "rows": 4}, allow=["rows"])
        ['seed: saved with 0, now 1']
    """
    lines = [f"allow: no setting {name!r}{nearest(name, list(here))}" for name in allow if name not in here]
    return lines + [
        f"{name}: saved with {saved.get(name)!r}, now {here.get(name)!r}"
        for name in sorted({*saved, *here})
        if saved.get(name) != here.get(name) and name not in allow
    ]
