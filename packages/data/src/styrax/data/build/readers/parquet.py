"""Parquet: one record per row, read in batches of some row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from styrax.core.errors import UserError
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers.streams import DamagedError, Meter, reading
from styrax.data.build.readers.table import check_columns
from styrax.data.build.records import ReadSettings, Record, make_record

BATCH_ROWS = 1024


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a file.

    Yields:
        The `pyarrow.parquet.ParquetFile`.

    Raises:
        UserError: pyarrow is missing, or the file cannot be read or is damaged.
    """
    parquet = need_pyarrow()
    import pyarrow

    with reading(path):
        try:
            with parquet.ParquetFile(path) as file:
                yield file
        except pyarrow.ArrowException as error:
            raise DamagedError(error) from error


def need_pyarrow() -> Any:
    """Import `pyarrow.parquet`.

    Raises:
        UserError: It is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError('reading .parquet files needs pyarrow: pip install "styrax-data[parquet]"') from None
    return parquet


def group_sizes(path: Path, settings: ReadSettings) -> list[tuple[int, int]]:
    """Tell bytes and rows of each row group.

    Raises:
        UserError: There is no column of a name that was asked for, or the file cannot be read.
    """
    with open_parquet(path) as file:
        check_columns(file.schema_arrow.names, str(path), settings)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        return [(group.total_byte_size, group.num_rows) for group in groups]


def read_parquet(path: Path, name: str, settings: ReadSettings, groups: range, first: int,
                 size: int, meter: Meter) -> Iterator[Record | Refused]:  # fmt: skip
    """Read the records of some row groups.

    Args:
        path: The file.
        name: Its id; row i makes the record `name@i`, from 0.
        settings: Which columns; the others are read for filters only.
        groups: Which row groups.
        first: How many rows come before them.
        size: The bytes that the meter counts them as.
        meter: Told how far reading has come.

    Yields:
        A record for each row, or why there is none.
    """
    with open_parquet(path) as file:
        rows = sum(file.metadata.row_group(index).num_rows for index in groups)
        columns = None if settings.all_fields else settings.columns
        number = first
        meter.watch(lambda: size * (number - first) // max(1, rows))
        batches = file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns, use_threads=False)
        for batch in batches:
            for fields in batch.to_pylist():
                place = f"{path}, record {number} (the first is 0),"
                yield make_record(fields, f"{name}@{number}", place, settings)
                number += 1
        meter.watch(lambda: 0)
