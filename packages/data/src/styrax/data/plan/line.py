"""One source as an endless line of tokens: epochs of packed blocks, each epoch in an order of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from styrax.data.hashing import permutation, random_bits
from styrax.data.plan.best_fit import Slots, best_fit_decreasing
from styrax.data.plan.segments import Pack, Plan, Segments

if TYPE_CHECKING:
    from jaxtyping import Int64

KEPT_PLANS = 4


class Line:
    r"""Documents laid into blocks, epoch after epoch; any stretch of it costs the planning of its epoch at most.

    An epoch has `num_blocks` blocks of `block` places. In an epoch every document is laid once, and then the
    blocks are put in an order of their own, so that a long document is not spread over one batch. Place $p$ of the
    line is place $p \bmod b$ of block $\lfloor p / b \rfloor$.

    `concat`
        The documents follow one another without a gap, in the epoch's order, and are cut where a block ends; only the
        last block of the line has padding.
    `best_fit`
        Documents longer than a block are cut into whole blocks and a rest; the pieces are packed by
        `best_fit_decreasing`. Which piece of a length takes which slot changes with the epoch.
    `none`
        Each document begins a block, and goes on in the following ones.

    Args:
        docs: Store indices.
        lengths: Targets of each: its tokens and the end token.
        block: Places in a block.
        pack: How blocks are filled.
        key: What the orders depend on beside the epoch, such as the seed; `None` keeps the documents in the order given
            and the blocks in that of the line.
    """

    def __init__(
        self,
        docs: Int64[np.ndarray, " docs"],
        lengths: Int64[np.ndarray, " docs"],
        *,
        block: int,
        pack: Pack,
        key: tuple[str | int, ...] | None,
    ):
        self._docs, self._lengths = docs, lengths.astype(np.int64)
        self.block, self.pack = block, pack
        self._key = key
        self._slots: Slots | None = None
        if pack == "best_fit":
            whole, rest = np.divmod(self._lengths, block)
            count = whole + (rest > 0)
            document = np.repeat(np.arange(len(docs)), count)
            index = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
            length = np.minimum(self._lengths[document] - index * block, block)
            longest_first = np.argsort(-length, kind="stable")
            self._pieces = docs[document][longest_first], (index * block)[longest_first], length[longest_first]
            self._slots = best_fit_decreasing(length, block)
            self._slot_order = np.argsort(-self._slots.length, kind="stable")
            self.num_blocks = self._slots.num_blocks
        elif pack == "concat":
            self.num_blocks = -(-int(self._lengths.sum()) // block)
        else:
            self.num_blocks = int((-(-self._lengths // block)).sum())
        self._plans: dict[int, tuple[Plan, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def places(self) -> int:
        """Places in an epoch, padding among them."""
        return self.num_blocks * self.block

    @property
    def targets(self) -> int:
        """Places in an epoch that hold a target."""
        return int(self._lengths.sum())

    def cut(self, place: Int64[np.ndarray, " rows"], width: int, row: Int64[np.ndarray, " rows"]) -> Segments:
        """Find what stands on stretches `[place, place + width)` of the endless line.

        Args:
            place: Where each begins.
            width: Columns.
            row: Row of the batch that each goes to, rising.
        """
        number, within = np.divmod(place, self.block)
        if width == self.block and not within.any():  # whole blocks, as with one sequence length
            return self._blocks(number, within, within + width, row, within)
        count = (within + width - 1) // self.block + 1  # blocks that each touches
        index = np.repeat(np.arange(len(place)), count)
        nth = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        low = np.where(nth == 0, within[index], 0)
        high = np.minimum(within[index] + width - nth * self.block, self.block)
        column = np.where(nth == 0, 0, nth * self.block - within[index])
        return self._blocks(number[index] + nth, low, high, row[index], column)

    def _blocks(
        self, number: np.ndarray, low: np.ndarray, high: np.ndarray, row: np.ndarray, column: np.ndarray
    ) -> Segments:
        """Find what stands from `low` to `high` in blocks of the endless line."""
        epochs, blocks = np.divmod(number, self.num_blocks)
        first = int(epochs[0])
        if int(epochs[-1]) == first and (epochs == first).all():
            plan, order = self._plan(first)
            start = order[blocks] * self.block
            return plan.cut(start + low, start + high, row, column)
        parts = []
        for epoch in np.unique(epochs).tolist():
            plan, order = self._plan(epoch)
            here = epochs == epoch
            start = order[blocks[here]] * self.block
            parts.append(plan.cut(start + low[here], start + high[here], row[here], column[here]))
        return Segments.merge([(0, part) for part in parts])

    def _plan(self, epoch: int) -> tuple[Plan, np.ndarray]:
        with self._lock:
            found = self._plans.get(epoch)
            if found is None:
                found = self._make(epoch)
                while len(self._plans) >= KEPT_PLANS:
                    self._plans.pop(next(iter(self._plans)))
                self._plans[epoch] = found
            return found

    def _make(self, epoch: int) -> tuple[Plan, np.ndarray]:
        plan = self._best_fit(epoch) if self._slots is not None else self._in_order(epoch)
        if self._key is None:
            return plan, np.arange(self.num_blocks)
        return plan, permutation(self.num_blocks, "rows", *self._key, epoch)

    def _in_order(self, epoch: int) -> Plan:
        order = slice(None) if self._key is None else permutation(len(self._docs), "documents", *self._key, epoch)
        docs, length = self._docs[order], self._lengths[order]
        room = length if self.pack == "concat" else -(-length // self.block) * self.block
        return Plan(docs, np.zeros_like(length), length, np.cumsum(room) - room)

    def _best_fit(self, epoch: int) -> Plan:
        assert self._slots is not None
        docs, start, length = self._pieces
        chosen = np.empty(len(docs), np.int64)
        chosen[self._slot_order] = self._among_equals(length, epoch)
        slots = self._slots
        return Plan(docs[chosen], start[chosen], slots.length, slots.begin)

    def _among_equals(self, length: np.ndarray, epoch: int) -> np.ndarray:
        """Order pieces, which are sorted by length, at random within each length."""
        if self._key is None:
            return np.arange(len(length))
        new = np.ones(len(length), bool)
        new[1:] = length[1:] != length[:-1]
        return np.lexsort((random_bits(len(length), "pieces", *self._key, epoch), np.cumsum(new)))
