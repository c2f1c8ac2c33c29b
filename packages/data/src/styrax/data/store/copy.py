"""Token stores uploaded to a URL and downloaded from one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.core.errors import UserError
from styrax.data.atomic import new_folder, sync_file
from styrax.data.store.files import RemoteFiles, again, is_url
from styrax.data.store.format import META
from styrax.data.store.tokens import TokenStore

if TYPE_CHECKING:
    from styrax.data.build import Progress


def copy_store(
    source: TokenStore | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Upload a store from a folder to a URL, or download one from a URL to a folder.

    Every byte is compared with its checksum before it is sent, or when it arrives. `meta.json` goes last, so a copy
    that is cut off is no store: begin it again. A folder appears whole or not at all.

    Args:
        source: A store, its folder, or its URL.
        out: The URL or the folder to copy it to.
        storage_options: What fsspec's file system takes for the URL: keys, an endpoint, ...
        overwrite: Replace a store at `out`. At a URL it is gone from the first byte of the new one on, and runs that
            have it open fail when they next fetch.
        progress: Called as `progress(label, done, total)`, in bytes.

    Raises:
        UserError: `out` has a store, the source is damaged, something cannot be read or written, or not just one of
            the two is a URL.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> folder = tempfile.mkdtemp()
        >>> store = write_store(f"{folder}/s", {"a": "Hi"}, ByteTokenizer())
        >>> copy_store(store, f"file://{folder}/bucket/s")
        >>> copy_store(f"file://{folder}/bucket/s", f"{folder}/t")
        >>> TokenStore(f"{folder}/t").text(0)
        'Hi'
    """
    place = getattr(source, "url", source.path) if isinstance(source, TokenStore) else source
    if is_url(place) == is_url(out):
        raise UserError(f"cannot copy {place} to {out}: expected a URL and a folder on this machine")
    if is_url(out):
        _upload(TokenStore(Path(place).expanduser()), RemoteFiles(os.fspath(out), storage_options), overwrite, progress)
    else:
        _download(RemoteFiles(os.fspath(place), storage_options), Path(out).expanduser(), overwrite, progress)


def _upload(store: TokenStore, out: RemoteFiles, overwrite: bool, progress: Progress | None) -> None:
    from fsspec.implementations.local import LocalFileSystem

    store.verify()
    meta, fs = store.meta, out.fs
    fs.invalidate_cache()
    total, done = sum(entry["bytes"] for entry in meta["files"].values()), 0
    try:
        if again(fs.exists, f"{out.root}/{META}"):
            if not overwrite:
                raise UserError(f"{out.url} already exists; choose another URL, or overwrite it (overwrite=True)")
            again(fs.rm_file, f"{out.root}/{META}")
        if isinstance(fs, LocalFileSystem):  # others have no folders, or make them
            fs.makedirs(out.root, exist_ok=True)
        for name, entry in meta["files"].items():
            again(fs.put_file, str(store.path / name), f"{out.root}/{name}")
            fs.invalidate_cache()
            if (size := again(fs.size, f"{out.root}/{name}")) != entry["bytes"]:
                raise UserError(f"{out.url}/{name}: sent {entry['bytes']} bytes, but it has {size}; copy it again")
            done += entry["bytes"]
            if progress is not None:
                progress("upload", done, total)
        again(fs.put_file, str(store.path / META), f"{out.root}/{META}")
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"cannot write {out.url}: {reason}; check the URL, and that you may write there") from error


def _download(source: RemoteFiles, out: Path, overwrite: bool, progress: Progress | None) -> None:
    from styrax.data.build.writer import check_out

    check_out(out, overwrite)
    with new_folder(out, overwrite=overwrite) as folder:
        meta = source.read_meta()
        total, done = sum(entry["bytes"] for entry in meta["files"].values()), 0
        for name, entry in meta["files"].items():
            with (folder / name).open("wb") as file:
                for number in range(len(entry["shards"])):
                    content = source.shard(meta, name, number)
                    file.write(content)
                    done += len(content)
                    if progress is not None:
                        progress("download", done, total)
            sync_file(folder / name)
        (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sync_file(folder / META)
