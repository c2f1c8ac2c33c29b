"""Build a token store: text in, ids on disk, the same bytes from the same text every time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from styrax.core.errors import UserError
from styrax.data.atomic import new_folder, sync_file
from styrax.data.bpe import train_bpe
from styrax.data.hashing import hash64
from styrax.data.sources import Document, Errors, find_documents, read_bytes, read_text, split_text
from styrax.data.spec import bpe_size
from styrax.data.store import DOCS, IDS, META, RECORD, TOKENIZER, TOKENS, TokenStore, describe, is_store
from styrax.data.tokenizer import ByteTokenizer, StoreTokenizer, load_tokenizer

Progress = Callable[[str, int, int | None], None]

TRAIN_BYTES = 4_000_000
BATCH_BYTES = 2_000_000
SLICES = 16


def build_store(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | StoreTokenizer = "bpe:4096",
    errors: Errors = "raise",
    split_on: str | None = None,
    max_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TokenStore:
    """Build a store from text files, one document per file in the order of their ids.

    Args:
        sources: Files, folders, globs, `python:stdlib` (see `find_documents`).
        out: The folder to make; it appears whole or not at all.
        tokenizer: `byte`, `bpe:N` (trained on a fixed sample of the text), a `tokenizer.json`, or an object.
        errors: What to do with files that are not UTF-8: `raise`, `replace` or `skip`.
        split_on: Cut each file after every such text, one document per piece.
        max_bytes: Take a fixed subset of whole files of at most this size.
        overwrite: Replace a store at `out`.
        progress: Called as `progress(label, done, total)`, in bytes.

    Returns:
        The store, open.

    Raises:
        UserError: Missing sources, malformed text, an existing `out`, a full disk, a lossy tokenizer.
    """
    out = Path(out)
    check_out(out, overwrite)
    documents = find_documents(sources, max_bytes=max_bytes)
    if isinstance(tokenizer, str):
        tokenizer, spec = make_tokenizer(tokenizer, documents, errors, progress), tokenizer
    else:
        spec = None
    build = {
        "sources": [str(source) for source in sources],
        "tokenizer": spec,
        "errors": errors,
        "split_on": split_on,
        "max_bytes": max_bytes,
    }
    total = sum(document.size for document in documents)
    return write_store(
        out,
        read_all(documents, errors, split_on),
        tokenizer,
        overwrite=overwrite,
        build=build,
        progress=progress,
        total=total,
    )


def write_store(
    out: str | Path,
    documents: Mapping[str, str] | Iterable[tuple[str, str]],
    tokenizer: StoreTokenizer,
    *,
    overwrite: bool = False,
    keep_existing: bool = False,
    build: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    total: int | None = None,
) -> TokenStore:
    """Write documents, in the order given, as a store.

    Args:
        out: The folder to make.
        documents: Text by id, or pairs of id and text; ids must differ, empty texts are left out.
        tokenizer: Any exact tokenizer (`ByteTokenizer`, `train_bpe`, `load_tokenizer`).
        overwrite: Replace a store at `out`.
        keep_existing: If another process made `out` meanwhile, use that one.
        build: JSON to keep in `meta.json`: how to make the store again.
        progress: Called as `progress(label, done, total)`, in bytes.
        total: How many bytes to expect, for `progress`.

    Returns:
        The store, open.

    Raises:
        UserError: An existing `out`, a full disk, two equal ids, no text at all, or a tokenizer whose ids do
            not stand for the very bytes of a document.
    """
    out = Path(out)
    check_out(out, overwrite or keep_existing)
    pairs = cast("Iterable[tuple[str, str]]", documents.items() if isinstance(documents, Mapping) else documents)
    with new_folder(out, overwrite=overwrite, keep_existing=keep_existing) as folder:
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        rows: list[tuple[int, int, int, int]] = []
        seen: set[str] = set()
        start = done = 0
        with (
            (folder / TOKENS).open("wb") as tokens,
            (folder / IDS).open("w", encoding="utf-8", newline="\n") as ids,
        ):
            for batch in _batches(pairs):
                encoded = tokenizer.encode_batch([text for _, text in batch])
                for (name, text), row in zip(batch, encoded, strict=True):
                    size = len(text.encode())
                    _check_document(name, size, row, tokenizer, seen)
                    rows.append((start, len(row) + 1, size, hash64("split", name)))
                    tokens.write(np.append(row, tokenizer.eos_id).astype(dtype).tobytes())
                    ids.write(json.dumps(name, ensure_ascii=False) + "\n")
                    start += len(row) + 1
                    done += size
                if progress is not None:
                    progress("tokenize", done, total)
        if not rows:
            raise UserError("the sources hold no text: every document is empty or was skipped; nothing was built")
        np.save(folder / DOCS, np.array(rows, dtype=RECORD), allow_pickle=False)
        tokenizer.save(folder / TOKENIZER)
        files = {name: _seal(folder / name) for name in (TOKENS, DOCS, IDS, TOKENIZER)}
        meta = describe(
            {
                "dtype": dtype.str,
                "num_documents": len(rows),
                "num_tokens": start,
                "num_bytes": done,
                "tokenizer": {
                    "fingerprint": tokenizer.fingerprint,
                    "vocab_size": tokenizer.vocab_size,
                    "eos_id": tokenizer.eos_id,
                    "bos_id": tokenizer.bos_id,
                    "pad_id": tokenizer.pad_id,
                },
                "files": files,
                "build": dict(build or {}),
            }
        )
        (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sync_file(folder / META)
    return TokenStore(out)


def check_out(out: Path, replace: bool) -> None:
    """Refuse, before any work, an `out` that cannot be made or must not be replaced.

    Raises:
        UserError: It exists and `replace` is false, or it is not a token store.
    """
    if not out.exists():
        return
    if not replace:
        raise UserError(f"{out} already exists; choose another name, or overwrite it (--overwrite, overwrite=True)")
    if not is_store(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not a token store, so it will not be replaced; choose another name or remove it")


def make_tokenizer(
    spec: str, documents: Sequence[Document], errors: Errors = "raise", progress: Progress | None = None
) -> StoreTokenizer:
    """Make the tokenizer that a text names.

    Args:
        spec: `byte`, `bpe:N` or the path of a `tokenizer.json`.
        documents: What BPE is trained on: a sample of about 4 MB, chosen by hash.
        errors: What to do with documents that are not UTF-8.
        progress: Called as `progress(label, done, total)`.

    Raises:
        UserError: The text names nothing, or the file is no exact tokenizer.
    """
    size = bpe_size(spec)
    if size is not None:
        if progress is not None:
            progress("train tokenizer", 0, None)
        return train_bpe(sample_texts(documents, errors), size)
    return ByteTokenizer() if spec == "byte" else load_tokenizer(spec)


def sample_texts(documents: Sequence[Document], errors: Errors, budget: int = TRAIN_BYTES) -> Iterator[str]:
    """Give documents in the order of a hash until `budget` bytes; a longer one gives evenly spaced slices."""
    for document in sorted(documents, key=lambda document: hash64("train-tokenizer", document.id)):
        if budget <= 0:
            return
        text = read_text(document, read_bytes(document), errors) or ""
        length = max(1, budget // SLICES)
        if len(text) <= SLICES * length:
            yield text
        else:
            yield from (text[len(text) * i // SLICES :][:length] for i in range(SLICES))
        budget -= len(text)


def read_all(
    documents: Iterable[Document],
    errors: Errors,
    split_on: str | None,
    digests: Mapping[str, bytes] | None = None,
) -> Iterator[tuple[str, str]]:
    """Read, decode and cut documents, one after another.

    Raises:
        UserError: One cannot be read, is not UTF-8, or (with `digests`) changed since those were taken.
    """
    for document in documents:
        content = read_bytes(document)
        if digests is not None and digests[document.id] != digest(content):
            raise UserError(f"{document.path} changed while the store was being built; run the command again")
        text = read_text(document, content, errors)
        if text is not None:
            yield from split_text(document.id, text, split_on)


def digest(content: bytes) -> bytes:
    """Hash a file's content."""
    return hashlib.blake2b(content, digest_size=16).digest()


def _batches(pairs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Group documents into about `BATCH_BYTES` of text, leaving out empty ones."""
    batch: list[tuple[str, str]] = []
    size = 0
    for name, text in pairs:
        if text:
            batch.append((name, text))
            size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_document(name: str, size: int, row: np.ndarray, tokenizer: StoreTokenizer, seen: set[str]) -> None:
    if name in seen:
        raise UserError(f"two documents have the id {name!r}; expected one each, so that tokens can be traced back")
    seen.add(name)
    got = int(tokenizer.token_bytes[row].sum())
    if got != size:
        raise UserError(
            f"the tokenizer does not keep text as it is: {name!r} has {size} bytes, but its tokens stand "
            f"for {got}; use 'byte', 'bpe:N' or another byte-level tokenizer"
        )


def _seal(file: Path) -> dict[str, Any]:
    sync_file(file)
    with file.open("rb") as handle:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}
