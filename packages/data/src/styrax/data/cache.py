"""Stores that are built once and found again by what is in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from styrax.core.errors import UserError
from styrax.data.build import Progress, digest, make_tokenizer, read_all, write_store
from styrax.data.hashing import fingerprint
from styrax.data.sources import Document, Errors, find_documents, read_bytes
from styrax.data.spec import bpe_size
from styrax.data.store import VERSION, TokenStore
from styrax.data.tokenizer import load_tokenizer


def default_cache_dir() -> Path:
    """Give `$STYRAX_CACHE`, else `$XDG_CACHE_HOME/styrax`, else `~/.cache/styrax`."""
    if own := os.environ.get("STYRAX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "styrax"


def cached_store(
    sources: Sequence[str],
    *,
    tokenizer: str,
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
        sources: See `find_documents`.
        tokenizer: `byte`, `bpe:N` or the path of a `tokenizer.json`.
        errors: What to do with files that are not UTF-8.
        split_on: Cut files after every such text.
        max_bytes: Take a fixed subset of whole files of at most this size.
        cache_dir: Where stores are kept, in a folder `data`; see `default_cache_dir`.
        progress: Called as `progress(label, done, total)`, in bytes.

    Returns:
        The store.

    Raises:
        UserError: As `build_store` does.
    """
    documents = find_documents(sources, max_bytes=max_bytes)
    total = sum(document.size for document in documents)
    digests = _digests(documents, total, progress)
    content = hashlib.blake2b(digest_size=16)
    for name, value in digests.items():
        content.update(digest(name.encode()) + value)
    trained = bpe_size(tokenizer) is not None
    key = fingerprint(
        {
            "version": VERSION,
            "tokenizer": tokenizer if trained else _named(tokenizer),
            "errors": errors,
            "split_on": split_on,
            "documents": content.hexdigest(),
        }
    )
    out = (cache_dir or default_cache_dir()) / "data" / key
    damaged = False
    if out.exists():
        try:
            return TokenStore(out)
        except UserError:
            damaged = True
    made = make_tokenizer(tokenizer, documents, errors, progress)
    return write_store(
        out,
        read_all(documents, errors, split_on, digests),
        made,
        overwrite=damaged,
        keep_existing=not damaged,
        build={"sources": list(sources), "tokenizer": tokenizer, "errors": errors, "split_on": split_on,
               "max_bytes": max_bytes},
        progress=progress,
        total=total,
    )  # fmt: skip


def _named(tokenizer: str) -> str:
    return "byte" if tokenizer == "byte" else load_tokenizer(tokenizer).fingerprint


def _digests(documents: Sequence[Document], total: int, progress: Progress | None) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    done = 0
    for document in documents:
        content = read_bytes(document)
        digests[document.id] = digest(content)
        done += len(content)
        if progress is not None:
            progress("check sources", done, total)
    return digests
