"""Stable hashes: the same on every machine, in every process, for ever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt64


def hash64(purpose: str, text: str) -> int:
    """Hash a text to 64 bits; two purposes give independent hashes.

    Args:
        purpose: At most 16 bytes, what the hash decides.
        text: What is hashed.

    Returns:
        An integer in `[0, 2**64)`.

    Example:
        >>> hash64("split", "a.txt") == hash64("split", "a.txt") != hash64("subset", "a.txt")
        True
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little")


def fingerprint(value: Mapping[str, Any]) -> str:
    """Hash a JSON mapping, whatever the order of its keys.

    Example:
        >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
        True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def permutation(n: int, *key: str | int) -> Int64[np.ndarray, " n"]:
    r"""Permute `range(n)` as the key says, and independently for any other key.

    The key is hashed, so that seed 7 in epoch 1 has nothing to do with seed 8 in epoch 0:

    $$\pi = \operatorname{argsort}(u), \quad u_i \sim \mathrm{Philox}(\mathrm{blake2b}(key))$$

    Args:
        n: How many.
        *key: Purpose, seed, epoch: anything that tells this order from others.

    Returns:
        The permutation. Only Philox's raw 64-bit stream is used, which numpy promises not to change (the
        methods of `numpy.random.Generator` carry no such promise).

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Example:
        >>> permutation(5, "documents", 0, 0).tolist() == permutation(5, "documents", 0, 0).tolist()
        True
    """
    return np.argsort(random_bits(n, *key), kind="stable")


def random_bits(n: int, *key: str | int) -> UInt64[np.ndarray, " n"]:
    """Draw `n` numbers of 64 random bits as the key says; see `permutation`."""
    text = json.dumps(key, separators=(",", ":"))
    seed = hashlib.blake2b(text.encode(), digest_size=16, person=b"styrax-order").digest()
    return np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(n)
