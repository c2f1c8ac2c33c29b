"""Documents that are already in memory, as a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from styrax.core.errors import UserError
from styrax.data.build.encode import batches, encode
from styrax.data.build.writer import StoreWriter
from styrax.data.store.tokens import TokenStore
from styrax.data.tokenizer import StoreTokenizer

Progress = Callable[[str, int, int | None], None]


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
        UserError: Documents of another kind, an existing `out`, a full disk, two equal ids, no text at all, or a
            tokenizer whose ids do not stand for the very bytes of a document.
    """
    pairs = _pairs(documents)
    read = kept = done = 0
    with StoreWriter(out, tokenizer, overwrite=overwrite, keep_existing=keep_existing) as writer:
        for batch in batches(pairs, lambda pair: len(pair[1])):
            read += len(batch)
            names = [name for name, text in batch if text]
            texts = [text for _, text in batch if text]
            if texts:
                encoded = encode(tokenizer, names, texts, [len(text.encode()) for text in texts])
                for name, ids, size in zip(names, encoded.rows(), encoded.sizes, strict=True):
                    writer.add(name, ids, int(size))
                kept += len(texts)
                done += int(encoded.sizes.sum())
            if progress is not None:
                progress("tokenize", done, total)
        dropped = {"empty": read - kept} if read > kept else {}
        return writer.finish(build=build or {}, report={"documents": read, "kept": kept, "dropped": dropped})


def _pairs(documents: Any) -> Iterator[tuple[str, str]]:
    expected = "documents: expected texts by id, such as {'a.txt': 'some text'}, or pairs of id and text"
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
        raise UserError(f"{expected}; got {type(documents).__name__}")
    return _checked(documents.items() if isinstance(documents, Mapping) else documents, expected)


def _checked(pairs: Iterable[Any], expected: str) -> Iterator[tuple[str, str]]:
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            kinds = [type(part).__name__ for part in pair] if isinstance(pair, (tuple, list)) else []
            got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
            hint = "; decode bytes first: data.decode()" if "bytes" in got else ""
            raise UserError(f"{expected}; document {number} is {got}{hint}")
        yield pair[0], pair[1]
