"""The documents of `.array_record` files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.core.errors import UserError

if TYPE_CHECKING:
    from array_record.python.array_record_module import ArrayRecordReader

# One thread and four megabytes ahead: building a store is parallel over files and ranges already.
OPTIONS = "readahead_buffer_size:4M,max_parallelism:1"


def count(path: str | Path) -> int:
    """Count the records of a file; only its end is read.

    Raises:
        UserError: The file is missing, or is no whole `.array_record` file.
    """
    with _open(Path(path)) as reader:
        return reader.num_records()


def read_array_records(
    path: str | Path, start: int, stop: int, decode: Callable[[bytes], Any] | None = None
) -> Iterator[Any]:
    """Read the records of a range, one after another.

    Args:
        path: The file.
        start: The first record, from 0.
        stop: The record after the last, at most `count(path)`.
        decode: What to make of a record's bytes; `decode_record` by default. An error that it raises ends the
            reading: to go on after a malformed record, pass `bytes` here and decode outside.

    Yields:
        What `decode` gives: by default text, or the mapping of a JSON object.

    Raises:
        UserError: The file is missing or damaged, the range is not in it, or `decode_record` refuses a record; the
            message names the file and the record.
    """
    path = Path(path)
    with _open(path) as reader:
        total = reader.num_records()
        if not 0 <= start <= stop <= total:
            raise UserError(f"{path}: expected a range of records from 0 to {total}, got {start} to {stop}")
        if start:
            reader.seek(start)
        for number in range(start, stop):
            try:
                record = reader.read()
            except (RuntimeError, IndexError) as error:
                raise UserError(
                    f"{path} is damaged at record {number} of {total}: {error}; copy or make the file anew"
                ) from None
            if decode is not None:
                yield decode(record)
                continue
            try:
                yield decode_record(record)
            except UserError as error:
                raise UserError(f"{path}, record {number}: {error}") from None


def decode_record(record: bytes) -> str | dict[str, Any]:
    """Turn a record into a document: a JSON object if it begins with a brace, else text.

    Raises:
        UserError: It is not UTF-8, or begins with a brace and is no JSON.

    Example:
        >>> decode_record(b'{"text": "Hi"}'), decode_record("né".encode())
        ({'text': 'Hi'}, 'né')
    """
    try:
        text = record.decode()
    except UnicodeDecodeError as error:
        begin = record[:8].hex(" ")
        raise UserError(
            f"expected UTF-8 (text, or a JSON object), got bytes that begin with {begin}: {error.reason} at byte "
            f"offset {error.start}; if the records are something else, a tf.train.Example say, pass decode="
        ) from None
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(
            f"begins with a brace, but is not a JSON object: {error}; if it is text, pass decode=bytes.decode"
        ) from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[ArrayRecordReader]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise UserError(
            f"reading {path} needs the package array_record, which has no build for this system or Python: {error}"
        ) from None
    if not path.is_file():
        raise UserError(f"{path}: {'expected a file, got a folder' if path.exists() else 'there is no such file'}")
    reader = ArrayRecordReader(str(path), OPTIONS)
    # The reader says what is wrong only when it is asked for something.
    try:
        if not reader.ok():
            raise UserError(
                f"{path}: expected a whole .array_record file, got {path.stat().st_size} bytes without a valid end; it "
                "is cut short or another kind of file: copy or make it anew"
            )
        yield reader
    finally:
        with contextlib.suppress(RuntimeError):
            reader.close()
