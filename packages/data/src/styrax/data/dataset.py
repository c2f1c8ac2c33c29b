"""Batches of language-model rows as a pure function of the stores, the settings, the seed and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint
from styrax.data.held_out import HeldOut
from styrax.data.plan.line import Line
from styrax.data.plan.mixture import Mixture
from styrax.data.plan.segments import Batch, Pack, Segments, fill
from styrax.data.plan.skips import Skips
from styrax.data.plan.timeline import Points, Timeline, parse_points

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64

    from styrax.data.loader import Loader
    from styrax.data.store import TokenStore
    from styrax.data.tokenizer import StoreTokenizer

CONTRACT = 2
SINGLE = "data"
DTYPES = {
    "tokens": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "loss_mask": np.dtype(np.float32),
    "segment_ids": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
}
PACKS = ("concat", "best_fit", "none")


@dataclass(frozen=True)
class Span:
    """A stretch of one document in a row.

    Attributes:
        source: The name of the document's source in the mixture; `data` for a single store.
        document: The document's id.
        index: Its index in the store.
        start: The first target of the stretch, counted from the document's first token; `start + length` may
            reach one past its last token, for the end token.
        length: How many targets.
        column: Where in the row the stretch begins.
    """

    source: str
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
    in each row; 0 is padding, where `loss_mask` is 0. It is also 0 where the store says that a token carries no loss.

    An epoch of a source lays every training document once; `styrax.data.plan.Line` says how rows are packed and
    ordered. With several sources, rows are mixed as `styrax.data.plan.timeline` says.

    Args:
        store: A store or its folder, or a `Mixture` of several.
        seed: Decides the orders.
        seq_len: Tokens per row; or pairs of a step and a number, the first at step 0, for a schedule. Rows are packed
            for the longest, and shorter ones are stretches of these.
        batch_size: Rows per step, over all processes; or pairs, likewise.
        pack: `concat`: documents follow one another and are cut at the end of a row; `best_fit`: documents, cut only
            where they are longer than a row, are packed with the least padding; `none`: one document, or
            a piece of one, per row.
        held_out: Share of each source's documents that is never trained on, chosen by a hash of the id: the same for
            every seed. At least one document, unless it is 0.
        max_held_out_batches: Use at most so many held-out batches; `None` for all.
        max_epochs: How often a single store may be read at most; then the data end, the last batch padded.
        skip_steps: Ranges `(first, last + 1)` of steps whose data are left out, such as a stretch where the loss
            jumped; what follows moves up. Steps are counted, here and in schedules, as if nothing was left out.
        allow: Settings in which a state that a loader goes on from may differ; see `Loader.set_state`.
        prefetch: How many batches `loader` prepares ahead by default.

    Raises:
        UserError: Numbers out of range, or too few documents to hold any out; all in one message.

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
        store: TokenStore | Mixture | str | Path,
        *,
        seed: int = 0,
        seq_len: int | Points,
        batch_size: int | Points,
        pack: Pack = "concat",
        held_out: float = 0.01,
        max_held_out_batches: int | None = None,
        max_epochs: float | None = None,
        skip_steps: Sequence[tuple[int, int]] = (),
        allow: Sequence[str] = (),
        prefetch: int = 2,
    ):
        problems: list[str] = []
        widths = parse_points("seq_len", seq_len, problems)
        sizes = parse_points("batch_size", batch_size, problems)
        self._skips = Skips.parse(skip_steps, problems)
        if pack not in PACKS:
            problems.append(f"pack = {pack!r}: expected one of {', '.join(map(repr, PACKS))}")
        if not 0 <= held_out < 1:
            problems.append(f"held_out = {held_out}: expected 0 or more, and less than 1")
        if max_epochs is not None and isinstance(store, Mixture):
            problems.append("max_epochs: a mixture has its own; give it there")
        if problems:
            raise UserError("\n".join(problems))
        self.mixture = store if isinstance(store, Mixture) else Mixture({SINGLE: store}, max_epochs=max_epochs)
        self.stores: list[Any] = self.mixture.stores
        self.seed, self.prefetch = int(seed), prefetch
        self.pack: Pack = pack
        self.allow = tuple(allow)
        self.max_held_out_batches = max_held_out_batches
        self.block = max(width for _, width in widths)
        splits = [_split(store, held_out) for store in self.stores]
        self._train, self._held = [train for train, _ in splits], [held for _, held in splits]
        self.lines = [
            Line(docs, self._lengths(number, docs), block=self.block, pack=pack, key=(self.seed, name))
            for number, (name, docs) in enumerate(zip(self.mixture.names, self._train, strict=True))
        ]
        limits = [self.mixture.max_epochs.get(name) for name in self.mixture.names]
        self.timeline = Timeline(
            sizes,
            widths,
            self.mixture.schedule(),
            [
                None if limit is None else round(limit * line.places)
                for limit, line in zip(limits, self.lines, strict=True)
            ],
        )
        self.settings: dict[str, Any] = {
            "contract": CONTRACT,
            "mixture": self.mixture.settings,
            "seed": self.seed,
            "seq_len": [list(point) for point in widths],
            "batch_size": [list(point) for point in sizes],
            "block": self.block,
            "pack": pack,
            "held_out": float(held_out),
            "skip_steps": self._skips.ranges,
        }
        self.fingerprint = fingerprint(self.settings)
        special = self.stores[0].meta["tokenizer"]
        self._bos = special["eos_id"] if special["bos_id"] is None else special["bos_id"]
        self._pad = special["pad_id"]
        self.vocab_size: int = special["vocab_size"]

    def __repr__(self) -> str:
        return f"LMData({self.settings})"

    @property
    def store(self) -> Any:
        """The store; the first of a mixture."""
        return self.stores[0]

    @property
    def batch_size(self) -> int:
        """Rows per step, at the first step."""
        return self.timeline.batch_size(0)

    @property
    def seq_len(self) -> int:
        """Tokens per row, at the first step."""
        return self.timeline.width(0)

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
        """Store indices of the documents that are trained on; of the first store of a mixture."""
        return self._train[0]

    @property
    def held_out_documents(self) -> Int64[np.ndarray, " docs"]:
        """Store indices of the documents that are not, in the order of the held-out rows; of the first store."""
        return self._held[0]

    @property
    def num_tokens(self) -> int:
        """Targets in an epoch of every source: the tokens of the training documents and their ends."""
        return sum(line.targets for line in self.lines)

    @property
    def num_rows(self) -> int:
        """Rows, of the longest kind, in an epoch of every source."""
        return sum(line.num_blocks for line in self.lines)

    @property
    def num_steps(self) -> int | None:
        """How many steps there are; `None` where the data have no end."""
        return None if self.timeline.num_steps is None else self._skips.steps_before(self.timeline.num_steps)

    @property
    def steps_per_epoch(self) -> float:
        """How many steps, of the first step's size, an epoch of every source takes."""
        return sum(line.places for line in self.lines) / (self.batch_size * self.seq_len)

    def shape(self, step: int) -> tuple[int, int]:
        """Give the rows and columns of a step's batch."""
        place = self._skips.data_step(_checked(step))
        return self.timeline.batch_size(place), self.timeline.width(place)

    def spec(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Give the shape and dtype of each array of a step's batch."""
        return {name: (self.shape(step), dtype) for name, dtype in DTYPES.items()}

    @property
    def specs(self) -> list[dict[str, tuple[tuple[int, ...], np.dtype]]]:
        """The specs of all steps, each once, as the schedules go through them."""
        return [{name: (shape, dtype) for name, dtype in DTYPES.items()} for shape in self.timeline.shapes]

    def epochs(self, step: int) -> dict[str, float]:
        """Say how many epochs of each source are done before a step."""
        _, places = self.timeline.before(self._skips.data_step(_checked(step)))
        return {
            name: float(used / line.places)
            for name, used, line in zip(self.mixture.names, places, self.lines, strict=True)
        }

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Make one step's batch, or some rows of it, reading only those.

        Args:
            step: From 0; without end, unless all sources have a limit.
            rows: Which rows; all by default.

        Returns:
            int32 `tokens`, `targets`, `segment_ids`, `positions` and float32 `loss_mask`, `[rows, seq_len]`.

        Raises:
            UserError: A negative step, or one after the end.
        """
        segments, shape = self._segments(step, rows)
        return fill(segments, self.stores, shape, self._bos, self._pad)

    def sources_of(self, step: int) -> list[str]:
        """Name the source of each row of a step; the empty name for padding after the end."""
        source = self.timeline.rows(self._skips.data_step(_checked(step))).source
        return [self.mixture.names[number] if number >= 0 else "" for number in source.tolist()]

    def provenance(self, step: int, row: int) -> list[Span]:
        """Say which stretches of which documents stand in a row of a step, by column."""
        count, _ = self.shape(step)
        if not 0 <= row < count:
            raise UserError(f"row {row}: expected 0 to {count - 1}, since the batch has {count} rows")
        segments, _ = self._segments(step, slice(row, row + 1))
        names = ("source", "doc", "start", "length", "column")
        spans = zip(*(getattr(segments, name).tolist() for name in names), strict=True)
        return [
            Span(self.mixture.names[source], self.stores[source].ids[doc], doc, start, length, column)
            for source, doc, start, length, column in spans
        ]

    def metrics(self, step: int) -> dict[str, float]:
        """Measure a step's whole batch.

        Returns:
            `pad_fraction`, the share of places without a target, and for each source `tokens/NAME`, its targets in
            the batch, and `epoch/NAME`, its epochs done before the step.
        """
        segments, (rows, columns) = self._segments(step, None)
        tokens = np.bincount(segments.source, weights=segments.length, minlength=len(self.stores))
        names = self.mixture.names
        found = {"pad_fraction": 1.0 - float(segments.length.sum()) / (rows * columns)}
        found |= {f"tokens/{name}": float(count) for name, count in zip(names, tokens, strict=True)}
        return found | {f"epoch/{name}": done for name, done in self.epochs(step).items()}

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

    def differences(self, saved: Mapping[str, Any], step: int, allow: Sequence[str] = ()) -> list[str]:
        """Say what keeps these data from going on, at a step, where others with the settings `saved` stopped.

        Args:
            saved: The settings of a state.
            step: The step to go on with.
            allow: Settings that may differ, beside those of the data: `mixture`, `batch_size`, `seq_len` and
                `skip_steps` may differ from `step` on, others (`seed`, `pack`, ...) altogether: the data then go on
                in an order that begins anew.

        Returns:
            One line each; empty if nothing does.
        """
        from styrax.data.plan.changes import differences

        return differences(self, saved, step, [*self.allow, *allow])

    def _lengths(self, source: int, docs: np.ndarray) -> Int64[np.ndarray, " docs"]:
        return self.stores[source].docs["tokens"][docs]

    def _segments(self, step: int, rows: slice | None) -> tuple[Segments, tuple[int, int]]:
        place = self._skips.data_step(_checked(step))
        if self.num_steps is not None and step >= self.num_steps:
            raise UserError(
                f"step {step}: the data end after {self.num_steps} steps, when every source is at its max_epochs"
            )
        wanted = self.timeline.rows(place)
        source, begin = (wanted.source, wanted.place) if rows is None else (wanted.source[rows], wanted.place[rows])
        row = np.arange(len(source))
        if len(self.lines) == 1 and (not len(source) or source[-1] >= 0):
            parts = [(0, self.lines[0].cut(begin, wanted.width, row))] if len(source) else []
        else:
            parts = []
            for number in np.unique(source[source >= 0]).tolist():
                here = source == number
                parts.append((number, self.lines[number].cut(begin[here], wanted.width, row[here])))
        return Segments.merge(parts), (len(source), wanted.width)


def _checked(step: int) -> int:
    if step < 0:
        raise UserError(f"step {step}: expected 0 or more")
    return int(step)


def _split(store: Any, held_out: float) -> tuple[np.ndarray, np.ndarray]:
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
