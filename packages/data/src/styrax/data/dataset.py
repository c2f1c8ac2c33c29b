"""Batches of language-model rows as a pure function of the store, the settings, the seed and the step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint, permutation
from styrax.data.packing import Batch, Pack, Plan, Segments, fill
from styrax.data.store import TokenStore

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64

    from styrax.data.loader import Loader
    from styrax.data.tokenizer import StoreTokenizer

CONTRACT = 1
KEPT_PLANS = 4


@dataclass(frozen=True)
class Span:
    """A stretch of one document in a row.

    Attributes:
        document: The document's id.
        index: Its index in the store.
        start: The first target of the stretch, counted from the document's first token; `start + length` may
            reach one past its last token, for the end token.
        length: How many targets.
        column: Where in the row the stretch begins.
    """

    document: str
    index: int
    start: int
    length: int
    column: int


class LMData:
    r"""Rows of packed documents; `batch(step)` depends on nothing but the arguments here and the step.

    The contract, in training and held-out rows alike: a document $x_1 \ldots x_n$ has the inputs
    `[begin, x_1, ..., x_n]` and the targets `[x_1, ..., x_n, end]`. So each of its tokens is a target once,
    the first predicted from the begin token alone (`bos_id`, or `eos_id` where there is none), and no
    position is spent on a document's end. A document that does not end in its row goes on in another as a new
    segment: its first input there is the token before, its positions restart at 0. `segment_ids` count from 1
    in each row; 0 is padding, where `loss_mask` is 0.

    An epoch is `num_rows` rows, in which every training document is laid once: the documents in an order of
    the epoch's own, packed into rows, and the rows in an order of their own, so that a long document is not
    spread over one batch. Only the last row of an epoch's line is padded (`concat`), or the last row of each
    document (`none`). Row r of step s is row `s * batch_size + r` of the endless sequence of epochs.

    Args:
        store: A store or its folder.
        seed: Decides the orders.
        seq_len: Tokens per row.
        batch_size: Rows per step, over all processes.
        pack: `concat`: documents follow one another and are cut at the end of a row; `none`: one document, or
            a piece of one, per row.
        held_out: Share of documents that is never trained on, chosen by a hash of the id: the same for every
            seed. At least one document, unless it is 0.
        max_held_out_batches: Use at most so many held-out batches; `None` for all.
        prefetch: How many batches `loader` prepares ahead by default.

    Raises:
        UserError: Numbers out of range, or too few documents to hold any out.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> store = write_store(f"{tempfile.mkdtemp()}/s", {"a": "Hi", "b": "there"}, ByteTokenizer())
        >>> data = LMData(store, seq_len=12, batch_size=1, held_out=0)
        >>> batch = data.batch(0)
        >>> batch["segment_ids"].tolist(), batch["positions"].tolist()
        ([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0]], [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0, 0]])
        >>> batch["tokens"][0, :7].tolist(), batch["targets"][0, :6].tolist()
        ([256, 116, 104, 101, 114, 101, 256], [116, 104, 101, 114, 101, 256])
    """

    def __init__(
        self,
        store: TokenStore | str | Path,
        *,
        seed: int = 0,
        seq_len: int,
        batch_size: int,
        pack: Pack = "concat",
        held_out: float = 0.01,
        max_held_out_batches: int | None = None,
        prefetch: int = 2,
    ):
        problems = [f"{name} = {value}: expected 1 or more" for name, value in
                    (("seq_len", seq_len), ("batch_size", batch_size)) if value < 1]  # fmt: skip
        if pack not in ("concat", "none"):
            problems.append(f"pack = {pack!r}: expected 'concat' or 'none'")
        if not 0 <= held_out < 1:
            problems.append(f"held_out = {held_out}: expected 0 or more, and less than 1")
        if problems:
            raise UserError("\n".join(problems))
        self.store = store if isinstance(store, TokenStore) else TokenStore(store)
        self.seed, self.seq_len, self.batch_size = int(seed), seq_len, batch_size
        self.pack: Pack = pack
        self.prefetch = prefetch
        self.max_held_out_batches = max_held_out_batches
        self._train, self._held = _split(self.store, held_out)
        self.settings: dict[str, Any] = {
            "contract": CONTRACT,
            "store": self.store.fingerprint,
            "seed": self.seed,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "pack": pack,
            "held_out": float(held_out),
        }
        self.fingerprint = fingerprint(self.settings)
        special = self.store.meta["tokenizer"]
        self._bos = special["eos_id"] if special["bos_id"] is None else special["bos_id"]
        self._pad = special["pad_id"]
        self.vocab_size: int = special["vocab_size"]
        self.num_rows = Plan.make(self._train, self._lengths(self._train), seq_len, pack).num_rows
        self._plans: dict[int, tuple[Plan, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"LMData({self.settings}, {self.num_rows} rows an epoch)"

    @property
    def tokenizer(self) -> StoreTokenizer:
        """What made the ids."""
        return self.store.tokenizer

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """For each id, how many bytes of UTF-8 it stands for; special ids 0."""
        return self.tokenizer.token_bytes

    @property
    def train_documents(self) -> Int64[np.ndarray, " docs"]:
        """Store indices of the documents that are trained on."""
        return self._train

    @property
    def held_out_documents(self) -> Int64[np.ndarray, " docs"]:
        """Store indices of the documents that are not, in the order of the held-out rows."""
        return self._held

    @property
    def num_tokens(self) -> int:
        """Targets in an epoch: the tokens of the training documents and their ends."""
        return int(self._lengths(self._train).sum())

    @property
    def steps_per_epoch(self) -> float:
        """How many steps an epoch takes; epochs need not begin with a batch."""
        return self.num_rows / self.batch_size

    def epoch(self, step: int) -> float:
        """How many epochs are done before a step."""
        return step * self.batch_size / self.num_rows

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Make one step's batch, or some rows of it, reading only those.

        Args:
            step: From 0, without end.
            rows: Which rows; all by default.

        Returns:
            int32 `tokens`, `targets`, `segment_ids`, `positions` and float32 `loss_mask`, `[rows, seq_len]`.

        Raises:
            UserError: A negative step.
        """
        segments, count = self._segments(step, rows)
        return self._fill(segments, count)

    def provenance(self, step: int, row: int) -> list[Span]:
        """Say which stretches of which documents stand in a row of a step, by column."""
        if not 0 <= row < self.batch_size:
            raise UserError(f"row {row}: expected 0 to {self.batch_size - 1}, since a batch has {self.batch_size} rows")
        segments, _ = self._segments(step, slice(row, row + 1))
        return self._spans(segments)

    def held_out(self) -> HeldOut:
        """Give the batches over documents that are never trained on; the same for every seed."""
        return HeldOut(self)

    def held_out_text(self) -> bytes:
        """Give the exact text whose tokens are the targets of the held-out batches, in their order.

        Where `max_held_out_batches` cuts it, it ends with the last target, perhaps inside a character.
        """
        batches = self.held_out()
        targets = [batch["targets"][batch["loss_mask"] > 0] for batch in batches]
        return b"".join(self.tokenizer.decode_bytes(ids.tolist()) for ids in targets)

    def loader(self, *, step: int = 0, sharding: Any = None, prefetch: int | None = None) -> Loader:
        """Iterate over batches from a step on.

        Args:
            step: The first step.
            sharding: A `jax.sharding.Sharding` of `[batch, seq]`: then batches are global `jax.Array`s, and
                each process makes only the rows that its devices hold. `None`: whole batches in numpy.
            prefetch: How many batches to prepare ahead in a thread, 0 for none; changes no batch.
        """
        from styrax.data.loader import Loader

        return Loader(self, step=step, sharding=sharding, prefetch=self.prefetch if prefetch is None else prefetch)

    def _lengths(self, docs: np.ndarray) -> Int64[np.ndarray, " docs"]:
        return self.store.docs["tokens"][docs]

    def _plan(self, epoch: int) -> tuple[Plan, np.ndarray]:
        with self._lock:
            found = self._plans.get(epoch)
            if found is None:
                docs = self._train[permutation(len(self._train), "documents", self.seed, epoch)]
                plan = Plan.make(docs, self._lengths(docs), self.seq_len, self.pack)
                found = plan, permutation(plan.num_rows, "rows", self.seed, epoch)
                while len(self._plans) >= KEPT_PLANS:
                    self._plans.pop(next(iter(self._plans)))
                self._plans[epoch] = found
            return found

    def _segments(self, step: int, rows: slice | None) -> tuple[Segments, int]:
        if step < 0:
            raise UserError(f"step {step}: expected 0 or more")
        chosen = range(self.batch_size)[rows if rows is not None else slice(None)]
        wanted = int(step) * self.batch_size + np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)
        if not len(wanted):
            return Segments(*(np.zeros(0, np.int64) for _ in range(6))), 0
        epochs, within = np.divmod(wanted, self.num_rows)
        edges = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(wanted)]
        parts = []
        for begin, end in pairwise(edges):
            plan, order = self._plan(int(epochs[begin]))
            parts.append(plan.cut(order[within[begin:end]]))
        return Segments.stack(parts, edges[:-1]), len(wanted)

    def _fill(self, segments: Segments, rows: int) -> Batch:
        starts = self.store.docs["start"]
        return fill(segments, self.store.tokens, starts, (rows, self.seq_len), self._bos, self._pad)

    def _spans(self, segments: Segments) -> list[Span]:
        columns = (segments.doc, segments.start, segments.length, segments.column)
        spans = zip(*(column.tolist() for column in columns), strict=True)
        return [Span(self.store.ids[doc], doc, start, length, column) for doc, start, length, column in spans]


class HeldOut(Sequence[Batch]):
    """The held-out batches, made when they are asked for; the last is padded with rows of mask 0.

    Args:
        data: Whose documents; they are packed as its training rows are, in the order of their hash.
    """

    def __init__(self, data: LMData):
        self._data = data
        docs = data.held_out_documents
        self._plan = Plan.make(docs, data._lengths(docs), data.seq_len, data.pack)
        self._count = -(-self._plan.num_rows // data.batch_size)
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
            return [self._batch(i) for i in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"held-out batch {index} of {len(self)}")
        return self._batch(range(len(self))[index])

    def _batch(self, number: int) -> Batch:
        first = number * self._data.batch_size
        rows = np.arange(first, min(first + self._data.batch_size, self._plan.num_rows))
        return self._data._fill(self._plan.cut(rows), self._data.batch_size)


def _split(store: TokenStore, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide the documents by the hash of their ids: training ones by index, held-out ones by hash."""
    hashes = store.docs["id_hash"]
    order = np.argsort(hashes, kind="stable")
    count = int(np.count_nonzero(hashes < np.float64(held_out) * 2.0**64))
    if held_out > 0:
        if len(store) < 2:
            raise UserError(
                f"held_out = {held_out} needs two documents or more; {store.path} has {len(store)}; cut the "
                "text into documents when the store is built (split_on), or set held_out = 0"
            )
        count = min(max(count, 1), len(store) - 1)
    return np.sort(order[count:]), order[:count]
