"""Batches over documents that are never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from styrax.data.hashing import fingerprint
from styrax.data.plan.line import Line
from styrax.data.plan.segments import Batch, Segments, fill

if TYPE_CHECKING:
    from styrax.data.dataset import LMData


class HeldOut(Sequence[Batch]):
    """The held-out batches, made when they are asked for; the last is padded with rows of mask 0.

    Args:
        data: Whose documents; they are packed as its training rows are, in the order of their hash, and the rows of
            several sources are spread evenly, so that the first batches stand for all.
        whole: Take all documents, for data that nobody trains on.
    """

    def __init__(self, data: LMData, *, whole: bool = False):
        self._data = data
        self._width, self._rows = data.block, data.batch_size
        self._lines = [
            Line(docs, data._lengths(number, docs), block=data.block, pack=data.pack, key=None)
            for number, docs in enumerate(map(_by_hash, data.stores) if whole else data._held)
        ]
        counts = [line.num_blocks for line in self._lines]
        source = np.repeat(np.arange(len(counts)), counts)
        block = np.concatenate([np.arange(count) for count in counts])
        order = np.lexsort((source, (block + 0.5) / np.repeat(np.maximum(counts, 1), counts)))
        self._source, self._block = source[order], block[order]
        self._count = -(-len(source) // self._rows)
        if data.max_held_out_batches is not None:
            self._count = min(self._count, data.max_held_out_batches)

    @property
    def fingerprint(self) -> str:
        """A hash of the stores from which they are."""
        return fingerprint(self._data.settings["mixture"]["sources"])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        """Make one batch, or a list of them."""
        if isinstance(index, slice):
            return [self._batch(i) for i in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"held-out batch {index} of {len(self)}")
        return self._batch(range(len(self))[index])

    def _batch(self, number: int) -> Batch:
        rows = slice(number * self._rows, (number + 1) * self._rows)
        source, place = self._source[rows], self._block[rows] * self._width
        row, parts = np.arange(len(source)), []
        for which in np.unique(source).tolist():
            here = source == which
            parts.append((which, self._lines[which].cut(place[here], self._width, row[here])))
        data = self._data
        return fill(Segments.merge(parts), data.stores, (self._rows, self._width), data._bos, data._pad)


def _by_hash(store: Any) -> np.ndarray:
    """Put all documents of a store in the order of held-out ones."""
    return np.argsort(store.docs["id_hash"], kind="stable")
