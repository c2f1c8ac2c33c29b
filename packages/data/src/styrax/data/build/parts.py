"""Parts: what one unit of work becomes on disk before the store is put together.

part-KEY/
    part.json        counts
    tokens.bin       every document's ids with the end token after each, in the store's type
    docs.npy         one record per document: tokens, bytes, id_hash and 16 bytes of hash of its text
    ids.jsonl        one JSON string per document
    signatures.npy   optional: what near duplicates are found by, one row per document
    refused.jsonl    the records that were refused
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from styrax.data.atomic import remove_folder, sync_file, sync_folder
from styrax.data.build.encode import Encoded
from styrax.data.build.quarantine import Refused, Tally
from styrax.data.build.writer import name_lines
from styrax.data.hashing import hash64

if TYPE_CHECKING:
    from jaxtyping import Integer, Shaped

COUNTS, TOKENS, DOCS, IDS = "part.json", "tokens.bin", "docs.npy", "ids.jsonl"
SIGNATURES, REFUSED = "signatures.npy", "refused.jsonl"
RECORD = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("id_hash", "<u8"), ("high", "<u8"), ("low", "<u8")])


class PartWriter:
    """A part being written; it appears whole, flushed to disk, or not at all.

    Args:
        folder: Where parts are kept.
        key: The name of this one.
    """

    def __init__(self, folder: Path, key: str):
        self.path = part_path(folder, key)
        self._temporary = folder / f".{secrets.token_hex(8)}.tmp"
        self._stack = ExitStack()
        self._records: list[np.ndarray] = []
        self._signatures: list[np.ndarray] = []

    def __enter__(self) -> PartWriter:
        self._temporary.mkdir()
        self._tokens = self._open(TOKENS)
        self._ids = self._open(IDS)
        self._refused = self._open(REFUSED)
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(
        self,
        names: Sequence[str],
        hashes: Sequence[bytes],
        encoded: Encoded,
        signatures: Shaped[np.ndarray, " docs ..."] | None,
    ) -> None:
        """Add documents.

        Args:
            names: Their ids.
            hashes: Of each text, 16 bytes.
            encoded: Their tokens.
            signatures: What near duplicates are found by, if they are looked for.
        """
        records = np.empty(len(names), RECORD)
        records["tokens"], records["bytes"] = encoded.lengths, encoded.sizes
        records["id_hash"] = [hash64("split", name) for name in names]
        halves = np.frombuffer(b"".join(hashes), ">u8").reshape(-1, 2)
        records["high"], records["low"] = halves[:, 0], halves[:, 1]
        self._records.append(records)
        if signatures is not None:
            self._signatures.append(signatures)
        self._tokens.write(np.ascontiguousarray(encoded.ids).data)
        self._ids.write(name_lines(names))

    def refuse(self, refused: Refused) -> None:
        """Keep a refused record."""
        self._refused.write(refused.line().encode())

    def finish(self, tally: Tally) -> None:
        """Complete the part and give it its name; if another process just did, let that one stand."""
        self._stack.close()
        records = np.concatenate(self._records) if self._records else np.empty(0, RECORD)
        np.save(self._temporary / DOCS, records, allow_pickle=False)
        if self._signatures:
            np.save(self._temporary / SIGNATURES, np.concatenate(self._signatures), allow_pickle=False)
        (self._temporary / COUNTS).write_text(json.dumps(tally.json(), ensure_ascii=False), encoding="utf-8")
        for file in self._temporary.iterdir():
            sync_file(file)
        sync_folder(self._temporary)
        try:
            self._temporary.rename(self.path)
        except OSError:
            if not self.path.is_dir():
                raise
        sync_folder(self.path.parent)

    def _open(self, name: str) -> IO[bytes]:
        return self._stack.enter_context((self._temporary / name).open("wb"))


class Part:
    """A part that is complete.

    Attributes:
        tally: What was counted while it was made.
        docs: One record per document, of type `RECORD`.
    """

    def __init__(self, folder: Path, key: str):
        self.path = part_path(folder, key)
        self.tally = Tally.parse(json.loads((self.path / COUNTS).read_text(encoding="utf-8")))
        self.docs: np.ndarray = np.load(self.path / DOCS, allow_pickle=False)

    def tokens(self, dtype: np.dtype) -> Integer[np.ndarray, " tokens"]:
        """Give all ids."""
        if not len(self.docs):
            return np.empty(0, dtype)
        return np.memmap(self.path / TOKENS, dtype=dtype, mode="r").view(np.ndarray)

    def id_lines(self) -> bytes:
        """Give the documents' names as lines of JSON."""
        return (self.path / IDS).read_bytes()

    def signatures(self) -> np.ndarray | None:
        """Give what near duplicates are found by."""
        file = self.path / SIGNATURES
        return np.load(file, allow_pickle=False) if file.exists() else None

    def refused(self) -> bytes:
        """Give the lines of the refused records."""
        return (self.path / REFUSED).read_bytes()


def part_path(folder: Path, key: str) -> Path:
    """Give the folder of a part."""
    return folder / f"part-{key}"


def remove_others(folder: Path, keys: set[str] | None) -> None:
    """Remove what was being written when a build was killed, and parts of other builds.

    Args:
        folder: Where parts are kept.
        keys: The parts to keep; `None` for all.
    """
    kept = None if keys is None else {part_path(folder, key).name for key in keys}
    for path in folder.iterdir():
        if path.is_dir() and (path.name.startswith(".") or (kept is not None and path.name not in kept)):
            remove_folder(path)
