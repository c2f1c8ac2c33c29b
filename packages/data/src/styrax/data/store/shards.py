"""Files fetched in shards into a cache folder, and read there as one array.

A store's cache folder is `remote/CHECKSUM` in the cache, after the checksum of its meta:

docs-00000.npy, ...             files that are fetched whole
tokens-00000.bin.000012         a shard of a file, checked before it got this name; what has no such file is not here
lock.in-use                     held, shared, by every process that has the store open
lock.00 ... lock.31             held while a file is fetched, so that other processes wait for it and not fetch it too

A process may be killed at any moment: a file has its name only once it is complete and checked. What is half written is
removed an hour later. Each shard is a file of its own, and not a stretch of one sparse file, since a memory
map of a file that other machines write (NFS) may show old zeros in pages that were read ahead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.store.files import in_thread

try:
    import fcntl
except ImportError:  # Windows: several processes may fetch the same shard, and no store is dropped
    fcntl = None

if TYPE_CHECKING:
    from jaxtyping import Int64

IN_USE = "lock.in-use"
LOCKS = 32
POLL_SECONDS = 0.02
OLD_SECONDS = 3600.0
#: Shards of 64 MiB fetched at the same time, each held in memory until it is on disk.
AT_ONCE = 4


class CacheFolder:
    """The cache folder of one store, kept from being dropped while this object lives.

    Args:
        root: Folder of all stores' folders.
        key: The store's.
        patience: Seconds to wait for a file that another process is fetching; after that it is fetched here too.

    Attributes:
        path: The folder.

    Raises:
        UserError: It cannot be written.
    """

    def __init__(self, root: Path, key: str, *, patience: float):
        self.path, self._patience = root / key, patience
        with _explained(self.path):
            handle = self._hold()
            self._sweep()
        if handle is not None:
            weakref.finalize(self, os.close, handle)

    def get(self, name: str, content: Callable[[], Iterable[bytes]]) -> Path:
        """Give a file, made of `content()` where it is not here yet.

        Args:
            name: The file's name.
            content: Gives what is in it, already checked.

        Raises:
            UserError: The disk is full, or the place cannot be written.
        """
        file = self.path / name
        if file.exists():
            return file
        with self._turn(name):
            if not file.exists():
                temporary = self.path / f".{name}.{secrets.token_hex(8)}.tmp"
                try:
                    with _explained(self.path), temporary.open("xb") as handle:
                        for chunk in content():
                            handle.write(chunk)
                        handle.flush()
                        os.fsync(handle.fileno())
                    with _explained(self.path):
                        temporary.replace(file)
                finally:
                    temporary.unlink(missing_ok=True)
        return file

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Wait while another thread or process fetches the same file, as far as patience goes."""
        if fcntl is None:
            yield
            return
        with _explained(self.path):
            handle = os.open(self.path / f"lock.{zlib.crc32(name.encode()) % LOCKS:02d}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = time.monotonic() + self._patience
            while time.monotonic() < end:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(POLL_SECONDS)
                except OSError:  # a file system without locks
                    break
                else:
                    break
            yield
        finally:
            os.close(handle)

    def _hold(self) -> int | None:
        """Mark the folder as in use, for as long as this process lives or until the mark is closed."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.path / IN_USE
            with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
                handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
                if fcntl is None:
                    os.close(handle)
                    file.touch()
                    return None
                with contextlib.suppress(OSError):  # a file system without locks: then nothing is dropped either
                    fcntl.flock(handle, fcntl.LOCK_SH)
                try:
                    if os.path.samestat(os.fstat(handle), file.stat()):
                        os.utime(file)
                        return handle
                except FileNotFoundError:
                    pass
                os.close(handle)

    def _sweep(self) -> None:
        for file in self.path.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > OLD_SECONDS:
                    file.unlink()


def make_room(root: Path, keep: str, budget: int) -> None:
    """Drop stores from a cache, those opened longest ago first, until the others fit; none that is open anywhere.

    Args:
        root: Folder of all stores' folders.
        keep: Key of the store that stays, and does not count.
        budget: Bytes that the others may have.
    """
    stores = []
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):  # dropped by another process
            if folder.name != keep and not folder.name.startswith("."):
                opened = (folder / IN_USE).stat().st_mtime
                stores.append((opened, folder, sum(file.stat().st_size for file in folder.iterdir())))
    total = sum(size for *_, size in stores)
    for _, folder, size in sorted(stores):
        if total <= budget:
            break
        if _drop(folder):
            total -= size


def _drop(folder: Path) -> bool:
    """Remove a store's folder, unless it is open."""
    if fcntl is None:
        return False
    try:
        handle = os.open(folder / IN_USE, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.old")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


class ShardArray:
    """An array in a file that comes in shards, each fetched when it is first read.

    Reads like a `numpy.ndarray` of one dimension, by an integer, a slice or an array of integers; a slice within one
    shard is a view of its file, anything else a copy.

    Args:
        fetch: Gives the local file of a shard.
        length: Entries.
        dtype: Their type.
        shard_bytes: How long a shard is, the last apart.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for number in range(3):
        ...     _ = (folder / str(number)).write_bytes(bytes(range(4 * number, min(10, 4 * number + 4))))
        >>> array = ShardArray(lambda number: folder / str(number), 10, np.dtype("u1"), 4)
        >>> array[2:6].tolist(), array[np.array([9, 0])].tolist(), int(array[-1])
        ([2, 3, 4, 5], [9, 0], 9)
    """

    def __init__(self, fetch: Callable[[int], Path], length: int, dtype: np.dtype, shard_bytes: int):
        self.dtype, self.shape, self.ndim, self.size = dtype, (length,), 1, length
        self._fetch, self._per = fetch, shard_bytes // dtype.itemsize
        self._parts: list[np.ndarray | None] = [None] * -(-length // self._per)
        self._here = np.zeros(len(self._parts), bool)

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> Any:
        """Read entries, fetching their shards."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            if step == 1:
                return self._stretch(start, max(start, stop))
            index = np.arange(start, stop, step)
        elif isinstance(index, (int, np.integer)):
            if not -self.size <= index < self.size:
                raise IndexError(f"index {index} of an array of {self.size}")
            number, within = divmod(int(index) % self.size, self._per)
            return self._part(number)[within]
        index = np.asarray(index)
        if index.dtype == bool:
            index = np.flatnonzero(index)
        return self._gather(index.ravel().astype(np.int64, copy=False)).reshape(index.shape)

    def prepare(self, starts: Int64[np.ndarray, " stretches"], stops: Int64[np.ndarray, " stretches"]) -> None:
        """Fetch the shards of stretches `[start, stop)` that are not here yet, a few at once."""
        if self._here.all() or not len(starts):
            return
        count = len(self._parts)
        begin = np.bincount(starts // self._per, minlength=count + 1)
        end = np.bincount((np.maximum(stops, starts + 1) - 1) // self._per + 1, minlength=count + 1)
        missing = np.flatnonzero((np.cumsum(begin - end)[:count] > 0) & ~self._here).tolist()
        for first in range(0, len(missing), AT_ONCE):
            for part in [in_thread(self._part, number) for number in missing[first : first + AT_ONCE]]:
                part.result()

    def groups(self) -> Iterator[tuple[int, int]]:
        """Give the stretches of as many shards as are fetched at once."""
        step = AT_ONCE * self._per
        return ((start, min(start + step, self.size)) for start in range(0, self.size, step))

    def _part(self, number: int) -> np.ndarray:
        part = self._parts[number]
        if part is None:
            part = np.memmap(self._fetch(number), self.dtype, "r").view(np.ndarray)
            self._parts[number] = part
            self._here[number] = True
        return part

    def _stretch(self, start: int, stop: int) -> np.ndarray:
        per = self._per
        if start == stop:
            return np.empty(0, self.dtype)
        first, last = start // per, (stop - 1) // per
        if first == last:
            return self._part(first)[start - first * per : stop - first * per]
        self.prepare(np.array([start]), np.array([stop]))
        parts = [self._part(number) for number in range(first, last + 1)]
        parts[0], parts[-1] = parts[0][start - first * per :], parts[-1][: stop - last * per]
        return np.concatenate(parts)

    def _gather(self, index: Int64[np.ndarray, " n"]) -> np.ndarray:
        if not len(index):
            return np.empty(0, self.dtype)
        low, high = int(index.min()), int(index.max())
        if low < -self.size or high >= self.size:
            raise IndexError(f"index {low if low < -self.size else high} of an array of {self.size}")
        if low < 0:
            index = np.where(index < 0, index + self.size, index)
        number = index // self._per
        cuts = [0, *(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), len(index)]
        if len(cuts) == 2:
            return self._part(int(number[0]))[index - int(number[0]) * self._per]
        first = index[cuts[:-1]]
        self.prepare(first, first + 1)
        out = np.empty(len(index), self.dtype)
        for begin, end in pairwise(cuts):
            which = int(number[begin])
            out[begin:end] = self._part(which)[index[begin:end] - which * self._per]
        return out


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn the disk's refusals into words."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(folder.parent).free / 1e6:.1f} MB free)"
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}{free}; free some space, or choose another folder for "
            "the cache (cache_dir, $STYRAX_CACHE)"
        ) from error
