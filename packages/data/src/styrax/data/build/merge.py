"""From parts to a store: duplicates are dropped, names made unique, everything written in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.data.build.job import NearDuplicates
from styrax.data.build.parts import RECORD, Part
from styrax.data.build.quarantine import Quarantine, Tally, check_budget
from styrax.data.build.write import Progress
from styrax.data.build.writer import StoreWriter
from styrax.data.hashing import hash64
from styrax.data.store.tokens import TokenStore

if TYPE_CHECKING:
    from jaxtyping import Bool, UInt64


def merge(
    folder: Path,
    keys: Sequence[str],
    writer: StoreWriter,
    *,
    quarantine: Quarantine | None,
    exact: bool,
    near: NearDuplicates | None,
    build: Mapping[str, Any],
    progress: Progress | None,
) -> TokenStore:
    """Write all parts into a store.

    Args:
        folder: Where the parts are.
        keys: Their names, in the order of the store.
        writer: The store.
        quarantine: How much may have been refused.
        exact: Leave out documents whose text came before.
        near: Leave out documents that it finds to be like one before.
        build: JSON: how to make the store again.
        progress: Told how many bytes have been written.

    Returns:
        The store, open.

    Raises:
        UserError: Too much was refused, nothing is left, or the disk is full.
    """
    parts = [Part(folder, key) for key in keys]
    tally = Tally()
    for part in parts:
        tally.add(part.tally)
    if quarantine is not None:
        check_budget(quarantine, tally, (line for part in parts for line in part.refused().splitlines()))
    docs = np.concatenate([part.docs for part in parts]) if parts else np.empty(0, RECORD)
    kept = np.ones(len(docs), dtype=bool)
    if exact:
        kept &= ~repeated(docs["high"], docs["low"])
    elif near is not None and len(docs):
        kept &= ~np.asarray(near.duplicates(_signatures(folder, parts, len(docs))), dtype=bool)
    if not kept.all():
        tally.dropped["duplicate" if exact else "near duplicate"] = int((~kept).sum())
    names = UniqueNames(docs["id_hash"][kept])
    total, done = int(docs["bytes"].sum()), 0
    for part, chosen in zip(parts, _split(kept, parts), strict=True):
        _copy(part, chosen, writer, names)
        refused = part.refused()
        writer.refuse(refused, refused.count(b"\n"))
        done += int(part.docs["bytes"].sum())
        if progress is not None and len(parts) > 1:
            progress("write", done, total)
    return writer.finish(build=build, report=tally.report(int(kept.sum())))


def repeated(high: UInt64[np.ndarray, " docs"], low: UInt64[np.ndarray, " docs"]) -> Bool[np.ndarray, " docs"]:
    """Tell which 128-bit hashes came before.

    Example:
        >>> repeated(np.array([1, 2, 1, 1], np.uint64), np.array([5, 5, 5, 6], np.uint64)).tolist()
        [False, False, True, False]
    """
    order = np.lexsort((low, high))  # stable, so that the first of equal ones stays first
    again = np.zeros(len(order), dtype=bool)
    again[order[1:]] = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
    return again


class UniqueNames:
    """Gives later documents of one name another: `name@2`, `name@3`, ...

    Args:
        hashes: Of the names of all documents.
    """

    def __init__(self, hashes: UInt64[np.ndarray, " docs"]):
        self._sorted = np.sort(hashes)
        self._twice = set(self._sorted[1:][np.diff(self._sorted) == 0].tolist())
        self._used: dict[str, int] = {}

    def clash(self, hashes: UInt64[np.ndarray, " docs"]) -> bool:
        """Tell whether some of these documents may need another name."""
        return bool(self._twice) and bool(self._which(hashes).any())

    def of(self, names: list[str], hashes: UInt64[np.ndarray, " docs"]) -> tuple[list[str], np.ndarray]:
        """Give names that no other document has, and their hashes."""
        names, hashes = list(names), hashes.copy()
        for index in np.flatnonzero(self._which(hashes)).tolist():
            name = names[index]
            again = self._used.get(name, 0) + 1
            if again > 1:
                numbers = itertools.count(again)
                again, names[index] = next(
                    (number, other) for number in numbers if not self._taken(other := f"{name}@{number}")
                )
                hashes[index] = hash64("split", names[index])
                self._used[names[index]] = 1
            self._used[name] = again
        return names, hashes

    def _which(self, hashes: np.ndarray) -> np.ndarray:
        return np.isin(hashes, np.fromiter(self._twice, np.uint64))

    def _taken(self, name: str) -> bool:
        value = np.uint64(hash64("split", name))
        place = int(np.searchsorted(self._sorted, value))
        return name in self._used or (place < len(self._sorted) and self._sorted[place] == value)


def _signatures(folder: Path, parts: Sequence[Part], count: int) -> np.ndarray:
    """Lay the signatures of all documents end to end, in a file: they can be larger than memory."""
    every: np.ndarray | None = None
    start = 0
    for part in parts:
        rows = part.signatures()
        if rows is None:
            continue
        if every is None:
            file = folder / ".signatures.npy"
            every = np.lib.format.open_memmap(file, "w+", rows.dtype, (count, *rows.shape[1:]))
        every[start : start + len(rows)] = rows
        start += len(rows)
    assert every is not None
    assert start == count
    return every


def _split(kept: np.ndarray, parts: Sequence[Part]) -> Iterator[np.ndarray]:
    start = 0
    for part in parts:
        yield kept[start : start + len(part.docs)]
        start += len(part.docs)


def _copy(part: Part, chosen: Bool[np.ndarray, " docs"], writer: StoreWriter, names: UniqueNames) -> None:
    if not chosen.any():
        return
    docs, tokens, lines = part.docs, part.tokens(writer.dtype), part.id_lines()
    if not chosen.all():
        tokens = tokens[np.repeat(chosen, docs["tokens"])]
        lines = b"".join(itertools.compress(lines.splitlines(keepends=True), chosen))
        docs = docs[chosen]
    unique, hashes = lines, docs["id_hash"]
    if names.clash(hashes):
        unique, hashes = names.of([json.loads(line) for line in lines.splitlines()], hashes)
    writer.extend(unique, hashes, docs["tokens"], docs["bytes"], tokens)
