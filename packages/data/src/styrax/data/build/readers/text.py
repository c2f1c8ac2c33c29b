"""Text files: one document each, or one for every piece between separators."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

from styrax.data.build.quarantine import Refused
from styrax.data.build.records import Errors, ReadSettings, Record, refuse

CHUNK_BYTES = 1 << 20


def read_text(stream: io.BufferedReader, name: str, where: str, settings: ReadSettings, start: int,
              first: int) -> Iterator[Record | Refused]:  # fmt: skip
    """Read the documents of a text file, or of a stretch of one.

    Args:
        stream: Its bytes.
        name: The file's id.
        where: Where a person finds it.
        settings: `split_on` and `errors`; `skip` leaves out the whole file.
        start: Where the stretch begins in the file.
        first: How many pieces come before it.

    Yields:
        The documents that are not empty, or why there is none.
    """
    separator, errors = settings.split_on, settings.errors
    if separator is None or errors == "skip":
        content = stream.read()
        text = decode(content, name, where, errors)
        if isinstance(text, Refused):
            yield text
        elif separator is None:
            yield Record(name, text)
        else:
            for number, (_, piece) in enumerate(split_text(io.BytesIO(content), separator)):
                yield Record(f"{name}#{number}", piece.decode())
        return
    for number, (offset, piece) in enumerate(split_text(stream, separator), first):
        text = decode(piece, f"{name}#{number}", where, errors, start + offset)
        yield text if isinstance(text, Refused) else Record(f"{name}#{number}", text)


def decode(content: bytes, name: str, where: str, errors: Errors, start: int = 0) -> str | Refused:
    """Decode UTF-8, keeping line ends and byte order marks as they are.

    Args:
        content: What is decoded.
        name: The document's id.
        where: Where a person finds it.
        errors: `raise`, `replace` (by U+FFFD) or `skip` when it is not UTF-8.
        start: Where the content begins in its file.

    Returns:
        The text, or why there is none.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if errors == "replace":
            return content.decode(errors="replace")
        got = content[error.start : error.start + 4].hex(" ")
        detail = f"is not UTF-8 at byte offset {start + error.start}: expected text, got {got} ({error.reason})"
        return refuse(content, name, where, "not UTF-8", detail, quiet=errors == "skip")


def split_text(stream: BinaryIO, separator: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Cut text after each separator; the pieces joined are the text.

    Args:
        stream: Bytes of UTF-8, in which a separator stands where it does in the text.
        separator: Where to cut.
        chunk_bytes: How much is read at a time.

    Yields:
        Where each piece begins, and the piece, which is not empty.

    Example:
        >>> list(split_text(io.BytesIO(b"x--y"), "--"))
        [(0, b'x--'), (3, b'y')]
    """
    cut, rest, start = separator.encode(), b"", 0
    while chunk := stream.read(chunk_bytes):
        *pieces, rest = (rest + chunk).split(cut)
        for piece in pieces:
            yield start, piece + cut
            start += len(piece) + len(cut)
    if rest:
        yield start, rest
