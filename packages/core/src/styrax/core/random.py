"""Random streams by name: one root key, a key for every purpose and step, no state to carry."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int, Key


def stream(key: Key[Array, ""], purpose: str, *steps: int | Int[Array, ""]) -> Key[Array, ""]:
    """Derive the key of one purpose, and of one step within it.

    `fold_in(... fold_in(fold_in(key, h(purpose)), step_0) ..., step_n)`, with `h` the first 31 bits of
    SHA-256, so the result is the same in every process, version and run. It works under `jax.jit`.

    Args:
        key: The root key, from `jax.random.key(seed)`.
        purpose: What the numbers are for, such as `"dropout"`; other purposes are independent.
        steps: Counters such as the training step; Python integers must lie in `[0, 2**32)`.

    Returns:
        A key of the same kind as `key`.

    Raises:
        ValueError: A Python step is out of range.

    Example:
        >>> import jax
        >>> root = jax.random.key(0)
        >>> bool(jax.numpy.all(stream(root, "dropout", 3) == stream(root, "dropout", 3)))
        True
        >>> bool(jax.numpy.all(stream(root, "dropout", 3) == stream(root, "dropout", 4)))
        False
    """
    import jax

    key = jax.random.fold_in(key, purpose_id(purpose))
    for step in steps:
        if isinstance(step, int) and not 0 <= step < 2**32:
            raise ValueError(f"stream({purpose!r}): a step must be in [0, 2**32), got {step}")
        key = jax.random.fold_in(key, step)
    return key


def purpose_id(purpose: str) -> int:
    """Hash a purpose to 31 bits that never change.

    Example:
        >>> purpose_id("dropout")
        228984084
    """
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big") >> 1
