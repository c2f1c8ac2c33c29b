"""The units of work of a build: what one process turns into one part, whatever the number of processes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from styrax.core.errors import UserError
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers import Meter, Piece, cut_file, read_piece
from styrax.data.build.records import ReadSettings, Record, item_record
from styrax.data.build.sources import Document
from styrax.data.hashing import fingerprint

GROUP_BYTES = 8_000_000
PIECE_BYTES = 64 << 20
SHOWN = 20


@dataclass(frozen=True)
class Unit:
    """Some pieces of files, or some records of an iterable.

    Attributes:
        pieces: The pieces.
        name: What the iterable's records are called.
        first: How many of its records come before these.
        payload: Those records, pickled.
        size: Bytes to read, about.
    """

    pieces: tuple[Piece, ...] = ()
    name: str = ""
    first: int = 0
    payload: bytes = field(default=b"", repr=False)
    size: int = 0

    def key(self, settings: Mapping[str, Any]) -> str:
        """Name the part that it makes under some settings: another name for all that could differ."""
        payload = hashlib.blake2b(self.payload, digest_size=16).hexdigest()
        identity = [[piece.identity for piece in self.pieces], self.name, self.first, payload]
        return fingerprint({"settings": dict(settings), "unit": identity})

    def records(self, settings: ReadSettings, meter: Meter) -> Iterator[Record | Refused]:
        """Read its records."""
        if not self.pieces:
            for number, item in enumerate(pickle.loads(self.payload), self.first):
                name = f"{self.name}@{number}"
                yield item_record(item, name, name, settings)
            return
        done = 0
        for piece in self.pieces:
            inner = Meter()
            meter.watch(lambda before=done, inner=inner: before + inner.read())
            yield from read_piece(piece, settings, inner)
            done += piece.size
        meter.watch(lambda: done)

    def __str__(self) -> str:
        if not self.pieces:
            return f"records of {self.name} from number {self.first}"
        first, last = self.pieces[0], self.pieces[-1]
        return str(first) if first is last else f"{len(self.pieces)} files from {first} to {last}"


def file_units(documents: Sequence[Document], settings: ReadSettings) -> list[Unit]:
    """Divide files into units: small ones together, large ones in pieces.

    Raises:
        UserError: Files that cannot be read, all in one message.
    """
    problems: dict[str, None] = {}
    units: list[Unit] = []
    group: list[Piece] = []
    held = 0
    for document in documents:
        try:
            pieces = list(cut_file(document, settings, PIECE_BYTES))
        except UserError as error:
            problems[str(error)] = None
            continue
        for piece in pieces:
            if group and held + piece.size > GROUP_BYTES:
                units.append(Unit(tuple(group), size=held))
                group, held = [], 0
            group.append(piece)
            held += piece.size
    if group:
        units.append(Unit(tuple(group), size=held))
    if problems:
        shown = [f"  - {problem}" for problem in list(problems)[:SHOWN]]
        more = [f"  and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise UserError("some sources cannot be read:\n" + "\n".join([*shown, *more]))
    return units


@dataclass(frozen=True, eq=False)
class Records:
    """A Python iterable as a source of a build.

    Args:
        items: Texts, pairs `(id, text)`, or mappings with a field for the text; or a Hugging Face `datasets`
            object.
        name: Record i is called `name@i` where nothing else gives it an id.

    Raises:
        UserError: `items` is something else.

    Example:
        >>> records = Records(["a text", ("an id", "another")], name="mine")
        >>> [unit.first for unit in record_units(records, ReadSettings())]
        [0]
    """

    items: Any
    name: str = "records"

    def __post_init__(self) -> None:
        items, name = self.items, type(self.items).__name__
        if isinstance(items, Mapping) and any(_is_dataset(value) for value in items.values()):
            raise UserError(f"{name} holds several splits; expected one, such as data[{next(iter(items))!r}]")
        if isinstance(items, (str, bytes)) or not (_is_dataset(items) or isinstance(items, Iterable)):
            raise UserError(f"Records({name}): expected an iterable of texts, pairs (id, text) or mappings")
        if hasattr(items, "columns"):
            raise UserError(
                f"Records({name}): a table is iterated by column; give its rows, such as df.to_dict('records') of "
                "pandas, df.iter_rows(named=True) of polars or table.to_pylist() of pyarrow"
            )

    def read(self, settings: ReadSettings) -> Iterator[Any]:
        """Give the items, with the fields that are needed."""
        if _is_dataset(self.items):
            yield from _dataset_rows(self.items, settings)
        elif isinstance(self.items, Mapping):
            yield from self.items.items()
        else:
            yield from self.items

    @property
    def once(self) -> bool:
        """Whether they can be read but once."""
        return isinstance(self.items, Iterator)


def as_source(source: Any) -> Records | None:
    """Take a `datasets` object, or `Records`, for a source of records; anything else for a name."""
    if isinstance(source, Records):
        return source
    return Records(source, name="dataset") if _is_dataset(source) else None


def record_units(records: Records, settings: ReadSettings) -> Iterator[Unit]:
    """Divide an iterable into units, reading on only as they are asked for."""
    first = held = 0
    batch: list[Any] = []
    for item in records.read(settings):
        if isinstance(item, Mapping):
            needed = not settings.all_fields and all(name in item for name in settings.columns)
            item = {name: item[name] for name in settings.columns} if needed else dict(item)
        batch.append(item)
        held += _size(item)
        if held >= GROUP_BYTES:
            yield Unit((), records.name, first, pickle.dumps(batch, protocol=5), held)
            first, batch, held = first + len(batch), [], 0
    if batch:
        yield Unit((), records.name, first, pickle.dumps(batch, protocol=5), held)


def _size(item: Any) -> int:
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, tuple) else (item,)
    return 8 + sum(len(value) for value in values if isinstance(value, str))


def _is_dataset(source: Any) -> bool:
    """Tell a Hugging Face `Dataset` or `IterableDataset` by its methods, without importing anything."""
    return hasattr(source, "column_names") and hasattr(source, "select_columns") and callable(
        getattr(source, "iter", None)
    )  # fmt: skip


def _dataset_rows(dataset: Any, settings: ReadSettings) -> Iterator[dict[str, Any]]:
    from styrax.data.build.readers.table import check_columns

    names = dataset.column_names
    if names is not None:
        check_columns(list(names), "the dataset", settings)
        if not settings.all_fields:
            dataset = dataset.select_columns(settings.columns)
    for batch in dataset.iter(batch_size=1000):
        columns = list(batch)
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*batch.values(), strict=True))
