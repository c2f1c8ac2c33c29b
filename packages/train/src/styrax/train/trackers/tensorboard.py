"""Scalars as TensorBoard event files, written here: the format is small, and no package that writes it is."""

from __future__ import annotations

import functools
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """Scalars for TensorBoard, in the run's folder; it is read by ``tensorboard --logdir``, which is installed apart.

    Attributes:
        name: Folder within that of the run.
    """

    name: str = "tensorboard"

    def build(self, directory: str | os.PathLike[str]) -> TensorBoard:
        """Write in ``directory``."""
        return TensorBoard(Path(directory) / self.name)


class TensorBoard:
    """A tracker that writes one event a step, with every metric that is a number.

    A start writes a file of its own, from its first logged step on. :meth:`truncate` takes later steps out of the files
    that are there, so that each step is in them once, and has a TensorBoard that is looking forget them too.

    Source: TensorFlow's ``record_writer.cc`` for the frames, ``event.proto`` and ``summary.proto`` for what is in them.

    Args:
        folder: Made when the first step is logged.

    >>> import tempfile
    >>> with TensorBoard(tempfile.mkdtemp()) as board:
    ...     board.log(1, {"loss": 2.5})
    ...     board.log(2, {"loss": 2.25, "note": "no number"})
    >>> [(step, values) for step, values in read(board.folder)]
    [(1, {'loss': 2.5}), (2, {'loss': 2.25})]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._file: BinaryIO | None = None
        self._forget: int | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write an event."""
        values = b"".join(_value(name, value) for name, value in metrics.items() if _is_number(value))
        self._write(_event(step) + _bytes(5, values))

    def flush(self) -> None:
        """Return when every event is on the disk itself."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate(self, step: int) -> None:
        """Take out every event of a later step than ``step``."""
        self.close()
        for path in sorted(self.folder.glob("events.out.tfevents.*")) if self.folder.is_dir() else ():
            content = path.read_bytes()
            kept = b"".join(_frame(event) for event in _frames(content) if _step(event) <= step)
            if kept != content:
                partial = path.with_name(f".{path.name}.partial")
                partial.write_bytes(kept)
                partial.replace(path)
                self._forget = step + 1

    def close(self) -> None:
        """Flush and close; a later event opens another file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, event: bytes) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names.
            name = f"events.out.tfevents.{time.time_ns() // 1_000_000:013d}.{socket.gethostname()}.{os.getpid()}"
            self._file = (self.folder / name).open("xb")
            self._file.write(_frame(_event(0) + _bytes(3, b"brain.Event:2")))
            if self._forget is not None:
                # A session log that says START has readers drop what they hold of this step and later ones.
                self._file.write(_frame(_event(self._forget) + _bytes(7, _key(1, 0) + _varint(1))))
                self._forget = None
        self._file.write(_frame(event))


def read(folder: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Read the steps that :class:`TensorBoard` wrote, in the order of the files.

    Args:
        folder: Of the event files.

    Yields:
        Step and metrics.
    """
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        for event in _frames(path.read_bytes()):
            values = {}
            for field, value in _fields(event):
                if field == 5:
                    parts = [dict(_fields(one)) for _, one in _fields(value)]
                    values |= {part[1].decode(): struct.unpack("<f", part[2])[0] for part in parts}
            if values:
                yield _step(event), values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (getattr(value, "shape", None) == () and not hasattr(value, "decode"))


def _event(step: int) -> bytes:
    return _key(1, 1) + struct.pack("<d", time.time()) + _key(2, 0) + _varint(step)


def _value(tag: str, value: Any) -> bytes:
    number = float(value)
    if math.isfinite(number) and abs(number) > 3.4028234e38:  # what a float32 does not hold
        number = math.copysign(math.inf, number)
    return _bytes(1, _bytes(1, tag.encode()) + _key(2, 5) + struct.pack("<f", number))


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: numbers of varints, and bytes of all else."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        if key & 7 == 0:
            value, at = _read_varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, at = _read_varint(message, at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (message[at] & 127) << shift
        if message[at] < 128:
            return value, at + 1
        at, shift = at + 1, shift + 7


def _step(event: bytes) -> int:
    return dict(_fields(event)).get(2, 0)


def _frame(content: bytes) -> bytes:
    size = struct.pack("<Q", len(content))
    return size + struct.pack("<I", _masked(size)) + content + struct.pack("<I", _masked(content))


def _frames(content: bytes) -> Iterator[bytes]:
    """The whole frames of a file; what a crash left of the last one is left out."""
    at = 0
    while at + 12 <= len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        body = content[at + 12 : at + 12 + size]
        if len(content) < at + 16 + size or struct.unpack_from("<I", content, at + 12 + size)[0] != _masked(body):
            return
        yield body
        at += 16 + size


def _masked(content: bytes) -> int:
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(content: bytes) -> int:
    """The Castagnoli checksum of RFC 3720, appendix B.4.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc, table = 0xFFFFFFFF, _table()
    for byte in content:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)
