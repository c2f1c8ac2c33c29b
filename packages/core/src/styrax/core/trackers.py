"""Metrics of a run as JSON lines."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from styrax.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class JsonlConfig:
    """Metrics as JSON lines in the run's folder.

    Attributes:
        name: File name.
    """

    name: str = "metrics.jsonl"

    def build(self, directory: str | os.PathLike[str]) -> "Jsonl":
        """Open the file in `directory`."""
        return Jsonl(Path(directory) / self.name)


class Jsonl:
    """A tracker that appends one JSON object a line, `step` first, then the metrics in the order given.

    Equal metrics give equal bytes: floats are written by `repr` (a float32 by its exact value), and those
    that JSON cannot hold as the strings `"nan"`, `"inf"` and `"-inf"`, which `read` turns back. Every line
    reaches the operating system at once, `flush` makes them survive a power cut. A last line that a crash
    cut short is removed when the file is opened.

    Args:
        path: The file; it and its folder are made if missing, and lines are appended to what is there.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> with Jsonl(path) as tracker:
        ...     tracker.log(1, {"loss": 2.5, "note": "ok"})
        ...     tracker.log(2, {"loss": float("nan")})
        >>> print(path.read_text(), end="")
        {"step": 1, "loss": 2.5, "note": "ok"}
        {"step": 2, "loss": "nan"}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line.

        Args:
            step: The step that the metrics belong to.
            metrics: Name -> number, string, boolean, `None`, or an array, which becomes a (nested) list.

        Raises:
            ValueError: A metric is named `step`, a value cannot be written, or the tracker is closed.
        """
        if "step" in metrics:
            raise ValueError("a metric cannot be named 'step': the line's step has that key")
        record = {"step": int(step), **{name: _plain(name, value) for name, value in metrics.items()}}
        self._file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")

    def flush(self) -> None:
        """Return when every line is on the disk itself."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def truncate(self, step: int) -> None:
        """Drop every line of a later step than `step`, and every line that is not a whole record.

        For resuming: lines written after the checkpoint that a run goes on from are not true any more. A
        crash at any moment leaves either the old file or the new one.

        Args:
            step: The last step to keep.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (record := _record(line)) is not None and record["step"] <= step]
        if len(kept) == len(lines):
            return
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        partial.replace(self.path)
        _sync_folder(self.path.parent)
        self._open()

    def close(self) -> None:
        """Flush and close; closing twice is allowed."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> "Jsonl":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        drop_torn_end(self.path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8", newline="\n")


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a metrics file, a line that was cut short left out.

    Args:
        path: A file that `Jsonl` wrote.

    Returns:
        One dict a line; `"nan"`, `"inf"` and `"-inf"` are floats again.

    Raises:
        UserError: There is no such file.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise UserError(f"no metrics file at {path}") from None
    return [_floats(record) for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"metric {name!r}: expected a number, string or array, got {type(value).__name__}")


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def drop_torn_end(path: Path) -> None:
    """Cut off what stands after the last line break of a file: a line that a crash cut short.

    Args:
        path: The file; none is no error.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        end = position = file.seek(0, os.SEEK_END)
        # A torn line can be long: look back in steps for the last line break.
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            position = start + found + 1
            if found >= 0 or start == 0:
                break
        if position < end:
            file.truncate(position)


def _sync_folder(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
