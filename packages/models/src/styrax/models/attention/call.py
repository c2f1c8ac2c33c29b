"""What one attention asks for, as far as it is known before anything is computed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention, without its arrays: what an implementation looks at to say whether it can.

    Attributes:
        platform: Where it will run: "cpu", "tpu", "gpu".
        dtype: Of queries, keys and values.
        seq: Queries per row.
        keys: Keys per row.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a query and of a key.
        value_dim: Width of a value.
        patterned: The mask has a `Pattern`, so that the next four say all of it. Without, as with a cache, there is
            only a table of all pairs.
        causal: A token sees none after itself.
        window: A token sees only so many, itself included.
        chunk: A token sees only its own chunk of so many.
        segments: Rows hold several documents, or padding.
        context: Devices that a sequence is split over.
        softcap: The cap on scores.
        sinks: There is a score for each head that has no value.

    Example:
        >>> call = Call(platform="cpu", dtype="float32", seq=8, keys=8, head_dim=4, value_dim=4, softcap=50.0)
        >>> call.expects(softcap=[None], dtype=["bfloat16", "float32"])
        ['softcap: expected none, got 50.0']
    """

    platform: str
    dtype: str
    seq: int
    keys: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int
    value_dim: int
    patterned: bool = True
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    segments: bool = False
    context: int = 1
    softcap: float | None = None
    sinks: bool = False

    def expects(self, **allowed: Collection[Any]) -> list[str]:
        """Say which attributes are not among the values that an implementation can do.

        Args:
            allowed: For each attribute that matters, all values that can be done.

        Returns:
            A line for each that cannot.
        """
        return [
            f"{name}: expected {' or '.join(map(_text, values))}, got {_text(getattr(self, name))}"
            for name, values in allowed.items()
            if getattr(self, name) not in values
        ]

    def needs_pattern(self) -> list[str]:
        """Say that a table of all pairs cannot be done, if the mask is no more than that."""
        problem = "mask: expected one made of causal, window, chunk and segments, got a table of pairs, as with a cache"
        return [] if self.patterned else [problem]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
