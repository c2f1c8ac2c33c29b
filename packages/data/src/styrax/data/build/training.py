"""The tokenizer of a store that is being built: read, or trained on a sample of the sources."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from styrax.core.errors import UserError
from styrax.data.bpe import train_bpe
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers import Meter, Piece, read_piece
from styrax.data.build.records import ReadSettings, Record, item_record
from styrax.data.build.units import Records
from styrax.data.build.write import Progress
from styrax.data.hashing import hash64
from styrax.data.spec import bpe_size
from styrax.data.tokenizer import ByteTokenizer, StoreTokenizer, load_tokenizer

TRAIN_BYTES = 4_000_000
LOOK_CHARS = 64_000_000
SLICES = 16


def make_tokenizer(
    spec: str,
    pieces: Sequence[Piece],
    records: Sequence[Records] = (),
    settings: ReadSettings = ReadSettings(),  # noqa: B008
    progress: Progress | None = None,
) -> StoreTokenizer:
    """Make the tokenizer that a text names.

    Args:
        spec: `byte`, `bpe:N` or the path of a `tokenizer.json`.
        pieces: The files that BPE is trained on: a sample of about 4 MB, chosen by hash, held-out documents
            and ones that will be filtered included.
        records: The iterables that it is trained on.
        settings: How they are read.
        progress: Called as `progress(label, done, total)`.

    Raises:
        UserError: The text names nothing, the file is no exact tokenizer, or a source can be read but once.
    """
    size = bpe_size(spec)
    if size is None:
        return ByteTokenizer() if spec == "byte" else load_tokenizer(spec)
    for source in records:
        if source.once:
            raise UserError(
                f"tokenizer {spec!r} is trained on the sources, but the records of {source.name!r} can be read but "
                "once; give a list or a dataset, or a tokenizer: train_bpe(texts), 'byte' or a tokenizer.json"
            )
    if progress is not None:
        progress("train tokenizer", 0, None)
    return train_bpe(sample_texts(pieces, records, settings), size)


def sample_texts(
    pieces: Sequence[Piece], records: Sequence[Records], settings: ReadSettings, budget: int = TRAIN_BYTES
) -> Iterator[str]:
    """Give texts in the order of a hash until `budget` characters.

    Args:
        pieces: Of files. Long texts give evenly spaced slices, tables some records, chosen by hash.
        records: Iterables; they give records chosen by hash.
        settings: How they are read.
        budget: About how many characters to give.
    """
    share = budget // max(1, min(len(pieces) + len(records), SLICES))
    for piece in sorted(pieces, key=lambda piece: hash64("train-tokenizer", _name(piece))):
        if budget <= 0:
            return
        if piece.whole:
            found = read_piece(piece, replace(settings, split_on=None), Meter())
            text = "".join(record.text for record in found if not isinstance(record, Refused))
            length = max(1, budget // SLICES)
            if len(text) <= SLICES * length:
                yield text
            else:
                yield from (text[len(text) * i // SLICES :][:length] for i in range(SLICES))
            budget -= len(text)
        else:
            for text in _choose(read_piece(piece, settings, Meter()), share):
                yield text
                budget -= len(text)
    for source in records:
        items = (item_record(item, f"{source.name}@{i}", "", settings) for i, item in enumerate(source.read(settings)))
        yield from _choose(items, min(share, max(0, budget)))


def _name(piece: Piece) -> str:
    return piece.document.id if piece.whole else f"{piece.document.id}@{piece.start}"


def _choose(found: Iterable[Record | Refused], share: int) -> list[str]:
    """Take the records of the smallest hashes among the first ones, up to so many characters."""
    heap: list[tuple[int, str]] = []
    seen = held = 0
    for record in found:
        if isinstance(record, Refused) or not record.text:
            continue
        text = record.text[: max(1, share)]
        heapq.heappush(heap, (-hash64("train-tokenizer", record.id), text))
        held += len(text)
        while held - len(heap[0][1]) >= share:
            held -= len(heapq.heappop(heap)[1])
        seen += len(record.text)
        if seen >= LOOK_CHARS:
            break
    return [text for _, text in sorted(heap, reverse=True)]
