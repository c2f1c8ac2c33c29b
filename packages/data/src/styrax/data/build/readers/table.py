"""CSV and TSV: a line of column names, then one record per row."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from styrax.core.errors import UserError, nearest
from styrax.data.build.quarantine import Refused
from styrax.data.build.records import ReadSettings, Record, make_record, refuse

LARGEST_FIELD = (1 << 31) - 1


def read_csv(stream: io.BufferedReader, header: list[str] | None, name: str, where: str, settings: ReadSettings,
             delimiter: str, first: int) -> Iterator[Record | Refused]:  # fmt: skip
    """Read the records of a file, or of a stretch of whole rows.

    Args:
        stream: Its bytes.
        header: The column names; `None` where the stream begins with them.
        name: The file's id; row i makes the record `name@i`, the row after the column names being 0.
        where: Where a person finds the file.
        settings: Which columns.
        delimiter: What stands between columns.
        first: How many rows come before the stretch.

    Yields:
        A record for each row that is not blank, or why there is none.

    Raises:
        UserError: There is no column of a name that was asked for.
    """
    number = first
    with wide_fields():
        rows = csv.reader(as_lines(stream, begins=header is None), delimiter=delimiter, strict=True)
        header = header_of(rows, where, settings) if header is None else header
        while True:
            number_id, place = f"{name}@{number}", f"{where}, record {number} (the first is 0),"
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield refuse("", number_id, place, "not CSV", f"is not CSV: {error}")
                number += 1
                continue
            if row:
                yield _record(row, header, number_id, place, settings)
                number += 1


def read_header(path: Path, delimiter: str, settings: ReadSettings) -> list[str]:
    """Read the column names of a plain file.

    Raises:
        UserError: There is no column of a name that was asked for.
    """
    with path.open("rb") as handle, wide_fields():
        return header_of(
            csv.reader(as_lines(handle, begins=True), delimiter=delimiter, strict=True), str(path), settings
        )


def header_of(rows: Iterator[list[str]], where: str, settings: ReadSettings) -> list[str]:
    """Take the column names off the rows.

    Raises:
        UserError: There is no column of a name that was asked for.
    """
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise UserError(f"{where} does not begin with column names: {error}; nothing was built") from error
    check_columns(header, where, settings)
    return header


def check_columns(columns: list[str], where: str, settings: ReadSettings) -> None:
    """Refuse a table that has no column of a name that was asked for.

    Raises:
        UserError: Names them, with the nearest ones that there are.
    """
    missing = [f"{name!r}{nearest(name, columns)}" for name in settings.columns if name not in columns]
    if missing:
        raise UserError(
            f"{where} has no column {' and no column '.join(missing)}; its columns: {', '.join(columns) or 'none'}; "
            "name the right one (text=, id=, --text, --id), or leave the file out with a glob"
        )


@contextmanager
def wide_fields() -> Iterator[None]:
    """Let columns hold whole documents; the module refuses more than 128 KiB, for the whole process."""
    before = csv.field_size_limit(LARGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def as_lines(stream: io.BufferedReader, *, begins: bool) -> io.TextIOWrapper:
    """Decode lines as the `csv` module wants them; bytes that are not UTF-8 are kept for later.

    Args:
        stream: The bytes.
        begins: Whether they begin the file: then a byte order mark is left out.
    """
    return io.TextIOWrapper(stream, "utf-8-sig" if begins else "utf-8", errors="surrogateescape", newline="")


def line_bytes(line: str) -> int:
    """Tell how many bytes of the file a line was."""
    return len(line) if line.isascii() else len(line.encode(errors="surrogateescape"))


def _record(row: list[str], header: list[str], number_id: str, place: str, settings: ReadSettings) -> Record | Refused:
    content = ",".join(row)
    if len(row) != len(header):
        detail = f"has {len(row)} columns, expected {len(header)}"
        return refuse(content, number_id, place, "wrong number of columns", detail)
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError:
            if settings.errors != "replace":
                quiet = settings.errors == "skip"
                return refuse(content, number_id, place, "not UTF-8", "is not UTF-8", quiet=quiet)
            row = [value.encode(errors="surrogateescape").decode(errors="replace") for value in row]
    return make_record(dict(zip(header, row, strict=True)), number_id, place, settings, content)
