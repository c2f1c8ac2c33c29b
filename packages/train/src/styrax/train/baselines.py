"""Two predictors that a run must beat: gzip, and a smoothed bigram model of the tokens that the run has seen."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.train.evaluate import batch_bytes

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def gzip_bits_per_byte(text: bytes) -> float | None:
    """Size of ``gzip -9`` of the text in bits, over its bytes; None for no text.

    >>> (gzip_bits_per_byte(b"ab" * 1000) or 1) < 0.2
    True
    """
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text) if text else None


class Bigram:
    r"""Interpolated Kneser-Ney bigram model, in float64.

    With counts :math:`c(u,w)` of pairs, :math:`N(u\cdot)` and :math:`N(\cdot w)` the numbers of different pairs
    that begin with :math:`u` and end with :math:`w`, :math:`N` of all different pairs, :math:`V` the vocabulary and
    :math:`D = n_1/(n_1 + 2 n_2)` from the numbers of pairs seen once and twice:

    .. math::
        p(w|u) &= \frac{\max(c(u,w) - D, 0) + D\,N(u\cdot)\,p_1(w)}{c(u)} \\
        p_1(w) &= \frac{\max(N(\cdot w) - D, 0)}{N} + \frac{D\,|\{w: N(\cdot w) > 0\}|}{N V}

    A context that was never seen gives :math:`p_1`. Source: Chen and Goodman, "An empirical study of smoothing
    techniques for language modeling" (1999), sections 2.7 and 3.

    Args:
        vocab_size: Number of token ids.

    >>> import numpy as np
    >>> model = Bigram(3)
    >>> model.update(np.array([0, 1, 0, 1, 0]), np.array([1, 0, 1, 0, 2]))
    >>> rows = [model.probability(np.full(3, u), np.arange(3)) for u in range(3)]
    >>> np.allclose(np.sum(rows, axis=1), 1)
    True
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._pairs = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._new: list[np.ndarray] = []

    def update(self, tokens: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> None:
        """Count pairs (token, its next token)."""
        self._new.append(tokens.astype(np.int64) * self._vocab + targets)
        if sum(map(len, self._new)) > 1 << 22:
            self._fold()

    def _fold(self) -> None:
        if not self._new:
            return
        pairs, counts = np.unique(np.concatenate(self._new), return_counts=True)
        self._new = []
        merged, inverse = np.unique(np.concatenate([self._pairs, pairs]), return_inverse=True)
        self._counts = np.bincount(inverse, np.concatenate([self._counts, counts])).astype(np.int64)
        self._pairs = merged

    def probability(self, tokens: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """:math:`p(target | token)` of each pair."""
        self._fold()
        first, second = np.divmod(self._pairs, self._vocab)
        once, twice = np.sum(self._counts == 1), np.sum(self._counts == 2)
        discount = once / (once + 2 * twice) if once and twice else 0.5
        starts = np.bincount(first, minlength=self._vocab)  # N(u.)
        ends = np.bincount(second, minlength=self._vocab)  # N(.w)
        context = np.bincount(first, self._counts, minlength=self._vocab)  # c(u)
        kinds = max(len(self._pairs), 1)
        lower = np.maximum(ends - discount, 0) / kinds + discount * np.sum(ends > 0) / kinds / self._vocab
        if not len(self._pairs):
            lower = np.full(self._vocab, 1 / self._vocab)
        key = tokens.astype(np.int64) * self._vocab + targets
        place = np.minimum(np.searchsorted(self._pairs, key), max(len(self._pairs) - 1, 0))
        seen = self._counts[place] * (self._pairs[place] == key) if len(self._pairs) else np.zeros(len(key))
        total = context[tokens]
        higher = np.maximum(seen - discount, 0) + discount * starts[tokens] * lower[targets]
        return np.where(total > 0, higher / np.maximum(total, 1), lower[targets])

    def bits_per_byte(
        self, batches: Iterable[Mapping[str, Any]], token_bytes: Int[np.ndarray, " vocab"]
    ) -> float | None:
        """Over the counted targets of held-out batches, as for a model; None where they stand for no text."""
        nats, size = 0.0, 0
        for batch in batches:
            tokens, targets = counted_pairs(batch)
            nats -= float(np.log(self.probability(tokens, targets)).sum())
            size += batch_bytes(batch, token_bytes)
        return nats / math.log(2) / size if size else None


def counted_pairs(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The (token, target) pairs of a batch that carry loss, flat."""
    mask = np.asarray(batch["loss_mask"]) > 0
    return np.asarray(batch["tokens"])[mask], np.asarray(batch["targets"])[mask]
