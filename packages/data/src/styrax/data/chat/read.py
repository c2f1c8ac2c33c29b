"""Records of instruction data from files and iterables, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from styrax.core.errors import UserError
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers import Meter, kind_of
from styrax.data.build.readers.parquet import open_parquet
from styrax.data.build.readers.streams import open_stream
from styrax.data.build.readers.text import decode
from styrax.data.build.records import clean, refuse
from styrax.data.build.sources import Document, find_documents
from styrax.data.chat.records import RecordError

MARK = b"\xef\xbb\xbf"
READ_ROWS = 256


@dataclass(frozen=True)
class Item:
    """A record as it was found.

    Attributes:
        id: What it is called.
        where: Where a person finds it.
        fields: What it holds.
        done: How many bytes have been read with it; 0 where they are not counted.
    """

    id: str
    where: str
    fields: Any
    done: int = 0

    def refuse(self, error: RecordError) -> Refused:
        """Note why it cannot be used."""
        return refuse(self.fields, self.id, self.where, error.reason, str(error))


class Source:
    """What records are read from.

    Args:
        records: Names of `.jsonl` or `.parquet` files (`.jsonl.gz`, `.jsonl.zst`), of folders or globs with such
            files; or an iterable of mappings, such as a Hugging Face `datasets` object.
        id: The field that holds a record's id; by default record 7 of a file is `FILE@7`, of an iterable `records@7`.

    Attributes:
        names: What it is called, in JSON.
        total: Bytes, where they are known.

    Raises:
        UserError: It is neither, or files are missing or are of another kind.
    """

    def __init__(self, records: Any, id: str | None = None):
        self._id = id
        self._items: Iterable[Any] | None = None
        self._files: list[Document] = []
        if isinstance(records, (str, Path)):
            records = [records]
        elif isinstance(records, Mapping) or not isinstance(records, Iterable):
            what = (
                f"a mapping with {', '.join(map(repr, records))}"
                if isinstance(records, Mapping)
                else repr(records)[:60]
            )
            raise UserError(
                f"expected names of files or an iterable of records, got {what}; put one record into a list, and of "
                "several splits choose one"
            )
        listed = list(records) if isinstance(records, (list, tuple)) else []
        names = [entry for entry in listed if isinstance(entry, (str, Path))]
        if not names:
            self._items, self.names, self.total = records, ["records"], None
            return
        if len(names) != len(listed):
            raise UserError("expected names of files or records, got both; build a store of each and mix these")
        self._files = find_documents(names)
        wrong = [str(file.path) for file in self._files if kind_of(file.path).format not in ("jsonl", "parquet")]
        if wrong:
            raise UserError(
                f"instruction data are read from .jsonl (also .gz, .zst) and .parquet files, got {', '.join(wrong[:5])}"
                + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            )
        self.names, self.total = [str(name) for name in names], sum(file.size for file in self._files)

    def __iter__(self) -> Iterator[Item | Refused]:
        """Give the records, and why there is none where a line cannot be read."""
        if self._items is not None:
            for number, fields in enumerate(self._items):
                yield self._named(f"records@{number}", f"records@{number}", fields, 0)
            return
        before = 0
        for file in self._files:
            read = _read_parquet if kind_of(file.path).format == "parquet" else _read_jsonl
            for number, where, fields, done in read(file):
                if isinstance(fields, Refused):
                    yield fields
                else:
                    yield self._named(f"{file.id}@{number}", where, fields, before + done)
            before += file.size

    def _named(self, number_id: str, where: str, fields: Any, done: int) -> Item | Refused:
        if self._id is None or not isinstance(fields, Mapping):
            return Item(number_id, where, fields, done)
        value = fields.get(self._id)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            has = ", ".join(map(str, fields)) or "none"
            detail = f"has no id in {self._id!r}: got {value!r}; its fields: {has}"
            return refuse(fields, number_id, where, "no id", detail)
        return Item(clean(str(value)), where, fields, done)


def _read_jsonl(file: Document) -> Iterator[tuple[int, str, Any, int]]:
    meter = Meter()
    with open_stream(file.path, kind_of(file.path).compression, 0, file.size, meter) as stream:
        for number, line in enumerate(stream):
            if number == 0 and line.startswith(MARK):
                line = line[len(MARK) :]
            if not line.strip():
                continue
            where, name = f"{file.path}, line {number + 1},", f"{file.id}@{number}"
            fields: Any = decode(line, name, where, "raise")
            if not isinstance(fields, Refused):
                try:
                    fields = json.loads(fields)
                except (ValueError, RecursionError) as error:
                    fields = refuse(line, name, where, "not JSON", f"is not JSON: {error}")
            yield number, where, fields, min(file.size, meter.read())


def _read_parquet(file: Document) -> Iterator[tuple[int, str, Any, int]]:
    with open_parquet(file.path) as table:
        rows, number = max(1, table.metadata.num_rows), 0
        for batch in table.iter_batches(READ_ROWS, use_threads=False):
            for fields in batch.to_pylist():
                yield (
                    number,
                    f"{file.path}, record {number} (the first is 0),",
                    fields,
                    file.size * (number + 1) // rows,
                )
                number += 1
