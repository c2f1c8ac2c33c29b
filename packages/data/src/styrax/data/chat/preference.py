"""Batches of preference pairs as a pure function of the store, the settings, the seed and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from styrax.core.errors import UserError
from styrax.data.chat.build import SIDES
from styrax.data.dataset import DTYPES
from styrax.data.hashing import fingerprint, permutation
from styrax.data.plan.segments import Batch, Segments, fill
from styrax.data.settings import changed
from styrax.data.store.tokens import TokenStore

if TYPE_CHECKING:
    from jaxtyping import Int64

    from styrax.data.loader import Loader
    from styrax.data.tokenizer import StoreTokenizer

CONTRACT = 1
PARTS = ("chosen", "rejected")
SHOWN = 3

TooLong = Literal["raise", "drop"]


class PreferenceData:
    r"""Pairs of a chosen and a rejected document; `batch(step)` depends on nothing but the arguments here and the step.

    A batch has `chosen_tokens`, `chosen_targets`, `chosen_loss_mask`, `chosen_segment_ids`, `chosen_positions`, and the
    same for `rejected_`, each `[batch, seq_len]`, under the contract of `LMData` with `pack="none"`: one whole document
    per row. Row r of step s is pair $\pi_e(i)$ with $sB + r = eN + i$: epoch $e$ of $N$ pairs has the order $\pi_e$ of
    its own.

    Args:
        store: A store made by `build_preference_store`, or its folder.
        seq_len: Tokens per row.
        batch_size: Pairs per step, over all processes.
        seed: Decides the orders.
        held_out: Share of the pairs that is never trained on, chosen by a hash of the id: the same for every seed. At
            least one pair, unless it is 0.
        max_held_out_batches: Use at most so many held-out batches; `None` for all.
        max_epochs: Where the data end, the last batch padded with rows of mask 0. Without end by default.
        too_long: What to do with pairs of which a document has more than `seq_len` tokens, its end among them: `raise`,
            or `drop` them; `num_dropped` says how many. None is cut.
        prefetch: How many batches `loader` prepares ahead by default.

    Raises:
        UserError: The store holds no pairs, pairs are too long, or numbers are out of range.

    Example:
        >>> import tempfile
        >>> from styrax.data.chat import build_preference_store
        >>> pairs = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "?"} for i in range(9)]
        >>> store = build_preference_store(pairs, f"{tempfile.mkdtemp()}/s", "byte")
        >>> data = PreferenceData(store, seq_len=8, batch_size=4, max_epochs=1, held_out=0)
        >>> batch = data.batch(0)
        >>> batch["chosen_tokens"].shape, batch["rejected_loss_mask"][0].tolist(), data.num_steps
        ((4, 8), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], 3)
    """

    def __init__(
        self,
        store: TokenStore | str | Path,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        held_out: float = 0.01,
        max_held_out_batches: int | None = None,
        max_epochs: int | None = None,
        too_long: TooLong = "raise",
        prefetch: int = 2,
    ):
        wrong = {
            f"seq_len = {seq_len}: expected 1 or more": seq_len < 1,
            f"batch_size = {batch_size}: expected 1 or more": batch_size < 1,
            f"held_out = {held_out}: expected 0 or more, and less than 1": not 0 <= held_out < 1,
            f"max_epochs = {max_epochs}: expected 1 or more, or None for no end": max_epochs is not None
            and max_epochs < 1,
            f"too_long = {too_long!r}: expected 'raise' or 'drop'": too_long not in ("raise", "drop"),
        }
        if problems := [problem for problem, found in wrong.items() if found]:
            raise UserError("\n".join(problems))
        self.store = store if isinstance(store, TokenStore) else TokenStore(store)
        _check_pairs(self.store)
        self.seq_len, self.batch_size, self.seed = int(seq_len), int(batch_size), int(seed)
        self.max_epochs, self.prefetch = max_epochs, prefetch
        self.max_held_out_batches = max_held_out_batches
        kept = self._kept(too_long)
        self.num_dropped = len(self.store) // 2 - len(kept)
        self._train, self._held = _split(self.store, kept, held_out)
        self._orders: dict[int, np.ndarray] = {}
        special = self.store.meta["tokenizer"]
        self._bos = special["eos_id"] if special["bos_id"] is None else special["bos_id"]
        self._pad = special["pad_id"]
        self.vocab_size: int = special["vocab_size"]
        self.settings: dict[str, Any] = {
            "contract": CONTRACT,
            "store": self.store.fingerprint,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "held_out": float(held_out),
            "max_epochs": max_epochs,
            "too_long": too_long,
        }
        self.fingerprint = fingerprint(self.settings)

    def __repr__(self) -> str:
        return f"PreferenceData({self.settings})"

    @property
    def tokenizer(self) -> StoreTokenizer:
        """What made the ids."""
        return self.store.tokenizer

    @property
    def num_pairs(self) -> int:
        """Pairs in an epoch."""
        return len(self._train)

    @property
    def num_steps(self) -> int | None:
        """How many steps there are; `None` for no end."""
        return None if self.max_epochs is None else -(-self.max_epochs * self.num_pairs // self.batch_size)

    @property
    def steps_per_epoch(self) -> float:
        """How many steps an epoch takes; epochs need not begin with a batch."""
        return self.num_pairs / self.batch_size

    @property
    def specs(self) -> list[dict[str, tuple[tuple[int, ...], np.dtype]]]:
        """The one spec, which all steps share."""
        shape = (self.batch_size, self.seq_len)
        return [{f"{part}_{name}": (shape, dtype) for part in PARTS for name, dtype in DTYPES.items()}]

    def spec(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Give the shape and dtype of each array of a step's batch."""
        return self.specs[0]

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Make one step's batch, or some rows of it, reading only those.

        Args:
            step: From 0.
            rows: Which rows; all by default.

        Returns:
            For `chosen_` and `rejected_`: int32 `tokens`, `targets`, `segment_ids`, `positions` and float32
            `loss_mask`, `[rows, seq_len]`; a row of both is one pair.

        Raises:
            UserError: A step that does not exist.
        """
        return self._fill(self._pairs(step)[rows if rows is not None else slice(None)])

    def pairs(self, step: int) -> list[str]:
        """Name the pair in each row of a step, but for the rows that pad the last batch."""
        return [self.store.ids[2 * pair].removesuffix(SIDES[0]) for pair in self._pairs(step).tolist() if pair >= 0]

    def held_out(self) -> HeldOutPairs:
        """Give the batches of pairs that are never trained on; the same for every seed."""
        return HeldOutPairs(self)

    def loader(self, *, step: int = 0, sharding: Any = None, prefetch: int | None = None) -> Loader:
        """Iterate over batches from a step on; see `LMData.loader`."""
        from styrax.data.loader import Loader

        return Loader(self, step=step, sharding=sharding, prefetch=self.prefetch if prefetch is None else prefetch)

    def differences(self, saved: Mapping[str, Any], step: int, allow: Sequence[str] = ()) -> list[str]:
        """Say what keeps these data from going on where others with the settings `saved` stopped."""
        return changed(self.settings, saved, allow)

    def _pairs(self, step: int) -> Int64[np.ndarray, " rows"]:
        """Give the pair in each row of a step; -1 after the end."""
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            raise UserError(f"step {step}: expected 0 to {'any' if self.num_steps is None else self.num_steps - 1}")
        epoch, within = np.divmod(np.arange(step * self.batch_size, (step + 1) * self.batch_size), self.num_pairs)
        found = np.empty(len(epoch), np.int64)
        for number in np.unique(epoch).tolist():
            here = epoch == number
            found[here] = self._train[self._order(number)[within[here]]]
        return found if self.max_epochs is None else np.where(epoch < self.max_epochs, found, -1)

    def _order(self, epoch: int) -> Int64[np.ndarray, " pairs"]:
        order = self._orders.get(epoch)
        if order is None:
            order = permutation(self.num_pairs, "pairs", self.seed, epoch)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return order

    def _fill(self, pairs: Int64[np.ndarray, " rows"]) -> Batch:
        row = np.flatnonzero(pairs >= 0)
        zeros, batch = np.zeros(len(row), np.int64), {}
        for side, part in enumerate(PARTS):
            docs = 2 * pairs[row] + side
            segments = Segments.of(row, zeros, docs, zeros, self.store.docs["tokens"][docs])
            made = fill(segments, [self.store], (len(pairs), self.seq_len), self._bos, self._pad)
            batch.update({f"{part}_{name}": array for name, array in made.items()})
        return batch

    def _kept(self, too_long: TooLong) -> Int64[np.ndarray, " pairs"]:
        longest = self.store.docs["tokens"].reshape(-1, 2).max(axis=1)
        over = np.flatnonzero(longest > self.seq_len)
        if len(over) and too_long == "raise":
            worst = over[np.argsort(-longest[over], kind="stable")][:SHOWN].tolist()
            names = ", ".join(
                f"{self.store.ids[2 * pair].removesuffix(SIDES[0])!r} ({longest[pair]})" for pair in worst
            )
            raise UserError(
                f"{len(over)} of {len(longest)} pairs are longer than seq_len = {self.seq_len}; the longest have so "
                f"many tokens: {names}; expected a seq_len of {longest[over].max()} or more, or too_long='drop' to "
                "leave them out"
            )
        if len(over) == len(longest):
            raise UserError(f"all {len(longest)} pairs are longer than seq_len = {self.seq_len}; none is left")
        return np.flatnonzero(longest <= self.seq_len)


class HeldOutPairs(Sequence[Batch]):
    """The held-out batches, made when they are asked for, in the order of the pairs' hashes; the last is padded.

    Args:
        data: Whose pairs.
    """

    def __init__(self, data: PreferenceData):
        self._data = data
        self._count = -(-len(data._held) // data.batch_size)
        if data.max_held_out_batches is not None:
            self._count = min(self._count, data.max_held_out_batches)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        """Make one batch, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"held-out batch {index} of {len(self)}")
        size = self._data.batch_size
        begin = range(len(self))[index] * size
        pairs = np.full(size, -1, np.int64)
        some = self._data._held[begin : begin + size]
        pairs[: len(some)] = some
        return self._data._fill(pairs)


def _check_pairs(store: TokenStore) -> None:
    """Refuse a store that does not hold one pair after another."""
    ids = store.ids
    wrong = [
        f"document {index} is {name!r}" for index, name in enumerate(ids) if not name.endswith(SIDES[index % 2])
    ] or [
        f"document {2 * pair} is {a!r} and the next {b!r}"
        for pair, (a, b) in enumerate(zip(ids[::2], ids[1::2], strict=False))
        if a.removesuffix(SIDES[0]) != b.removesuffix(SIDES[1])
    ]
    if not wrong and len(ids) % 2:
        wrong = [f"it has {len(ids)} documents"]
    if wrong:
        raise UserError(
            f"{store.path} holds no preference pairs: {wrong[0]}; expected 'X{SIDES[0]}', then 'X{SIDES[1]}', as "
            "build_preference_store makes them"
        )


def _split(store: TokenStore, kept: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide the pairs by the hash of their ids: training ones by index, held-out ones by hash."""
    hashes = store.docs["id_hash"][2 * kept]
    order = kept[np.argsort(hashes, kind="stable")]
    count = int(np.count_nonzero(hashes < np.float64(held_out) * 2.0**64))
    if held_out > 0:
        if len(kept) < 2:
            raise UserError(f"held_out = {held_out} needs two pairs or more, got {len(kept)}; set held_out = 0")
        count = min(max(count, 1), len(kept) - 1)
    return np.sort(order[count:]), order[:count]
