"""Documents on a line, stretches of that line in rows, and the gather that makes a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped, UInt8

Pack = Literal["concat", "best_fit", "none"]
Batch = dict[str, np.ndarray]

NAMES = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
#: Numbers between the arrays of a batch, so that copying one to another does not meet its own cache lines.
APART = 336
#: Mean length of a segment from which copying stretches is quicker than one gather.
LONG = 96


@dataclass(frozen=True)
class Plan:
    """Where each piece of a document stands on a line; a place on the line is one target.

    Attributes:
        docs: Store index of each piece's document, in the order of the line.
        start: First target of each piece, counted from the document's first token.
        length: Targets of each.
        begin: Where each begins on the line; they do not overlap.
    """

    docs: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    length: Int64[np.ndarray, " pieces"]
    begin: Int64[np.ndarray, " pieces"]

    def cut(
        self,
        low: Int64[np.ndarray, " stretches"],
        high: Int64[np.ndarray, " stretches"],
        row: Int64[np.ndarray, " stretches"],
        column: Int64[np.ndarray, " stretches"],
    ) -> Segments:
        """Find what stands on stretches `[low, high)` of the line: O(log pieces) each.

        Args:
            low: Where each stretch begins.
            high: Where it ends.
            row: Row of the batch that it goes to, never falling.
            column: Column where it begins.
        """
        first = np.searchsorted(self.begin, low, side="right") - 1
        count = np.searchsorted(self.begin, high, side="left") - first
        stretch = np.repeat(np.arange(len(low)), count)
        place = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(stretch))
        begin = self.begin[place]
        start = np.maximum(begin, low[stretch])
        stop = np.minimum(begin + self.length[place], high[stretch])
        if (stop <= start).any():  # a stretch that begins in a gap
            kept = stop > start
            stretch, place, begin, start, stop = (a[kept] for a in (stretch, place, begin, start, stop))
        columns = column[stretch] + start - low[stretch]
        return Segments.of(row[stretch], columns, self.docs[place], self.start[place] + start - begin, stop - start)


@dataclass(frozen=True)
class Segments:
    """Stretches of documents in a batch, by row, then by column; arrays of one length.

    Attributes:
        row: Row of the batch.
        column: First column.
        doc: Store index of the document.
        start: First target, counted from the document's first token.
        length: How many targets.
        source: Which of the stores.
    """

    row: Int64[np.ndarray, " segments"]
    column: Int64[np.ndarray, " segments"]
    doc: Int64[np.ndarray, " segments"]
    start: Int64[np.ndarray, " segments"]
    length: Int64[np.ndarray, " segments"]
    source: Int64[np.ndarray, " segments"]

    @classmethod
    def of(
        cls, row: np.ndarray, column: np.ndarray, doc: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> Segments:
        """Make segments of the first store."""
        return cls(row, column, doc, start, length, np.zeros(len(row), np.int64))

    @classmethod
    def merge(cls, parts: Sequence[tuple[int, Segments]]) -> Segments:
        """Put segments of several stores into one batch, given with the number of their store."""
        if len(parts) == 1 and parts[0][0] == 0:
            return parts[0][1]
        if not parts:
            return cls.of(*(np.zeros(0, np.int64) for _ in range(5)))
        names = ("row", "column", "doc", "start", "length")
        columns = [np.concatenate([getattr(part, name) for _, part in parts]) for name in names]
        source = np.concatenate([np.full(len(part.row), number, np.int64) for number, part in parts])
        order = np.lexsort((columns[1], columns[0]))
        row, column, doc, start, length = (values[order] for values in columns)
        return cls(row, column, doc, start, length, source[order])

    def numbers(self) -> Int64[np.ndarray, " segments"]:
        """Count the segments of each row from 1."""
        index = np.arange(len(self.row))
        new = np.ones(len(self.row), bool)
        new[1:] = self.row[1:] != self.row[:-1]
        return index - np.maximum.accumulate(np.where(new, index, 0)) + 1


class Tokens(Protocol):
    """What is read of a store."""

    @property
    def tokens(self) -> Shaped[np.ndarray, " tokens"]:
        """The ids of all documents, one after another."""
        ...

    @property
    def mask(self) -> UInt8[np.ndarray, " tokens"] | None:
        """Which of them carry loss; all where there is none."""
        ...

    @property
    def docs(self) -> np.ndarray:
        """Where documents start, in a field `start`."""
        ...


def fill(
    segments: Segments,
    stores: Sequence[Tokens],
    shape: tuple[int, int],
    bos_id: int,
    pad_id: int,
) -> Batch:
    r"""Make a batch of segments.

    With $x_1 \ldots x_n$ a document's tokens, $x_0$ the begin token and $x_{n+1}$ the end token, a segment of
    targets $x_a \ldots x_b$ has inputs $x_{a-1} \ldots x_{b-1}$: every token of a document, and its end, is
    a target exactly once, the first one from the begin token alone.

    Args:
        segments: What stands where.
        stores: Where the ids are.
        shape: Rows and columns.
        bos_id: Input before a document's first token.
        pad_id: Fills what no segment covers.

    Returns:
        The batch: `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_mask` float32, all `shape`.
    """
    size = shape[0] * shape[1]
    pitch = size + APART
    block = np.empty(len(NAMES) * pitch, np.int32)  # in one piece, which malloc keeps for the next batch
    inputs, targets, loss_mask, segment_ids, positions = (block[i * pitch :][:size] for i in range(len(NAMES)))
    loss_mask = loss_mask.view(np.float32)
    place = segments.row * shape[1] + segments.column
    length, number = segments.length, segments.numbers()
    source, before = _sources(segments, stores)
    covered = int(length.sum())
    masks = [store.mask for store in stores]
    if all(mask is None for mask in masks):
        loss_mask[:] = 1
    if len(length) * LONG <= covered:
        _copy(segments, stores, source, place, number, (targets, loss_mask, segment_ids, positions))
    else:
        _gather(segments, stores, source, place, number, (targets, loss_mask, segment_ids, positions))
    inputs[1:] = targets[:-1]
    inputs[place] = np.where(segments.start == 0, bos_id, before)
    if covered < size:
        ends = np.concatenate([[0], place + length])
        gaps = zip(ends.tolist(), [*place.tolist(), size], strict=True)
        for begin, end in gaps:
            if begin < end:
                inputs[begin:end] = targets[begin:end] = pad_id
                segment_ids[begin:end] = positions[begin:end] = 0
                loss_mask[begin:end] = 0
    return dict(
        zip(NAMES, (a.reshape(shape) for a in (inputs, targets, loss_mask, segment_ids, positions)), strict=True)
    )


def _sources(segments: Segments, stores: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    """Find where each segment begins in its store, and the token before it."""
    source = np.empty(len(segments.row), np.int64)
    before = np.empty(len(segments.row), np.int32)
    for number in [0] if len(stores) == 1 else np.unique(segments.source).tolist():
        store = stores[number]
        chosen = segments.source == number if len(stores) > 1 else slice(None)
        source[chosen] = where = store.docs["start"][segments.doc[chosen]] + segments.start[chosen]
        prepare = getattr(store, "prepare", None)
        if prepare is not None:  # a remote store: all shards at once, where reading would fetch one by one
            prepare(np.maximum(where - 1, 0), where + segments.length[chosen])
        before[chosen] = store.tokens[np.maximum(where - 1, 0)]
    return source, before


def _copy(
    segments: Segments,
    stores: Sequence[Tokens],
    source: np.ndarray,
    place: np.ndarray,
    number: np.ndarray,
    out: tuple[np.ndarray, ...],
) -> None:
    """Copy segments stretch by stretch, which is quickest for long ones."""
    targets, loss_mask, segment_ids, positions = out
    count = np.arange(int(segments.length.max(initial=0)), dtype=np.int32)
    columns = (segments.source, source, place, segments.length, number)
    for store, first, begin, length, index in zip(*(column.tolist() for column in columns), strict=True):
        end, tokens, mask = begin + length, stores[store].tokens, stores[store].mask
        targets[begin:end] = tokens[first : first + length]
        if mask is not None:
            loss_mask[begin:end] = mask[first : first + length]
        elif len(stores) > 1:
            loss_mask[begin:end] = 1
        segment_ids[begin:end] = index
        positions[begin:end] = count[:length]


def _gather(
    segments: Segments,
    stores: Sequence[Tokens],
    source: np.ndarray,
    place: np.ndarray,
    number: np.ndarray,
    out: tuple[np.ndarray, ...],
) -> None:
    """Copy all segments of a store at once, token by token, which is quickest for short ones."""
    targets, loss_mask, segment_ids, positions = out
    size = len(targets)
    # Gaps are runs too, of whatever stands at the beginning of the store; padding takes their place afterwards.
    ends = np.concatenate([[0], place + segments.length])
    begin, run, first, index = (np.zeros(2 * len(place) + 1, np.int64) for _ in range(4))
    begin[0::2], begin[1::2] = ends, place
    run[0::2], run[1::2] = np.concatenate([place, [size]]) - ends, segments.length
    first[1::2], index[1::2] = source, number
    count = np.arange(size)
    segment_ids[:] = np.repeat(index.astype(np.int32), run)
    positions[:] = count - np.repeat(begin, run)
    if len(stores) == 1:
        where = np.minimum(count + np.repeat(first - begin, run), len(stores[0].tokens) - 1)
        targets[:] = stores[0].tokens[where]
        if stores[0].mask is not None:
            loss_mask[:] = stores[0].mask[where]
        return
    where = count + np.repeat(first - begin, run)
    which = np.repeat(np.concatenate([[-1], np.stack([segments.source, np.full(len(place), -1)], 1).ravel()]), run)
    for each, store in enumerate(stores):
        here = np.flatnonzero(which == each)
        targets[here] = store.tokens[where[here]]
        loss_mask[here] = 1 if store.mask is None else store.mask[where[here]]
