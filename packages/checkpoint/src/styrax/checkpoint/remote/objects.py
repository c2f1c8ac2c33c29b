"""Objects below a URL, through fsspec: each request is tried again where that can help, and explained where it cannot.

No object is ever renamed. `file://` is the one place where files do not appear whole by themselves: there each is
written beside, synced, and takes its name at once.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.remote.errors import again, explain, no_bucket
from styrax.checkpoint.remote.threads import ordered

#: Bytes of one request, and of one part of a large object.
PIECE = 16 * 2**20
_PARTS = 4
_MOST_PARTS = 9_000
#: The package behind a protocol, where fsspec does not have it itself.
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
}

T = TypeVar("T")


class Objects:
    """The objects whose names begin with a prefix.

    Args:
        url: Of the prefix, such as `s3://bucket/runs/a`.
        storage_options: What fsspec's file system takes: an endpoint, keys, ...
        attempts: How often a request is made at most.
        workers: Requests at a time, where there are many to make.

    Attributes:
        url: Without a slash at its end.
        options: The storage options.
        workers: As given.

    Raises:
        CheckpointError: The URL is none, or a package is missing.
    """

    def __init__(
        self, url: str, *, storage_options: Mapping[str, Any] | None = None, attempts: int = 5, workers: int = 8
    ) -> None:
        for name, value in {"attempts": attempts, "workers": workers}.items():
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name}: expected an integer, 1 or more, got {value!r}")
        self.url, self.workers, self._attempts = url.rstrip("/"), workers, attempts
        self.options = dict(storage_options or {})
        self._fs, root = _connect(self.url, self.options)
        self._root = root.rstrip("/")
        self._local = type(self._fs).__name__ == "LocalFileSystem"
        # Both bound the memory that a large object takes; whoever does not know them reads in pieces anyway.
        put = inspect.signature(getattr(self._fs, "_put_file", self._fs.put_file)).parameters
        self._put_takes = {"chunksize", "max_concurrency"} & put.keys()

    def folders(self) -> list[str]:
        """List the names before the first slash that objects have, in order."""
        self._fs.invalidate_cache()
        try:
            found = self._call("list", "", self._fs.ls, self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted({_last(entry["name"]) for entry in found if entry["type"] == "directory"})

    def sizes(self, folder: str) -> dict[str, int]:
        """List the objects below a folder: name relative to it -> bytes."""
        self._fs.invalidate_cache()
        top = f"{self._root}/{folder}"
        try:
            found = self._call("list", folder, self._fs.find, top, detail=True)
        except FileNotFoundError:
            return {}
        prefix = f"{top.strip('/')}/"
        return {
            name.strip("/").removeprefix(prefix): entry["size"]
            for name, entry in found.items()
            if entry["type"] == "file" and not name.endswith("/")
        }

    def size(self, name: str) -> int | None:
        """Give the bytes of one object, `None` if it is not there, whatever a listing says."""
        self._fs.invalidate_cache()
        try:
            entry = self._call("look up", name, self._fs.info, f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return None if entry["type"] == "directory" else entry["size"]

    def written(self, name: str) -> float:
        """Give the time when an object was written, in seconds since 1970 by the server's clock."""
        return self._call("look up", name, self._fs.modified, f"{self._root}/{name}").timestamp()

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Read an object or some bytes of it.

        Raises:
            FileNotFoundError: It is not there.
            CheckpointError: It cannot be read.
        """

        def piece() -> bytes:
            data = self._fs.cat_file(f"{self._root}/{name}", start=start, end=stop)
            if start is not None and stop is not None and len(data) != stop - start:
                raise OSError(f"{stop - start} bytes expected, {len(data)} came")
            return data

        return self._call("read", name, piece)

    def read_or_none(self, name: str) -> bytes | None:
        """Read an object, `None` if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return self.read(name)
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        if self._local:
            self._call("write", name, self._write_file, name, lambda path: Path(path).write_bytes(data))
        else:
            self._call("write", name, self._fs.pipe_file, f"{self._root}/{name}", data)

    def put(self, name: str, path: Path) -> None:
        """Write an object from a file, a large one in parts."""
        if self._local:
            self._call("write", name, self._write_file, name, lambda to: self._fs.put_file(str(path), to))
        else:
            known = {"chunksize": part_size(path.stat().st_size), "max_concurrency": _PARTS}
            options = {key: known[key] for key in self._put_takes}
            self._call("write", name, self._fs.put_file, str(path), f"{self._root}/{name}", **options)

    def remove(self, name: str) -> None:
        """Delete an object; one that is not there is deleted already."""
        # One by one: where deleting many at once is offered, some drivers do not say which it failed for.
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", name, self._fs.rm_file, f"{self._root}/{name}")

    def remove_all(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for _ in ordered(self.remove, names, workers=self.workers):
            pass

    def tidy(self, folder: str) -> None:
        """Remove folders without objects, where there are such."""
        if self._local:
            for path, _, _ in sorted(os.walk(f"{self._root}/{folder}"), reverse=True):
                with contextlib.suppress(OSError):
                    os.rmdir(path)  # noqa: PTH106

    def _call(self, verb: str, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return again(self._attempts, function, *args, **kwargs)
        except FileNotFoundError as error:
            if no_bucket(error) or verb == "write":
                raise self._explained(error, verb, name) from error
            raise
        except Exception as error:
            raise self._explained(error, verb, name) from error

    def _explained(self, error: Exception, verb: str, name: str) -> CheckpointError:
        place = f"{self.url}/{name}".rstrip("/")
        return explain(error, f"cannot {verb} {place}", attempts=self._attempts)

    def _write_file(self, name: str, write: Callable[[str], Any]) -> None:
        final = Path(self._root, name)
        final.parent.mkdir(parents=True, exist_ok=True)
        part = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
        try:
            write(str(part))
            with part.open("rb") as handle:
                os.fsync(handle.fileno())
            part.replace(final)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def part_size(size: int) -> int:
    """Choose the bytes of a part, so that even a huge object has no more parts than a server takes.

    Example:
        >>> part_size(2**30) == PIECE, part_size(10**12) * 10_000 > 10**12
        (True, True)
    """
    return max(PIECE, -(-size // _MOST_PARTS // 2**20) * 2**20)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    if "://" not in url:
        raise CheckpointError(
            f"{url!r} is no URL; expected one such as s3://bucket/folder, gs://, file:// or memory://"
        )
    try:
        import fsspec
    except ImportError:
        raise CheckpointError(
            f"{url}: a place at a URL needs fsspec; install it: pip install 'styrax-checkpoint[remote]'"
        ) from None
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        # What others write must be seen, so nothing is remembered of what was listed.
        return fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        cure = f"install it: pip install {package}" if package else "install what it names"
        raise CheckpointError(f"{url}: {protocol}:// needs another package ({error}); {cure}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{url}: {error}; expected a URL such as s3://, gs://, file:// or memory://, and options that it takes"
        ) from None
