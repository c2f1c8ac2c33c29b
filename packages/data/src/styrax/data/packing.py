"""Lay documents into rows: index arithmetic for any row, and one gather for a whole batch.

Documents stand one after another on a line: `concat` leaves no gap, `none` starts each document at a multiple
of `seq_len`. Row k of the plan is the stretch `[k * seq_len, (k + 1) * seq_len)` of that line. A place on the
line is one target: the tokens of the document, then its end token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped

Pack = Literal["concat", "none"]
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Plan:
    """Where each document of one epoch stands.

    Attributes:
        docs: Store index of each document, in the order of the line.
        begin: Where each begins on the line, and at last where the line ends.
        length: Targets of each: its tokens and the end token.
        seq_len: Places per row.
        num_rows: Rows of the line.
    """

    docs: Int64[np.ndarray, " docs"]
    begin: Int64[np.ndarray, " docs+1"]
    length: Int64[np.ndarray, " docs"]
    seq_len: int
    num_rows: int

    @classmethod
    def make(cls, docs: np.ndarray, length: np.ndarray, seq_len: int, pack: Pack) -> Plan:
        """Lay documents of these lengths one after another."""
        room = length if pack == "concat" else -(-length // seq_len) * seq_len
        begin = np.zeros(len(docs) + 1, np.int64)
        np.cumsum(room, out=begin[1:])
        return cls(docs, begin, length, seq_len, -(-int(begin[-1]) // seq_len))

    def cut(self, rows: Int64[np.ndarray, " rows"]) -> Segments:
        """Find what stands in rows of the plan: O(log docs) each.

        Args:
            rows: Rows in `[0, num_rows)`, in any order.
        """
        low = rows * self.seq_len
        high = np.minimum(low + self.seq_len, self.begin[-1])
        first = np.searchsorted(self.begin, low, side="right") - 1
        count = np.searchsorted(self.begin, high, side="left") - first
        row = np.repeat(np.arange(len(rows)), count)
        index = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        place = first[row] + index
        begin = self.begin[place]
        start = np.maximum(begin, low[row])
        stop = np.minimum(begin + self.length[place], high[row])
        return Segments(row, index + 1, start - low[row], self.docs[place], start - begin, stop - start)


@dataclass(frozen=True)
class Segments:
    """Stretches of documents in a batch, by row, then by column; arrays of one length.

    Attributes:
        row: Row of the batch.
        segment: Number in the row, from 1.
        column: First column.
        doc: Store index of the document.
        start: First target, counted from the document's first token.
        length: How many targets.
    """

    row: Int64[np.ndarray, " segments"]
    segment: Int64[np.ndarray, " segments"]
    column: Int64[np.ndarray, " segments"]
    doc: Int64[np.ndarray, " segments"]
    start: Int64[np.ndarray, " segments"]
    length: Int64[np.ndarray, " segments"]

    @classmethod
    def stack(cls, parts: list[Segments], offsets: list[int]) -> Segments:
        """Put batches under one another; `offsets` are the rows where each begins."""
        if len(parts) == 1 and offsets[0] == 0:
            return parts[0]
        rows = [part.row + offset for part, offset in zip(parts, offsets, strict=True)]
        names = ("segment", "column", "doc", "start", "length")
        return cls(np.concatenate(rows), *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def fill(
    segments: Segments,
    tokens: Shaped[np.ndarray, " tokens"],
    doc_start: Int64[np.ndarray, " docs"],
    shape: tuple[int, int],
    bos_id: int,
    pad_id: int,
) -> Batch:
    r"""Make a batch of segments by one gather.

    With $x_1 \ldots x_n$ a document's tokens, $x_0$ the begin token and $x_{n+1}$ the end token, a segment of
    targets $x_a \ldots x_b$ has inputs $x_{a-1} \ldots x_{b-1}$: every token of a document, and its end, is
    a target exactly once, the first one from the begin token alone.

    Args:
        segments: What stands where.
        tokens: The store's ids.
        doc_start: Where each document starts in `tokens`.
        shape: Rows and columns.
        bos_id: Input before a document's first token.
        pad_id: Fills what no segment covers.

    Returns:
        The batch: `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_mask` float32, all `shape`.
    """
    size = shape[0] * shape[1]
    place = segments.row * shape[1] + segments.column
    source = doc_start[segments.doc] + segments.start
    length, number, shift = segments.length, segments.segment, source - place
    covered = int(length.sum())
    starts = place
    if covered < size:
        starts, length, number, shift = _with_gaps(place, length, number, shift, size)
    arange = np.arange(size)
    segment_ids = np.repeat(number, length).astype(np.int32)
    positions = (arange - np.repeat(starts, length)).astype(np.int32)
    index = arange + np.repeat(shift, length)
    if covered < size:
        np.minimum(index, len(tokens) - 1, out=index)
    targets = tokens[index].astype(np.int32)
    inputs = np.empty_like(targets)
    inputs[1:] = targets[:-1]
    inputs[place] = np.where(segments.start == 0, bos_id, tokens[np.maximum(source - 1, 0)])
    loss_mask = np.ones(size, np.float32)
    if covered < size:
        padding = segment_ids == 0
        for array, value in ((targets, pad_id), (inputs, pad_id), (positions, 0), (loss_mask, 0.0)):
            array[padding] = value
    arrays = {
        "tokens": inputs,
        "targets": targets,
        "loss_mask": loss_mask,
        "segment_ids": segment_ids,
        "positions": positions,
    }
    return {name: array.reshape(shape) for name, array in arrays.items()}


def _with_gaps(
    place: np.ndarray, length: np.ndarray, number: np.ndarray, shift: np.ndarray, size: int
) -> tuple[np.ndarray, ...]:
    """Add a stretch of segment 0 wherever two segments do not touch; its source is the store's first ids."""
    ends = np.concatenate([[0], place + length])
    gap = np.concatenate([place, [size]]) - ends
    starts = np.empty(2 * len(place) + 1, np.int64)
    lengths, numbers, shifts = np.empty_like(starts), np.zeros_like(starts), np.zeros_like(starts)
    starts[0::2], starts[1::2] = ends, place
    lengths[0::2], lengths[1::2] = gap, length
    numbers[1::2] = number
    shifts[0::2], shifts[1::2] = -ends, shift
    return starts, lengths, numbers, shifts
