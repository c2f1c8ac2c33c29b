"""Files cut into pieces that can be read apart, in a way that depends on the file alone."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from styrax.core.errors import UserError
from styrax.data.build.array_records import count as count_records
from styrax.data.build.array_records import decode_record, read_array_records
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers.jsonl import MARK, read_jsonl
from styrax.data.build.readers.kinds import Kind, kind_of
from styrax.data.build.readers.parquet import group_sizes, need_pyarrow, read_parquet
from styrax.data.build.readers.streams import Meter, need_zstd, open_stream, reading
from styrax.data.build.readers.table import as_lines, line_bytes, read_csv, read_header, wide_fields
from styrax.data.build.readers.text import read_text
from styrax.data.build.records import ReadSettings, Record, item_record, refuse
from styrax.data.build.sources import Document


@dataclass(frozen=True)
class Piece:
    """A file, or a stretch of one.

    Attributes:
        document: The file.
        start: First byte; of a Parquet file its first row group, of an array_record file its first record.
        stop: The byte, row group or record after it.
        first: How many records of the file come before it.
        size: How many bytes of the file it makes up, about.
    """

    document: Document
    start: int
    stop: int
    first: int
    size: int

    @property
    def kind(self) -> Kind:
        """How it is read."""
        return kind_of(self.document.path)

    @property
    def whole(self) -> bool:
        """Whether it is all of a file that is one text."""
        return self.kind.format == "text" and self.start == 0 and self.stop == self.document.size

    @property
    def identity(self) -> list[Any]:
        """What tells it from every other piece, and from itself after its file has changed."""
        file = self.document
        path = str(file.path.absolute())
        return [file.id, path, file.size, file.mtime_ns, file.errors, self.start, self.stop, self.first]

    def __str__(self) -> str:
        return str(self.document.path) + (f" from {self.start} to {self.stop}" if self.first or self.start else "")


def cut_file(document: Document, settings: ReadSettings, size: int) -> Iterator[Piece]:
    """Cut a file into pieces of about `size` bytes, between records.

    Text that is not split, and compressed files, are one piece. Others are read through once to find where
    records end, which takes a hundredth of the time that tokenizing takes.

    Args:
        document: The file.
        settings: How it will be read.
        size: Bytes per piece.

    Yields:
        The pieces, in order.

    Raises:
        UserError: The file cannot be read, a table lacks a column, or a package is missing.
    """
    kind = kind_of(document.path)
    if kind.compression == "zst":
        need_zstd()
    if kind.format in ("parquet", "array_record"):
        if kind.compression:
            raise UserError(f"{document.path}: {kind.format} brings its own compression; unpack the file and name that")
        if kind.format == "parquet":
            need_pyarrow()
        yield from (_cut_groups if kind.format == "parquet" else _cut_records)(document, settings, size)
        return
    if kind.compression is None and kind.format == "csv":
        with reading(document.path):
            read_header(document.path, kind.delimiter, settings)
    skips = (document.errors or settings.errors) == "skip"
    fixed = kind.format == "text" and (settings.split_on is None or skips)
    if document.size <= size or kind.compression is not None or fixed:
        yield Piece(document, 0, document.size, 0, document.size)
        return
    cut = {"text": _cut_text, "jsonl": _cut_lines, "csv": _cut_rows}[kind.format]
    start = first = 0
    with reading(document.path):
        for stop, count in cut(document.path, settings, size):
            yield Piece(document, start, stop, first, stop - start)
            start, first = stop, first + count


def read_piece(piece: Piece, settings: ReadSettings, meter: Meter) -> Iterator[Record | Refused]:
    """Read the records of a piece.

    Args:
        piece: Which.
        settings: How.
        meter: Told how far reading has come.

    Yields:
        The records, or why there is none.

    Raises:
        UserError: The file cannot be read, changed since it was found, or a package is missing.
    """
    file, kind = piece.document, piece.kind
    settings = replace(settings, errors=file.errors or settings.errors)
    where = str(file.path)
    if kind.format == "parquet":
        groups = range(piece.start, piece.stop)
        yield from read_parquet(file.path, file.id, settings, groups, piece.first, piece.size, meter)
        check_unchanged(file)
        return
    if kind.format == "array_record":
        yield from _read_records(piece, settings, meter)
        check_unchanged(file)
        return
    with open_stream(file.path, kind.compression, piece.start, piece.stop, meter) as stream:
        if kind.format == "text":
            yield from read_text(stream, file.id, where, settings, piece.start, piece.first)
        elif kind.format == "jsonl":
            yield from read_jsonl(stream, file.id, where, settings, piece.first)
        else:
            header = read_header(file.path, kind.delimiter, settings) if piece.start else None
            yield from read_csv(stream, header, file.id, where, settings, kind.delimiter, piece.first)
    check_unchanged(file)


def check_unchanged(file: Document) -> None:
    """Refuse a file that is no longer what was found.

    Raises:
        UserError: Its size or its time of change differ.
    """
    with reading(file.path):
        about = file.path.stat()
    if (about.st_size, about.st_mtime_ns) != (file.size, file.mtime_ns):
        raise UserError(f"{file.path} changed while the store was being built; run the command again")


def _cut_lines(path: Path, settings: ReadSettings, size: int) -> Iterator[tuple[int, int]]:
    with path.open("rb") as handle:
        while chunk := handle.read(size):
            lines = chunk.count(b"\n") + handle.readline().count(b"\n")
            yield handle.tell(), lines


def _cut_text(path: Path, settings: ReadSettings, size: int) -> Iterator[tuple[int, int]]:
    separator = (settings.split_on or "").encode()
    rest, stop = b"", 0
    with path.open("rb") as handle:
        while chunk := handle.read(size):
            *pieces, rest = (rest + chunk).split(separator)
            stop += sum(map(len, pieces)) + len(separator) * len(pieces)
            if pieces:
                yield stop, len(pieces)
        if rest:
            yield stop + len(rest), 1


def _cut_rows(path: Path, settings: ReadSettings, size: int) -> Iterator[tuple[int, int]]:
    position = start = count = 0

    def lines(handle: io.BufferedReader) -> Iterator[str]:
        nonlocal position
        position = len(MARK) if handle.peek(len(MARK)).startswith(MARK) else 0
        for line in as_lines(handle, begins=True):
            position += line_bytes(line)
            yield line

    with path.open("rb") as handle, wide_fields():
        rows = csv.reader(lines(handle), delimiter=kind_of(path).delimiter, strict=True)
        next(rows)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                break
            except csv.Error:
                row = ["not CSV"]
            count += bool(row)
            if position - start >= size:
                yield position, count
                start, count = position, 0
        if position > start:
            yield position, count


def _cut_groups(document: Document, settings: ReadSettings, size: int) -> Iterator[Piece]:
    groups = group_sizes(document.path, settings)
    total = max(1, sum(held for held, _ in groups))
    start = first = held = rows = 0
    for index, (more, count) in enumerate(groups):
        held, rows = held + more, rows + count
        if held >= size or index == len(groups) - 1:
            share = document.size * held // total
            yield Piece(document, start, index + 1, first, share)
            start, first, held, rows = index + 1, first + rows, 0, 0


def _cut_records(document: Document, settings: ReadSettings, size: int) -> Iterator[Piece]:
    total = count_records(document.path)
    pieces = max(1, min(total, -(-document.size // size)))
    edges = [total * index // pieces for index in range(pieces + 1)]
    for start, stop in itertools.pairwise(edges):
        yield Piece(document, start, stop, start, document.size * (stop - start) // max(1, total))


def _read_records(piece: Piece, settings: ReadSettings, meter: Meter) -> Iterator[Record | Refused]:
    path, name = piece.document.path, piece.document.id
    done = 0
    meter.watch(lambda: piece.size * done // max(1, piece.stop - piece.start))
    for done, content in enumerate(read_array_records(path, piece.start, piece.stop, decode=bytes), 1):
        number = piece.start + done - 1
        number_id, place = f"{name}@{number}", f"{path}, record {number} (the first is 0),"
        try:
            item = decode_record(content)
        except UserError as error:
            yield refuse(content, number_id, place, "not text or JSON", str(error))
        else:
            yield item_record(item, number_id, place, settings)
    meter.watch(lambda: 0)
