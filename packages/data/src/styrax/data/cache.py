"""Stores that are built once and found again by what is in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from styrax.core.errors import UserError
from styrax.data.atomic import scratch_folder
from styrax.data.build.job import Job
from styrax.data.build.merge import merge
from styrax.data.build.pipeline import describe_build, make_parts
from styrax.data.build.readers.streams import reading
from styrax.data.build.records import Errors, ReadSettings
from styrax.data.build.sources import Document, find_documents
from styrax.data.build.training import make_tokenizer
from styrax.data.build.units import file_units
from styrax.data.build.write import Progress
from styrax.data.build.writer import StoreWriter
from styrax.data.hashing import fingerprint
from styrax.data.spec import bpe_size
from styrax.data.store.format import VERSION
from styrax.data.store.tokens import TokenStore
from styrax.data.tokenizer import ByteTokenizer, StoreTokenizer, load_tokenizer


def default_cache_dir() -> Path:
    """Give `$STYRAX_CACHE`, else `$XDG_CACHE_HOME/styrax`, else `~/.cache/styrax`."""
    if own := os.environ.get("STYRAX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "styrax"


def cached_store(
    sources: Sequence[str],
    *,
    tokenizer: str | StoreTokenizer,
    errors: Errors = "raise",
    split_on: str | None = None,
    max_bytes: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """Open the store of these sources, building it at first use.

    The key is a hash of the tokenizer, the settings and every document's id and content, so a changed file
    makes another store. Every call reads the sources once (about a gigabyte per second); for corpora where
    that is too slow, build a store by name and open that. Several processes may call this at once: each
    builds, the first to finish is used by all. A damaged store in the cache is built anew.

    Args:
        sources: See `find_documents`; tables hold their text in a column or field `text`.
        tokenizer: `byte`, `bpe:N`, the path of a `tokenizer.json`, or a tokenizer.
        errors: What to do with files that are not UTF-8.
        split_on: Cut text files after every such text.
        max_bytes: Take a fixed subset of whole files of at most this size.
        cache_dir: Where stores are kept, in a folder `data`; see `default_cache_dir`.
        progress: Called as `progress(label, done, total)`, in bytes.

    Returns:
        The store.

    Raises:
        UserError: As `build_store` does.
    """
    documents = find_documents(sources, max_bytes=max_bytes)
    key = fingerprint(
        {
            "version": VERSION,
            "tokenizer": _named(tokenizer),
            "errors": errors,
            "split_on": split_on,
            "documents": _digest(documents, progress),
        }
    )
    out = (cache_dir or default_cache_dir()) / "data" / key
    damaged = False
    if out.exists():
        try:
            return TokenStore(out)
        except UserError:
            damaged = True
    read = ReadSettings(errors=errors, split_on=split_on)
    units = file_units(documents, read)
    made = tokenizer
    if isinstance(made, str):
        made = make_tokenizer(made, [piece for unit in units for piece in unit.pieces], (), read, progress)
    # In a folder of its own: whoever else builds the same store at this moment need not wait.
    with scratch_folder(out) as folder:
        job = Job(folder=folder, tokenizer=made, read=read)
        keys = make_parts(units, (), job, 1, progress, out)
        with StoreWriter(out, made, overwrite=damaged, keep_existing=not damaged) as writer:
            build = describe_build(sources, tokenizer, max_bytes, "raise", None, job)
            return merge(folder, keys, writer, quarantine=None, exact=False, near=None, build=build, progress=progress)


def _named(tokenizer: str | StoreTokenizer) -> str:
    if isinstance(tokenizer, str) and (tokenizer == "byte" or bpe_size(tokenizer) is not None):
        return tokenizer
    made = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return "byte" if isinstance(made, ByteTokenizer) else made.fingerprint


def _digest(documents: Sequence[Document], progress: Progress | None) -> str:
    """Hash all names and contents."""
    total, done = sum(document.size for document in documents), 0
    everything = hashlib.blake2b(digest_size=16)
    for document in documents:
        with reading(document.path), document.path.open("rb") as handle:
            content = hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16))
        name = hashlib.blake2b(document.id.encode(), digest_size=16)
        everything.update(name.digest() + content.digest())
        done += document.size
        if progress is not None:
            progress("check sources", done, total)
    return everything.hexdigest()
