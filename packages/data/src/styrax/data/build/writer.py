"""Writing a token store, document by document; it appears whole or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.atomic import new_folder, sync_file
from styrax.data.hashing import hash64
from styrax.data.store.format import (
    DOCS,
    IDS,
    MASK,
    META,
    QUARANTINE,
    RECORD,
    TOKENIZER,
    TOKENS,
    describe,
    hash_shards,
    is_store,
)
from styrax.data.store.tokens import TokenStore
from styrax.data.tokenizer import StoreTokenizer

if TYPE_CHECKING:
    from jaxtyping import Integer, UInt8, UInt64


class StoreWriter:
    """A store being written: a context in which documents are added in order, then finished.

    Leaving the context without `finish`, or with an exception, leaves nothing on disk.

    Args:
        out: The folder to make.
        tokenizer: What made the ids; it is stored with them.
        mask: Whether every document comes with a mask of the tokens that carry loss.
        overwrite: Replace a store at `out`.
        keep_existing: If another process made `out` meanwhile, use that one.

    Raises:
        UserError: `out` exists and must not be replaced, cannot be written, or the disk is full.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer
        >>> with StoreWriter(f"{tempfile.mkdtemp()}/s", ByteTokenizer()) as writer:
        ...     writer.add("a", np.array([72, 105, 256]), size=2)
        ...     store = writer.finish(build={}, report={})
        >>> store.ids, store.text(0)
        (['a'], 'Hi')
    """

    def __init__(
        self,
        out: str | Path,
        tokenizer: StoreTokenizer,
        *,
        mask: bool = False,
        overwrite: bool = False,
        keep_existing: bool = False,
    ):
        self.out, self.tokenizer, self.masked = Path(out), tokenizer, mask
        self.dtype = token_dtype(tokenizer)
        self._replace = {"overwrite": overwrite, "keep_existing": keep_existing}
        self._stack = ExitStack()
        self._records: list[np.ndarray] = []
        self._pending: list[tuple[int, int, int, int]] = []
        self._tokens = 0
        self._seen: set[int] = set()

    def __enter__(self) -> StoreWriter:
        check_out(self.out, any(self._replace.values()))
        self._folder = self._stack.enter_context(new_folder(self.out, **self._replace))
        try:
            names = (TOKENS, IDS, MASK) if self.masked else (TOKENS, IDS)
            self._files: dict[str, IO[bytes]] = {name: self._open(name) for name in names}
        except BaseException:
            if not self._stack.__exit__(*sys.exc_info()):
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # Nothing is left on the stack after `finish`. Before it, the folder must not get its name.
        if failure is not None:
            return self._stack.__exit__(kind, failure, trace)
        unfinished = AssertionError("left without finish")
        self._stack.__exit__(type(unfinished), unfinished, None)
        return None

    def add(
        self,
        name: str,
        ids: Integer[np.ndarray, " tokens"],
        size: int,
        mask: UInt8[np.ndarray, " tokens"] | None = None,
    ) -> None:
        """Add one document.

        Args:
            name: Its id, unlike all others.
            ids: Its tokens, the end token last.
            size: Bytes of UTF-8 of its text.
            mask: With `mask=True`: for each token, 1 where it carries loss and 0 where it does not.

        Raises:
            UserError: The id came before, the ids are not of this vocabulary or do not end, or the mask is
                missing, of another length, or not wanted.
        """
        ids = np.asarray(ids)
        problems = self._problems(ids, mask)
        name_hash = hash64("split", name)
        if name_hash in self._seen and self._has(name):
            raise UserError(f"two documents have the id {name!r}; expected one each, so that tokens can be traced back")
        if problems:
            raise UserError(f"document {name!r}: " + "; ".join(problems))
        self._seen.add(name_hash)
        self._write([name], ids, mask)
        self._pending.append((self._tokens, len(ids), size, name_hash))
        self._tokens += len(ids)

    def extend(
        self,
        names: Sequence[str] | bytes,
        hashes: UInt64[np.ndarray, " docs"],
        lengths: Integer[np.ndarray, " docs"],
        sizes: Integer[np.ndarray, " docs"],
        ids: Integer[np.ndarray, " tokens"],
        mask: UInt8[np.ndarray, " tokens"] | None = None,
    ) -> None:
        """Add many documents at once; that they are sound, and their names new, is the caller's word.

        Args:
            names: Their ids, or the lines of JSON that hold them.
            hashes: Of each id, `hash64("split", id)`.
            lengths: Tokens of each, with the end token.
            sizes: Bytes of each.
            ids: The tokens of all, one document after another.
            mask: With `mask=True`: 1 where a token carries loss.
        """
        self._flush()
        self._write(names, ids, mask)
        records = np.empty(len(lengths), RECORD)
        ends = self._tokens + np.cumsum(lengths, dtype=np.int64)
        records["start"], records["tokens"] = ends - lengths, lengths
        records["bytes"], records["id_hash"] = sizes, hashes
        self._records.append(records)
        self._tokens += len(ids)

    def refuse(self, lines: bytes, count: int) -> None:
        """Keep records that were refused.

        Args:
            lines: One line of JSON each: id, reason, excerpt.
            count: How many.
        """
        if count and QUARANTINE not in self._files:
            self._files[QUARANTINE] = self._open(QUARANTINE)
        if count:
            self._files[QUARANTINE].write(lines)

    def finish(self, *, build: Mapping[str, Any], report: Mapping[str, Any]) -> TokenStore:
        """Complete the store and give it its name.

        Args:
            build: JSON: how to make the store again; `command` holds the words after `styrax data build`.
            report: JSON: what was read, dropped and why.

        Returns:
            The store, open.

        Raises:
            UserError: It holds no document, or the disk is full.
        """
        self._flush()
        records = np.concatenate(self._records) if self._records else np.empty(0, RECORD)
        if not len(records):
            raise UserError("the sources hold no text: every document is empty or was left out; nothing was built")
        for file in self._files.values():
            file.close()
        np.save(self._folder / DOCS, records, allow_pickle=False)
        self.tokenizer.save(self._folder / TOKENIZER)
        files = [self._folder / name for name in (*self._files, DOCS, TOKENIZER)]
        for file in files:
            sync_file(file)
        shards = hash_shards(files)
        meta = describe(
            {
                "dtype": self.dtype.str,
                "num_documents": len(records),
                "num_tokens": self._tokens,
                "num_bytes": int(records["bytes"].sum()),
                "tokenizer": {
                    "fingerprint": self.tokenizer.fingerprint,
                    "vocab_size": self.tokenizer.vocab_size,
                    "eos_id": self.tokenizer.eos_id,
                    "bos_id": self.tokenizer.bos_id,
                    "pad_id": self.tokenizer.pad_id,
                },
                "files": {file.name: {"bytes": file.stat().st_size, "shards": shards[file]} for file in files},
                "build": dict(build),
                "report": dict(report),
            }
        )
        (self._folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sync_file(self._folder / META)
        self._stack.close()
        return TokenStore(self.out)

    def _open(self, name: str) -> IO[bytes]:
        return self._stack.enter_context((self._folder / name).open("wb"))

    def _write(self, names: Sequence[str] | bytes, ids: np.ndarray, mask: np.ndarray | None) -> None:
        self._files[TOKENS].write(np.ascontiguousarray(ids, self.dtype).data)
        self._files[IDS].write(names if isinstance(names, bytes) else name_lines(names))
        if self.masked:
            self._files[MASK].write(np.ascontiguousarray(mask, np.uint8).data)

    def _problems(self, ids: np.ndarray, mask: np.ndarray | None) -> list[str]:
        """Say what is wrong with one document's arrays."""
        problems, end, size = [], self.tokenizer.eos_id, self.tokenizer.vocab_size
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids) or ids[-1] != end:
            problems.append(
                f"expected a row of token ids that ends in the end token {end}, got {ids.dtype} {list(ids.shape)}"
            )
        elif int(ids.min()) < 0 or int(ids.max()) >= size:
            problems.append(f"expected ids from 0 to {size - 1}, got {ids.min()} to {ids.max()}")
        if (mask is not None) != self.masked:
            problems.append(
                "expected a mask, got none" if self.masked else "got a mask; make the writer with mask=True"
            )
        elif mask is not None and (np.shape(mask) != ids.shape or not np.isin(mask, (0, 1)).all()):
            problems.append(f"expected a mask of {len(ids)} zeros and ones, got shape {list(np.shape(mask))}")
        return problems

    def _has(self, name: str) -> bool:
        """Look through the ids that were written: two names may have one hash."""
        self._files[IDS].flush()
        line = json.dumps(name, ensure_ascii=False).encode() + b"\n"
        with (self._folder / IDS).open("rb") as handle:
            return any(other == line for other in handle)

    def _flush(self) -> None:
        if self._pending:
            self._records.append(np.array(self._pending, dtype=RECORD))
            self._pending.clear()


def name_lines(names: Iterable[str]) -> bytes:
    """Write ids as the lines of a store's `ids-00000.jsonl`."""
    return "".join(json.dumps(name, ensure_ascii=False) + "\n" for name in names).encode()


def token_dtype(tokenizer: StoreTokenizer) -> np.dtype:
    """Give the type that a store keeps ids in: two bytes where they fit, else four."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


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
