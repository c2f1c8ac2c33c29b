"""Which files hold what: told from the end of the name, so that it is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from styrax.data.build.readers.streams import Compression

Format = Literal["text", "jsonl", "csv", "parquet", "array_record"]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True)
class Kind:
    """How a file is read.

    Attributes:
        format: What it holds; `text` for every name that says nothing else.
        compression: How it is compressed.
        delimiter: What stands between the columns of a `csv` file.
    """

    format: Format
    compression: Compression | None
    delimiter: str = ","


def kind_of(path: PurePath) -> Kind:
    """Tell what a file holds.

    Example:
        >>> kind_of(PurePath("a/b.jsonl.gz"))
        Kind(format='jsonl', compression='gz', delimiter=',')
        >>> kind_of(PurePath("notes.v2.txt")).format
        'text'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression is not None:
        suffixes.pop()
    ending = suffixes[-1] if suffixes else ""
    return Kind(FORMATS.get(ending, "text"), compression, "\t" if ending == ".tsv" else ",")
