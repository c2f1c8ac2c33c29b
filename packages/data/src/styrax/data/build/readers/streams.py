"""Bytes of a file or of a stretch of one, decompressed; and what is said when they cannot be had."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from styrax.core.errors import UserError

Compression = Literal["gz", "zst"]

CHUNK_BYTES = 1 << 16
LARGEST_WINDOW = 31


class Meter:
    """How far reading has come in a file, in bytes of the file, compressed as it may be."""

    def __init__(self):
        self._tell: Callable[[], int] = lambda: 0

    def watch(self, tell: Callable[[], int]) -> None:
        """Ask `tell` from now on."""
        self._tell = tell

    def read(self) -> int:
        """Give the position; 0 when nothing is open."""
        return self._tell()


@contextmanager
def open_stream(
    path: Path, compression: Compression | None, start: int, stop: int, meter: Meter
) -> Iterator[io.BufferedReader]:
    """Open a stretch of a plain file, or all of a compressed one.

    Args:
        path: The file.
        compression: How it is compressed.
        start: First byte of the stretch.
        stop: The byte after it.
        meter: Told how far reading has come.

    Yields:
        The stream.

    Raises:
        UserError: The file cannot be read, is damaged or cut short, or a package is missing.
    """
    with reading(path), path.open("rb") as handle:
        handle.seek(start)
        meter.watch(lambda: handle.tell() - start)
        try:
            if compression == "gz":
                yield io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=handle)), 1 << 17)
            elif compression == "zst":
                yield io.BufferedReader(_Zstd(handle), 1 << 20)
            else:
                yield io.BufferedReader(_Stretch(handle, stop - start), 1 << 20)
        finally:
            meter.watch(lambda: 0)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into words.

    Raises:
        UserError: The file cannot be read, is damaged or cut short.
    """
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedError) as error:
        raise UserError(
            f"{path} is damaged or cut short: {error}; fetch it again or leave it out with a glob; nothing was built"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; nothing was built") from error


def need_zstd() -> Any:
    """Import what reads Zstandard: the standard library's module from Python 3.14 on, else `zstandard`.

    Raises:
        UserError: It is not installed.
    """
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd

            return zstd
        import zstandard
    except ImportError:
        raise UserError('reading .zst files needs zstandard: pip install "styrax-data[zstd]"') from None
    return zstandard


class DamagedError(Exception):
    """Compressed bytes that are not what they should be."""


class _Stretch(io.RawIOBase):
    """So many bytes of a file from where it stands."""

    def __init__(self, handle: BinaryIO, size: int):
        self._handle, self._left = handle, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._left]
        got = cast("io.BufferedReader", self._handle).readinto(view) if len(view) else 0
        self._left -= got
        return got


class _Zstd(io.RawIOBase):
    """Decompressed bytes, frame after frame; a frame that is cut short is an error, not an end."""

    def __init__(self, handle: BinaryIO):
        self._handle, self._module = handle, need_zstd()
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._handle.read(CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a Zstandard frame")
                return 0
            self._ready = memoryview(self._decompress(chunk))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self, chunk: bytes) -> bytes:
        pieces = []
        while chunk:
            if self._frame is None:
                self._frame = self._new_frame()
            try:
                pieces.append(self._frame.decompress(chunk))
            except self._module.ZstdError as error:
                raise DamagedError(error) from error
            chunk = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(pieces)

    def _new_frame(self) -> Any:
        if sys.version_info >= (3, 14):
            options = {self._module.DecompressionParameter.window_log_max: LARGEST_WINDOW}
            return self._module.ZstdDecompressor(options=options)
        # Large corpora are often compressed with --long=31, which is refused by default.
        return self._module.ZstdDecompressor(max_window_size=1 << LARGEST_WINDOW).decompressobj()
