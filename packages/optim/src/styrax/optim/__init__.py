"""Optax recipes: roles by parameter path, decay by convention, schedules and a one-pass guard."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.optim.adamw import AdamWState, adamw
    from styrax.optim.guard import FusedTransformation, GuardState, Verdict, guard, measure
    from styrax.optim.metrics import metrics
    from styrax.optim.recipes import AdamW
    from styrax.optim.roles import DEFAULT_RULES, Role, Row, Table, describe, roles
    from styrax.optim.schedules import WSD, Cosine
    from styrax.optim.sharding import state_shardings

__all__ = [
    "DEFAULT_RULES",
    "WSD",
    "AdamW",
    "AdamWState",
    "Cosine",
    "FusedTransformation",
    "GuardState",
    "Role",
    "Row",
    "Table",
    "Verdict",
    "adamw",
    "describe",
    "guard",
    "measure",
    "metrics",
    "roles",
    "state_shardings",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DEFAULT_RULES": "roles",
        "WSD": "schedules",
        "AdamW": "recipes",
        "AdamWState": "adamw",
        "Cosine": "schedules",
        "FusedTransformation": "guard",
        "GuardState": "guard",
        "Role": "roles",
        "Row": "roles",
        "Table": "roles",
        "Verdict": "guard",
        "adamw": "adamw",
        "describe": "roles",
        "guard": "guard",
        "measure": "guard",
        "metrics": "metrics",
        "roles": "roles",
        "state_shardings": "sharding",
    },
)
