"""A token store: a folder that is written once, opened by mmap and checked before it is trusted."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.store.format import (
    DOCS,
    IDS,
    MASK,
    META,
    NEEDED,
    RECORD,
    TOKENIZER,
    TOKENS,
    complain,
    hash_shards,
    read_meta,
    rebuild,
    shard_size,
)
from styrax.data.tokenizer import StoreTokenizer, parse_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Integer, UInt8


class TokenStore:
    """A store on disk, read only.

    Opening reads `meta.json` and the document records, and compares every file's size: microseconds, whatever
    the size of the corpus. `verify` reads everything.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
        meta: Its description.
        docs: One record per document, of type `styrax.data.store.RECORD`.
        tokens: All ids, uint16 or uint32; a view of the file.
        mask: For each id, 1 where it carries loss and 0 where it does not; `None` where all do.

    Raises:
        UserError: There is no store, it is cut short or changed, or another version wrote it; the message
            names the file, what was expected and found, and the command that builds it anew.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> store = write_store(f"{tempfile.mkdtemp()}/s", {"a": "Hi", "b": "there"}, ByteTokenizer())
        >>> len(store), store.num_tokens, store[1].tolist()
        (2, 9, [116, 104, 101, 114, 101, 256])
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.meta = read_meta(self.path)
        self._check_files()
        self.docs: np.ndarray = np.load(self.path / DOCS, allow_pickle=False)
        self._check_docs()
        self.tokens: Integer[np.ndarray, " tokens"] = self._map(TOKENS, np.dtype(self.meta["dtype"]))
        self.mask: UInt8[np.ndarray, " tokens"] | None = None
        if MASK in self.meta["files"]:
            self.mask = self._map(MASK, np.dtype(np.uint8))
        # Taken hold of now, so that an open store stays whole while its folder is replaced.
        self._ids = self._map(IDS, np.dtype(np.uint8))
        self._tokenizer = (self.path / TOKENIZER).read_bytes()

    def __reduce__(self) -> Any:
        return TokenStore, (self.path,)

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}: {len(self)} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return self.meta["num_documents"]

    def __getitem__(self, index: int) -> Integer[np.ndarray, " tokens"]:
        """Give one document's ids, the end token last; a view of the file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of a store with {len(self)} documents")
        record = self.docs[index]
        return self.tokens[record["start"] : record["start"] + record["tokens"]]

    @property
    def num_tokens(self) -> int:
        """How many ids are stored, one end token per document among them."""
        return self.meta["num_tokens"]

    @property
    def num_bytes(self) -> int:
        """How many bytes of UTF-8 the documents have."""
        return self.meta["num_bytes"]

    @property
    def fingerprint(self) -> str:
        """What the store holds, whatever folder or machine it is on."""
        return self.meta["fingerprint"]

    @cached_property
    def tokenizer(self) -> StoreTokenizer:
        """The tokenizer that made the ids.

        Raises:
            UserError: `tokenizer.json` is not the one that the ids were made with.
        """
        tokenizer = parse_tokenizer(self._tokenizer.decode(errors="replace"), str(self.path / TOKENIZER))
        expected = self.meta["tokenizer"]["fingerprint"]
        if tokenizer.fingerprint != expected:
            raise UserError(
                f"{self.path / TOKENIZER}: expected tokenizer {expected}, got {tokenizer.fingerprint}; "
                f"{rebuild(self.path, self.meta)}"
            )
        return tokenizer

    @cached_property
    def ids(self) -> list[str]:
        """The documents' ids, in order.

        Raises:
            UserError: `ids-00000.jsonl` is damaged.
        """
        try:
            ids = [json.loads(line) for line in self._ids.tobytes().splitlines()]
        except ValueError:
            ids = []
        if len(ids) != len(self):
            problem = f"{self.path / IDS}: expected {len(self)} lines of JSON, one id each"
            raise UserError(f"{problem}; {rebuild(self.path, self.meta)}")
        return ids

    def text(self, index: int) -> str:
        """Decode one document: exactly the text that was stored."""
        return self.tokenizer.decode(self[index])

    def verify(self) -> None:
        """Read every byte, in a few threads, and compare with the checksums in `meta.json`.

        Raises:
            UserError: Names every stretch of every file that differs.
        """
        self._check_files()
        problems, files, size = [], self.meta["files"], shard_size(self.meta)
        for file, digests in hash_shards([self.path / name for name in files], shard_bytes=size).items():
            entry = files[file.name]
            for shard, (expected, got) in enumerate(zip(entry["shards"], digests, strict=True)):
                if got != expected:
                    start = shard * size
                    last = max(start, min(start + size, entry["bytes"]) - 1)
                    problems.append(f"{file}, bytes {start} to {last}: expected sha256 {expected}, got {got}")
        complain(problems, self.path, self.meta)

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        return np.memmap(self.path / name, dtype=dtype, mode="r").view(np.ndarray)

    def _check_files(self) -> None:
        files = self.meta["files"]
        problems = [f"{self.path / META}: says nothing about {name}" for name in NEEDED if name not in files]
        for name, entry in files.items():
            file = self.path / name
            got = file.stat().st_size if file.is_file() else None
            if got != entry["bytes"]:
                found = "no such file" if got is None else f"{got}"
                problems.append(f"{file}: expected {entry['bytes']} bytes, got {found}")
        for name, width in ((TOKENS, np.dtype(self.meta["dtype"]).itemsize), (MASK, 1)):
            expected = self.num_tokens * width
            if name in files and files[name]["bytes"] != expected:
                problems.append(f"{self.path / META}: {self.num_tokens} tokens need {expected} bytes of {name}")
        complain(problems, self.path, self.meta)

    def _check_docs(self) -> None:
        docs, problems = self.docs, []
        if docs.dtype != RECORD or docs.shape != (len(self),):
            problems.append(f"{self.path / DOCS}: expected {len(self)} records, got {docs.shape} of type {docs.dtype}")
        else:
            ends = np.cumsum(docs["tokens"])
            whole = len(docs) > 0 and bool(
                ends[-1] == self.num_tokens
                and np.array_equal(docs["start"], ends - docs["tokens"])
                and (docs["tokens"] > 0).all()
            )
            if not whole:
                problems.append(f"{self.path / DOCS}: its records do not add up to {self.num_tokens} tokens")
        complain(problems, self.path, self.meta)
