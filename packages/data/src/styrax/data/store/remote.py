"""A token store at a URL, of which only what is read is fetched, into a cache on this machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from styrax.core.errors import UserError
from styrax.data.store.files import TIMEOUT, RemoteFiles, is_url
from styrax.data.store.format import DOCS, IDS, MASK, META, NEEDED, TOKENIZER, TOKENS, complain, shard_size
from styrax.data.store.shards import CacheFolder, ShardArray, make_room
from styrax.data.store.tokens import TokenStore

if TYPE_CHECKING:
    from jaxtyping import Int64

    from styrax.data.build import Progress

#: Files that are read entry by entry, so that shards are enough.
SHARDED = (TOKENS, MASK)


def open_store(
    place: str | os.PathLike[str],
    *,
    cache_dir: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    max_bytes: int | None = None,
) -> TokenStore | RemoteStore:
    """Open a token store in a folder or at a URL.

    Args:
        place: A folder, or a URL: `s3://`, `gs://`, `http://`, `file://`, and any other that fsspec knows.
        cache_dir: Where a remote store is kept; see `RemoteStore`, as for what follows.
        storage_options: Keys, endpoint, ... of the file system.
        timeout: Seconds for a read.
        max_bytes: Size of the cache.

    Returns:
        A `RemoteStore` for a URL, else a `TokenStore`.

    Raises:
        UserError: There is no store, it is damaged, it cannot be read, or a package is missing.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> folder = tempfile.mkdtemp()
        >>> store = write_store(f"{folder}/s", {"a": "Hi"}, ByteTokenizer())
        >>> remote = open_store(f"file://{folder}/s", cache_dir=f"{folder}/cache")
        >>> remote[0].tolist(), open_store(f"{folder}/s")[0].tolist()
        ([72, 105, 256], [72, 105, 256])
    """
    if not is_url(place):
        return TokenStore(Path(place).expanduser())
    return RemoteStore(
        os.fspath(place), cache_dir=cache_dir, storage_options=storage_options, timeout=timeout, max_bytes=max_bytes
    )


class RemoteStore(TokenStore):
    """A token store at a URL; what takes a `TokenStore` takes it too, and batches are the same.

    Opening fetches everything but the tokens and the mask. These are fetched by the shard (64 MiB), when a batch or
    a document first reads in one; each is checked against its sha256 before it is used. What was fetched stays
    in the cache for later runs, and several processes may share it. A read that fails or hangs is tried four times, a
    shard that arrives damaged twice; then there is an error that names both the file and the shard.

    Args:
        url: Where the store is.
        cache_dir: Where fetched files are kept, in a folder `remote`; `$STYRAX_CACHE`, `$XDG_CACHE_HOME/styrax` or
            `~/.cache/styrax` by default.
        storage_options: What fsspec's file system takes: keys, an endpoint, ...; they are not kept.
        timeout: Seconds after which a read of at most 8 MiB is given up and begun anew.
        max_bytes: Drop other stores from the cache when this one is opened, those opened longest ago first, until
            all of this one has room; never one that any process has open. `None` drops none.

    Attributes:
        url: Where the store is.
        path: Its cache folder, which is no store by itself.
        meta: Its description.
        docs: One record per document, of type `styrax.data.store.RECORD`.
        tokens: All ids; a `styrax.data.store.shards.ShardArray`, which fetches what is read.
        mask: For each id, 1 where it carries loss, likewise; `None` where all do.

    Raises:
        UserError: There is no store, it is damaged, it cannot be read, the disk is full, or a package is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        cache_dir: str | Path | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT,
        max_bytes: int | None = None,
    ):
        self._options = {
            "cache_dir": cache_dir,
            "storage_options": storage_options,
            "timeout": timeout,
            "max_bytes": max_bytes,
        }
        self._files = RemoteFiles(url, storage_options, timeout=timeout)
        self.url = self._files.url
        self.meta = self._files.read_meta()
        self._check_files()
        key = self.meta["checksum"]
        if cache_dir is None:
            from styrax.data.cache import default_cache_dir

            cache_dir = default_cache_dir()
        root = Path(cache_dir).expanduser() / "remote"
        if max_bytes is not None:
            make_room(root, key, max_bytes - sum(entry["bytes"] for entry in self.meta["files"].values()))
        self._cache = CacheFolder(root, key, patience=2 * timeout)
        self.path = self._cache.path
        self._cache.get("url", lambda: [f"{self.url}\n".encode()])
        for name in self.meta["files"]:
            if name not in SHARDED:
                self._cache.get(name, lambda name=name: self._shards(name))
        self.docs = np.load(self.path / DOCS, allow_pickle=False)
        self._check_docs()
        self.tokens = cast(Any, self._array(TOKENS, np.dtype(self.meta["dtype"])))
        self.mask = cast(Any, self._array(MASK, np.dtype(np.uint8))) if MASK in self.meta["files"] else None
        self._ids = self._map(IDS, np.dtype(np.uint8))
        self._tokenizer = (self.path / TOKENIZER).read_bytes()

    def __reduce__(self) -> Any:
        return _open, (self.url, self._options)

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r}: {len(self)} documents, {self.num_tokens} tokens)"

    def prepare(self, starts: Int64[np.ndarray, " stretches"], stops: Int64[np.ndarray, " stretches"]) -> None:
        """Fetch the shards of some stretches of tokens, a few at once; reading fetches them too, but one by one.

        Args:
            starts: Where each stretch begins in `tokens`.
            stops: Where it ends.

        Raises:
            UserError: A shard cannot be read, or is damaged.
        """
        for array in (self.tokens, self.mask):
            if array is not None:
                cast(ShardArray, array).prepare(starts, stops)

    def fetch(self, progress: Progress | None = None) -> None:
        """Fetch all that is not here yet, such as before a run.

        Args:
            progress: Called as `progress(label, done, total)`, in bytes.

        Raises:
            UserError: A shard cannot be read, or is damaged.
        """
        names = [name for name in SHARDED if name in self.meta["files"]]
        total, done = sum(self.meta["files"][name]["bytes"] for name in names), 0
        for name in names:
            array = cast(ShardArray, self.tokens if name == TOKENS else self.mask)
            for start, stop in array.groups():
                array.prepare(np.array([start]), np.array([stop]))
                done += (stop - start) * array.dtype.itemsize
                if progress is not None:
                    progress("fetch", done, total)

    def verify(self) -> None:
        """Fetch what is missing, and compare every byte in the cache with the checksums in `meta.json`.

        Raises:
            UserError: Names every file and shard in the cache that differs; it is removed, to be fetched anew.
        """
        problems, damaged = [], set()
        for name, entry in self.meta["files"].items():
            for number, expected in enumerate(entry["shards"]):
                file, content = self._local(name, number)
                if (got := hashlib.sha256(content).hexdigest()) != expected:
                    problems.append(f"{file}, shard {number}: expected sha256 {expected}, got {got}")
                    damaged.add(file)
        for file in damaged:
            file.unlink(missing_ok=True)
        if problems:
            raise UserError(
                f"the cache of {self.url} was damaged:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
                + "\nthe damaged files were removed; open the store anew, and they are fetched again"
            )

    def _local(self, name: str, number: int) -> tuple[Path, bytes]:
        if name in SHARDED:
            file = _shard(self._cache, self._files, self.meta, name, number)
            return file, file.read_bytes()
        size, file = shard_size(self.meta), self.path / name
        with file.open("rb") as handle:
            handle.seek(number * size)
            return file, handle.read(size)

    def _array(self, name: str, dtype: np.dtype) -> ShardArray:
        # Without a way back to this object, so that it is freed, and its folder can be dropped, with the last use.
        fetch = partial(_shard, self._cache, self._files, self.meta, name)
        return ShardArray(fetch, self.num_tokens, dtype, shard_size(self.meta))

    def _shards(self, name: str) -> Iterator[bytes]:
        return (self._files.shard(self.meta, name, number) for number in range(len(self.meta["files"][name]["shards"])))

    def _check_files(self) -> None:
        files, size = self.meta["files"], shard_size(self.meta)
        problems = [f"{self.url}/{META}: says nothing about {name}" for name in NEEDED if name not in files]
        for name, width in ((TOKENS, np.dtype(self.meta["dtype"]).itemsize), (MASK, 1)):
            expected = self.num_tokens * width
            if name in files and files[name]["bytes"] != expected:
                problems.append(f"{self.url}/{META}: {self.num_tokens} tokens need {expected} bytes of {name}")
            if size % width:
                problems.append(f"{self.url}/{META}: shards of {size} bytes cut tokens of {width} bytes")
        for name, entry in files.items():
            expected = max(1, -(-entry["bytes"] // size))
            if len(entry["shards"]) != expected:
                problems.append(f"{self.url}/{META}: {name} needs {expected} shards, got {len(entry['shards'])}")
        complain(problems, self.url, self.meta)


def _shard(cache: CacheFolder, files: RemoteFiles, meta: Mapping[str, Any], name: str, number: int) -> Path:
    return cache.get(f"{name}.{number:06d}", lambda: [files.shard(meta, name, number)])


def _open(url: str, options: dict[str, Any]) -> RemoteStore:
    return RemoteStore(url, **options)
