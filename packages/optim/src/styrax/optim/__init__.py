"""Optax recipes: roles by parameter path, decay by convention, schedules and a one-pass guard."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.optim.adafactor import adafactor
    from styrax.optim.adam_mini import adam_mini
    from styrax.optim.adamw import AdamWState, adamw
    from styrax.optim.ademamix import ademamix
    from styrax.optim.averaging import averaged
    from styrax.optim.cautious import cautious
    from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise
    from styrax.optim.eight_bit import eight_bit_adamw
    from styrax.optim.evaluation import eval_params
    from styrax.optim.groups import GroupsState, groups, reset
    from styrax.optim.guard import FusedTransformation, GuardState, Verdict, guard, measure
    from styrax.optim.kron import kron
    from styrax.optim.lion import lion
    from styrax.optim.mars import mars
    from styrax.optim.metrics import metrics
    from styrax.optim.muon import muon
    from styrax.optim.orthogonalize import orthogonalize
    from styrax.optim.prodigy import prodigy
    from styrax.optim.recipes import AdamW
    from styrax.optim.roles import DEFAULT_RULES, Role, Row, Table, describe, roles
    from styrax.optim.schedule_free import schedule_free
    from styrax.optim.schedules import WSD, Cosine
    from styrax.optim.shampoo import shampoo
    from styrax.optim.sharding import state_shardings
    from styrax.optim.soap import soap
    from styrax.optim.specs import ParamSpec, specs

__all__ = [
    "DEFAULT_RULES",
    "WSD",
    "AdamW",
    "AdamWState",
    "Cosine",
    "Cycles",
    "FusedTransformation",
    "GroupsState",
    "GuardState",
    "InverseSqrt",
    "Linear",
    "ParamSpec",
    "Piecewise",
    "Role",
    "Row",
    "Table",
    "Verdict",
    "adafactor",
    "adam_mini",
    "adamw",
    "ademamix",
    "averaged",
    "cautious",
    "describe",
    "eight_bit_adamw",
    "eval_params",
    "groups",
    "guard",
    "kron",
    "lion",
    "mars",
    "measure",
    "metrics",
    "muon",
    "orthogonalize",
    "prodigy",
    "reset",
    "roles",
    "schedule_free",
    "shampoo",
    "soap",
    "specs",
    "state_shardings",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "adafactor": "adafactor",
        "adam_mini": "adam_mini",
        "ademamix": "ademamix",
        "averaged": "averaging",
        "cautious": "cautious",
        "eight_bit_adamw": "eight_bit",
        "eval_params": "evaluation",
        "kron": "kron",
        "lion": "lion",
        "mars": "mars",
        "muon": "muon",
        "orthogonalize": "orthogonalize",
        "prodigy": "prodigy",
        "schedule_free": "schedule_free",
        "shampoo": "shampoo",
        "soap": "soap",
        "DEFAULT_RULES": "roles",
        "WSD": "schedules",
        "AdamW": "recipes",
        "AdamWState": "adamw",
        "Cosine": "schedules",
        "Cycles": "curves",
        "FusedTransformation": "guard",
        "GroupsState": "groups",
        "GuardState": "guard",
        "InverseSqrt": "curves",
        "Linear": "curves",
        "ParamSpec": "specs",
        "Piecewise": "curves",
        "Role": "roles",
        "Row": "roles",
        "Table": "roles",
        "Verdict": "guard",
        "adamw": "adamw",
        "describe": "roles",
        "groups": "groups",
        "guard": "guard",
        "measure": "guard",
        "metrics": "metrics",
        "reset": "groups",
        "roles": "roles",
        "specs": "specs",
        "state_shardings": "sharding",
    },
)
