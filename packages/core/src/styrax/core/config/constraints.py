"""Types with a constraint, for the fields of config dataclasses."""

from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
"""An integer, 1 or more."""

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
"""An integer, 0 or more."""

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""A number from 0 to 1, both included."""

PositiveFloat = Annotated[float, msgspec.Meta(gt=0.0)]
"""A number above 0."""

NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0.0)]
"""A number, 0 or above."""

Seed = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""A seed: JAX keeps 32 bits, and takes larger integers that differ in higher bits for the same."""
