"""What the styrax libraries share: protocols, configuration, tree paths, meshes, precision, streams."""

from typing import TYPE_CHECKING

from styrax.core.lazy import lazy_exports

if TYPE_CHECKING:
    from styrax.core.errors import UsageError, UserError, nearest
    from styrax.core.mesh import DEFAULT_RULES, MeshConfig
    from styrax.core.precision import Policy
    from styrax.core.random import stream
    from styrax.core.rules import rules_in_force, use_rules
    from styrax.core.trackers import Jsonl

__all__ = [
    "DEFAULT_RULES",
    "Jsonl",
    "MeshConfig",
    "Policy",
    "UsageError",
    "UserError",
    "lazy_exports",
    "nearest",
    "rules_in_force",
    "stream",
    "use_rules",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DEFAULT_RULES": "mesh",
        "Jsonl": "trackers",
        "MeshConfig": "mesh",
        "Policy": "precision",
        "UsageError": "errors",
        "UserError": "errors",
        "nearest": "errors",
        "rules_in_force": "rules",
        "stream": "random",
        "use_rules": "rules",
    },
)
