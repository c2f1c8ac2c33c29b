"""From texts to token ids, with the proof that the ids stand for exactly those texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from styrax.core.errors import UserError
from styrax.data.build.writer import token_dtype
from styrax.data.tokenizer import StoreTokenizer

if TYPE_CHECKING:
    from jaxtyping import Int64, Integer

Item = TypeVar("Item")

BATCH_CHARS = 2_000_000


@dataclass(frozen=True)
class Encoded:
    """Documents as ids, one after another.

    Attributes:
        ids: All tokens, an end token after each document.
        lengths: How many tokens each document has, its end token among them.
        sizes: How many bytes of UTF-8 each document has.
    """

    ids: Integer[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " docs"]
    sizes: Int64[np.ndarray, " docs"]

    def rows(self) -> list[Integer[np.ndarray, " tokens"]]:
        """Give each document's ids."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1])


def encode(tokenizer: StoreTokenizer, names: Sequence[str], texts: Sequence[str], sizes: Sequence[int]) -> Encoded:
    """Encode documents and check them.

    Args:
        tokenizer: Any exact tokenizer.
        names: What errors call the documents.
        texts: The documents.
        sizes: Bytes of UTF-8 of each.

    Returns:
        Their ids, in the type that a store keeps.

    Raises:
        UserError: The ids of a document do not stand for its very bytes.
    """
    rows = tokenizer.encode_batch(texts)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ends = np.cumsum(lengths)
    flat = np.concatenate(rows)
    counted = np.concatenate([[0], np.cumsum(tokenizer.token_bytes[flat], dtype=np.int64)])
    got = counted[ends] - counted[ends - lengths]
    expected = np.asarray(sizes, dtype=np.int64)
    for index in np.flatnonzero(got != expected)[:1]:
        raise UserError(
            f"the tokenizer does not keep text as it is: {names[index]!r} has {expected[index]} bytes, but its "
            f"tokens stand for {got[index]}; use 'byte', 'bpe:N' or another byte-level tokenizer"
        )
    ids = np.full(len(flat) + len(rows), tokenizer.eos_id, token_dtype(tokenizer))
    kept = np.ones(len(ids), dtype=bool)
    kept[ends + np.arange(len(rows))] = False
    ids[kept] = flat
    return Encoded(ids, lengths + 1, expected)


def batches(items: Iterable[Item], length: Callable[[Item], int], size: int = BATCH_CHARS) -> Iterator[list[Item]]:
    """Group documents into batches that are worth a call of the tokenizer.

    Args:
        items: Documents.
        length: Tells how many characters one has.
        size: Characters after which a batch is closed.

    Example:
        >>> list(batches(["ab", "c", "def"], len, size=3))
        [['ab', 'c'], ['def']]
    """
    batch: list[Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += length(item)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
