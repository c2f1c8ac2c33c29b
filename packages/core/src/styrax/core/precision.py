"""Which dtype parameters, computation and outputs have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from styrax.core.errors import UsageError, nearest

if TYPE_CHECKING:
    import numpy as np

_SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
_KEYS = {"params": "param", "compute": "compute", "output": "output"}


@dataclass(frozen=True)
class Policy:
    """The dtypes of a computation, kept as names so that a policy costs no jax import.

    Attributes:
        param: Dtype in which parameters are stored and updated.
        compute: Dtype of activations and matrix products.
        output: Dtype of what the model returns (logits).

    Example:
        >>> Policy.parse("bf16")
        Policy(param='float32', compute='bfloat16', output='float32')
        >>> Policy("f32", "bf16", "f32").compute_dtype == Policy.parse("bf16").compute_dtype
        True
    """

    param: str = "float32"
    compute: str = "float32"
    output: str = "float32"

    def __post_init__(self) -> None:
        for name in _KEYS.values():
            given = getattr(self, name)
            full = _SHORT.get(given, given)
            if full not in _SHORT.values():
                options = [*_SHORT, *_SHORT.values()]
                raise UsageError(
                    f"precision: {name} dtype {given!r} is not one of {', '.join(options)}"
                    f"{nearest(str(given), options)}"
                )
            object.__setattr__(self, name, full)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy from text.

        Args:
            text: `"f32"` (all float32), `"bf16"` (float32 parameters and outputs, bfloat16 computation),
                or any of `params`, `compute`, `output`, as in `"params=f32,compute=bf16,output=f32"`;
                one that is not named is float32.

        Raises:
            UsageError: The text is none of these.
        """
        text = text.strip()
        if "=" not in text:
            if text not in ("f32", "bf16"):
                raise UsageError(
                    f"precision: expected 'f32', 'bf16' or 'params=f32,compute=bf16,output=f32', got {text!r}"
                )
            return cls(compute=text)
        chosen = {}
        for part in text.split(","):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in _KEYS or key in chosen:
                problem = "given twice" if key in chosen else f"not a key{nearest(key, _KEYS)}"
                raise UsageError(f"precision: {key!r} in {text!r} is {problem}; the keys are {', '.join(_KEYS)}")
            chosen[key] = value
        return cls(**{_KEYS[key]: value for key, value in chosen.items()})

    @property
    def param_dtype(self) -> np.dtype:
        """The parameters' dtype as an object."""
        return _dtype(self.param)

    @property
    def compute_dtype(self) -> np.dtype:
        """The computation's dtype as an object."""
        return _dtype(self.compute)

    @property
    def output_dtype(self) -> np.dtype:
        """The output's dtype as an object."""
        return _dtype(self.output)


def _dtype(name: str) -> np.dtype:
    import jax.numpy as jnp

    return jnp.dtype(name)
