"""Configuration: frozen dataclasses read from TOML and overrides, every mistake reported at once.

A config is a `@dataclass(frozen=True, kw_only=True)` beside what it builds, its fields described in the
class docstring's `Attributes:` section. Annotations say what is right: the constrained types below,
`Literal`, `T | None`, `tuple[T, ...]`, `dict[str, T]`, nested dataclasses, and unions of dataclasses told
apart by a field `kind: Literal["name"] = "name"`. Checks over several fields raise `ValueError` in
`__post_init__`, after `check(self)`, which holds values given in Python to the annotations too.
"""

from typing import TYPE_CHECKING

from styrax.core.config.constraints import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seed
from styrax.core.lazy import lazy_exports

if TYPE_CHECKING:
    from styrax.core.config.arguments import add_arguments, from_arguments
    from styrax.core.config.convert import build, check, mistakes
    from styrax.core.config.schema import Choice, Named, Recipe, Resolved, Schema, find_schema, read_config
    from styrax.core.config.toml import parse

__all__ = [
    "Choice",
    "Fraction",
    "Named",
    "NonNegative",
    "NonNegativeFloat",
    "Positive",
    "PositiveFloat",
    "Recipe",
    "Resolved",
    "Schema",
    "Seed",
    "add_arguments",
    "build",
    "check",
    "find_schema",
    "from_arguments",
    "mistakes",
    "parse",
    "read_config",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Choice": "schema",
        "Named": "schema",
        "Recipe": "schema",
        "Resolved": "schema",
        "Schema": "schema",
        "add_arguments": "arguments",
        "from_arguments": "arguments",
        "build": "convert",
        "check": "convert",
        "mistakes": "convert",
        "find_schema": "schema",
        "parse": "toml",
        "read_config": "schema",
    },
)
