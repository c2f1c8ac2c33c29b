"""A progress bar with throughput and the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from styrax.data import build


@contextmanager
def bars() -> Iterator[build.Progress]:
    """Show one bar per label, with bytes done, bytes per second and the time left, on the error stream.

    Yields:
        The callback `progress(label, done, total)`.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as shown:

        def progress(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = shown.add_task(label, total=total)
            shown.update(tasks[label], completed=done, total=total)

        yield progress
