"""Optax recipes: roles by parameter path, decay by convention, schedules and a one-pass guard."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.optim.adafactor import adafactor
    from styrax.optim.adam_mini import adam_mini
    from styrax.optim.adamw import AdamWState, adamw
    from styrax.optim.ademamix import ademamix
    from styrax.optim.agc import agc
    from styrax.optim.averaging import averaged
    from styrax.optim.cautious import cautious
    from styrax.optim.coordinates import Coordinates, Trial, coordinate_check
    from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise
    from styrax.optim.eight_bit import eight_bit_adamw
    from styrax.optim.evaluation import eval_params
    from styrax.optim.groups import GroupsState, groups, reset
    from styrax.optim.guard import FusedTransformation, GuardState, Verdict, guard, measure
    from styrax.optim.kron import kron
    from styrax.optim.lion import lion
    from styrax.optim.mars import mars
    from styrax.optim.matrix_recipes import Kron, Muon, NorMuon, Products, Rest, Shampoo, Soap
    from styrax.optim.memory import memory_table
    from styrax.optim.metrics import metrics
    from styrax.optim.muon import MomentumWarmup, muon
    from styrax.optim.orthogonalize import orthogonalize
    from styrax.optim.precision import full_params, precision
    from styrax.optim.prodigy import prodigy
    from styrax.optim.recipe import Recipe
    from styrax.optim.recipe_parts import Average, Extras, Group, Parameters
    from styrax.optim.recipes import (
        Adafactor,
        AdamMini,
        AdamW,
        AdEMAMix,
        EightBitAdamW,
        Lion,
        Mars,
        Prodigy,
        ScheduleFree,
    )
    from styrax.optim.roles import DEFAULT_RULES, Role, Row, Table, describe, roles
    from styrax.optim.schedule_free import schedule_free
    from styrax.optim.schedules import WSD, Cosine
    from styrax.optim.shampoo import shampoo
    from styrax.optim.sharding import init, state_shardings
    from styrax.optim.soap import soap
    from styrax.optim.specs import ParamSpec, specs
    from styrax.optim.spikes import Spikes, ZClip
    from styrax.optim.torch_state import Place, from_torch_adamw
    from styrax.optim.transfer import CompleteP, Forward, Multipliers, MuP, UMuP

__all__ = [
    "DEFAULT_RULES",
    "WSD",
    "AdEMAMix",
    "Adafactor",
    "AdamMini",
    "AdamW",
    "AdamWState",
    "Average",
    "CompleteP",
    "Coordinates",
    "Cosine",
    "Cycles",
    "EightBitAdamW",
    "Extras",
    "Forward",
    "FusedTransformation",
    "Group",
    "GroupsState",
    "GuardState",
    "InverseSqrt",
    "Kron",
    "Linear",
    "Lion",
    "Mars",
    "MomentumWarmup",
    "MuP",
    "Multipliers",
    "Muon",
    "NorMuon",
    "ParamSpec",
    "Parameters",
    "Piecewise",
    "Place",
    "Prodigy",
    "Products",
    "Recipe",
    "Rest",
    "Role",
    "Row",
    "ScheduleFree",
    "Shampoo",
    "Soap",
    "Spikes",
    "Table",
    "Trial",
    "UMuP",
    "Verdict",
    "ZClip",
    "adafactor",
    "adam_mini",
    "adamw",
    "ademamix",
    "agc",
    "averaged",
    "cautious",
    "coordinate_check",
    "describe",
    "eight_bit_adamw",
    "eval_params",
    "from_torch_adamw",
    "full_params",
    "groups",
    "guard",
    "init",
    "kron",
    "lion",
    "mars",
    "measure",
    "memory_table",
    "metrics",
    "muon",
    "orthogonalize",
    "precision",
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
        "Products": "matrix_recipes",
        "Rest": "matrix_recipes",
        "Extras": "recipe_parts",
        "Parameters": "recipe_parts",
        "MomentumWarmup": "muon",
        "init": "sharding",
        "Trial": "coordinates",
        "Coordinates": "coordinates",
        "coordinate_check": "coordinates",
        "Forward": "transfer",
        "Multipliers": "transfer",
        "UMuP": "transfer",
        "CompleteP": "transfer",
        "MuP": "transfer",
        "Place": "torch_state",
        "from_torch_adamw": "torch_state",
        "agc": "agc",
        "Spikes": "spikes",
        "ZClip": "spikes",
        "full_params": "precision",
        "precision": "precision",
        "memory_table": "memory",
        "Recipe": "recipe",
        "Group": "recipe_parts",
        "Average": "recipe_parts",
        "Soap": "matrix_recipes",
        "Shampoo": "matrix_recipes",
        "NorMuon": "matrix_recipes",
        "Muon": "matrix_recipes",
        "Kron": "matrix_recipes",
        "ScheduleFree": "recipes",
        "Prodigy": "recipes",
        "Mars": "recipes",
        "Lion": "recipes",
        "EightBitAdamW": "recipes",
        "AdamMini": "recipes",
        "Adafactor": "recipes",
        "AdEMAMix": "recipes",
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
