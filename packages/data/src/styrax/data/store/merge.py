"""Several token stores laid end to end as one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.store.format import IDS, QUARANTINE
from styrax.data.store.tokens import TokenStore

BLOCK_TOKENS = 1 << 22
BLOCK_BYTES = 1 << 22
SHOWN = 10


def merge_stores(stores: Sequence[TokenStore | str | Path], out: str | Path, *, overwrite: bool = False) -> TokenStore:
    """Write the documents of several stores, in the order given, as one store.

    The result is the store that would have been built from all the documents at once, with the same fingerprint; only
    documents with the same text are not looked for. Where some stores have a mask of the tokens that carry loss,
    all tokens of the others carry it. Refused records are kept together. Each store is verified first, so that damage
    is not sealed under new checksums; then blocks of a few megabytes are copied.

    Args:
        stores: Stores or their folders.
        out: The folder to make; it appears whole or not at all.
        overwrite: Replace a store at `out`, which may be one of `stores`.

    Returns:
        The store, open.

    Raises:
        UserError: Stores that are damaged, have different tokenizers, or share ids of documents; an existing `out` or a
            full disk.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, write_store
        >>> folder, tokenizer = tempfile.mkdtemp(), ByteTokenizer()
        >>> parts = [write_store(f"{folder}/{name}", {name: "Hi"}, tokenizer) for name in ("a", "b")]
        >>> merge_stores(parts, f"{folder}/ab").ids
        ['a', 'b']
    """
    # Stores know nothing of how they are built; this is the one way back.
    from styrax.data.build.writer import StoreWriter, check_out

    check_out(Path(out), overwrite)
    opened = [store if isinstance(store, TokenStore) else TokenStore(store) for store in stores]
    if not opened:
        raise UserError("there is nothing to merge; give two token stores or more")
    _check_tokenizers(opened)
    for store in opened:
        store.verify()
    _check_ids(opened)
    masked = any(store.mask is not None for store in opened)
    with StoreWriter(out, opened[0].tokenizer, mask=masked, overwrite=overwrite) as writer:
        for store in opened:
            _copy(store, writer)
        merged = [
            {"path": str(store.path), "fingerprint": store.fingerprint, "documents": len(store)} for store in opened
        ]
        reports = [store.meta.get("report") or {} for store in opened]
        return writer.finish(build={"merged": merged}, report={**_total(reports), "merged": reports})


def _copy(store: TokenStore, writer: Any) -> None:
    docs = store.docs
    ends = docs["start"] + docs["tokens"]
    with (store.path / IDS).open("rb") as lines:
        first = 0
        while first < len(docs):
            # As many whole documents as fit, and one at least.
            limit = docs["start"][first] + BLOCK_TOKENS
            last = max(first + 1, int(np.searchsorted(ends, limit, "right")))
            part, block = docs[first:last], slice(docs["start"][first], ends[last - 1])
            mask = None
            if writer.masked:
                length = block.stop - block.start
                mask = np.ones(length, np.uint8) if store.mask is None else store.mask[block]
            names = [json.loads(line) for line in islice(lines, last - first)]
            writer.extend(names, part["id_hash"], part["tokens"], part["bytes"], store.tokens[block], mask)
            first = last
    if QUARANTINE in store.meta["files"]:
        with (store.path / QUARANTINE).open("rb") as refused:
            while lines := refused.read(BLOCK_BYTES):
                writer.refuse(lines, 1)


def _total(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the counts of reports, also those inside mappings; what is no count is left out."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        if all(isinstance(value, Mapping) for value in values):
            total[name] = _total(values)
        elif all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            total[name] = sum(values)
    return total


def _check_tokenizers(stores: Sequence[TokenStore]) -> None:
    first = stores[0].meta["tokenizer"]
    problems = [
        f"{store.path}: {name} is {value!r}, but {first[name]!r} in {stores[0].path}"
        for store in stores[1:]
        for name, value in store.meta["tokenizer"].items()
        if value != first[name]
    ]
    if problems:
        raise UserError(
            "cannot merge stores of different tokenizers:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nbuild them with one tokenizer (--tokenizer PATH of the first one's tokenizer.json), then merge"
        )


def _check_ids(stores: Sequence[TokenStore]) -> None:
    """Refuse ids that come twice; only ids whose hash comes twice are read."""
    hashes = np.concatenate([store.docs["id_hash"] for store in stores])
    values, counts = np.unique(hashes, return_counts=True)
    again = np.isin(hashes, values[counts > 1])
    places: dict[str, list[str]] = {}
    start = 0
    for store in stores:
        wanted = again[start : start + len(store)]
        start += len(store)
        if wanted.any():
            with (store.path / IDS).open("rb") as lines:
                for line, chosen in zip(lines, wanted.tolist()):
                    if chosen:
                        places.setdefault(json.loads(line), []).append(str(store.path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    if shared:
        lines = [f"  - {name!r} is in {' and in '.join(found)}" for name, found in islice(shared.items(), SHOWN)]
        lines += [f"  - and {len(shared) - SHOWN} more"] if len(shared) > SHOWN else []
        raise UserError(
            f"cannot merge: {len(shared)} ids name several documents, so that tokens could not be traced back:\n"
            + "\n".join(lines)
            + "\ngive a store once, and build stores from folders of different names"
        )
