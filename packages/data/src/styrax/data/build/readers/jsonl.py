"""JSON lines: one record per line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

from styrax.data.build.quarantine import Refused
from styrax.data.build.readers.text import decode
from styrax.data.build.records import ReadSettings, Record, make_record, refuse

MARK = b"\xef\xbb\xbf"


def read_jsonl(
    stream: io.BufferedReader, name: str, where: str, settings: ReadSettings, first: int
) -> Iterator[Record | Refused]:
    """Read the records of a file, or of a stretch of whole lines.

    Args:
        stream: Its bytes.
        name: The file's id; line i makes the record `name@i`, the first line being 0.
        where: Where a person finds the file.
        settings: Which fields.
        first: How many lines come before the stretch.

    Yields:
        A record for each line that is not blank, or why there is none.
    """
    for number, line in enumerate(stream, first):
        if number == 0 and line.startswith(MARK):
            line = line[len(MARK) :]
        if not line.strip():
            continue
        number_id, place = f"{name}@{number}", f"{where}, line {number + 1},"
        text = decode(line, number_id, place, settings.errors)
        if isinstance(text, Refused):
            yield text
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield refuse(line, number_id, place, "not JSON", f"is not JSON: {error}")
            continue
        yield make_record(fields, number_id, place, settings, line)
