"""Files at a URL, read through fsspec: with a limit in time, again after errors that pass, checked by the shard."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from styrax.core.errors import UserError
from styrax.data.store.format import META, parse_meta, shard_size

#: What one request reads at most.
PIECE_BYTES = 8 << 20
ATTEMPTS = 4
#: Seconds before the second attempt; those after grow, and vary so that many processes do not come at once.
WAIT = 0.5
LONGEST_WAIT = 10.0
TIMEOUT = 60.0

#: The package behind a protocol, where its name is another.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
}
#: Errors that another attempt does not change.
LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
    UserError,
)

T = TypeVar("T")


class RemoteFiles:
    """The files of a store at a URL.

    Args:
        url: Where the store is; any that fsspec knows.
        storage_options: What fsspec's file system takes: keys, an endpoint, ...
        timeout: Seconds after which a read of at most 8 MiB that does not end is given up and begun anew.

    Attributes:
        url: The URL, without a slash at its end.
        fs: fsspec's file system.
        root: The store's path in it.

    Raises:
        UserError: A package is missing, or no file system goes by that name.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, timeout: float = TIMEOUT):
        if not timeout > 0:
            raise UserError(f"timeout = {timeout}: expected seconds above 0")
        self.url, self.timeout = url.rstrip("/"), timeout
        self.fs, root = _connect(self.url, storage_options or {})
        self.root = root.rstrip("/")

    def read_meta(self) -> dict[str, Any]:
        """Read and check the `meta.json`.

        Raises:
            UserError: There is none, it cannot be read, is damaged, or another version wrote it.
        """
        try:
            text = again(self._once, META, None, None)
        except FileNotFoundError:
            raise UserError(
                f"there is no token store at {self.url}: it has no {META}; build one (`styrax data build IN... --out "
                f"DIR`) and upload it: styrax.data.copy_store(DIR, {self.url!r})"
            ) from None
        except Exception as error:
            raise self._failed(META, "", error) from error
        return parse_meta(text, self.url)

    def shard(self, meta: Mapping[str, Any], name: str, number: int) -> bytes:
        """Read one shard of a file, and compare it with its checksum.

        Args:
            meta: The store's meta.
            name: The file.
            number: Which shard.

        Returns:
            The shard's content.

        Raises:
            UserError: It cannot be read, or was damaged twice in a row.
        """
        entry, size = meta["files"][name], shard_size(meta)
        start = number * size
        stop = min(start + size, entry["bytes"])
        label = f"shard {number} (bytes {start} to {max(start, stop - 1)})"
        expected, got = entry["shards"][number], ""
        for _ in range(2):
            # At once, in threads that do not keep the process from ending when a read hangs.
            pieces = [
                in_thread(self._read, name, label, place, min(place + PIECE_BYTES, stop))
                for place in range(start, stop, PIECE_BYTES)
            ]
            content = b"".join(piece.result() for piece in pieces)
            got = hashlib.sha256(content).hexdigest()
            if got == expected:
                return content
        raise UserError(
            f"{self.url}/{name}, {label}, is damaged: expected sha256 {expected}, got {got}, twice; the store was "
            "replaced while it was open, or its upload is damaged: open it anew, or upload it again (copy_store)"
        )

    def _read(self, name: str, label: str, start: int, stop: int) -> bytes:
        try:
            return again(self._once, name, start, stop)
        except UserError:
            raise
        except Exception as error:
            raise self._failed(name, f", {label}", error) from error

    def _once(self, name: str, start: int | None, stop: int | None) -> bytes:
        content = in_thread(self.fs.cat_file, f"{self.root}/{name}", start=start, end=stop).result(self.timeout)
        if start is not None and stop is not None and len(content) != stop - start:
            found = f"expected {stop - start} bytes, got {len(content)}"
            if len(content) > stop - start:
                raise UserError(
                    f"{self.url}/{name}: {found}; the server does not give parts of files, so copy the store to this "
                    "machine by other means and open it there"
                )
            raise OSError(found)
        return content

    def _failed(self, name: str, label: str, error: Exception) -> UserError:
        where = f"{self.url}/{name}{label}"
        if isinstance(error, TimeoutError):
            return UserError(
                f"reading {where} did not end within {self.timeout:g} seconds, {ATTEMPTS} times in a row; check the "
                "network, or give it more time (timeout)"
            )
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, LASTING):
            return UserError(f"cannot read {where}: {reason}; check the URL, and that you may read it")
        return UserError(f"cannot read {where}: {reason}, {ATTEMPTS} times in a row; check the network and the server")


def again(function: Callable[..., T], *args: Any) -> T:
    """Call a function, up to `ATTEMPTS` times while it raises errors that may pass.

    Raises:
        Exception: What the last attempt raised.
    """
    import tenacity

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential(multiplier=WAIT, max=LONGEST_WAIT) + tenacity.wait_random(0, WAIT),
        retry=tenacity.retry_if_not_exception_type((*LASTING, KeyboardInterrupt, SystemExit)),
        reraise=True,
    )(function, *args)


def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Call a function in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="styrax-remote", daemon=True).start()
    return future


def is_url(place: str | os.PathLike[str]) -> bool:
    """Tell a URL from a path on this machine.

    Example:
        >>> is_url("s3://bucket/store"), is_url("data/store"), is_url("C:/data/store")
        (True, False, False)
    """
    return "://" in os.fspath(place)


def _connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    try:
        import fsspec
        import tenacity  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{url}: a store at a URL needs the package {error.name}; install it: `pip install 'styrax-data[remote]'`"
        ) from None
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        cure = f"install it: `pip install {package}`" if package else "install what it names"
        raise UserError(f"{url}: {protocol}:// needs another package ({error}); {cure}") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}; expected a path, or a URL such as s3://, gs://, http:// or file://") from None
