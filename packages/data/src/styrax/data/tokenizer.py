"""Exact tokenizers: text comes back byte for byte, and every id knows how many bytes it stands for."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from styrax.core.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Int32

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


@runtime_checkable
class StoreTokenizer(Protocol):
    """What a token store needs of a tokenizer: the common protocol, and exactness in bytes.

    Attributes:
        vocab_size: Ids are in `[0, vocab_size)`.
        eos_id: Ends a document.
        bos_id: The first input of a document, or `None`: then `eos_id` is.
        pad_id: Fills a row.
        fingerprint: Changes when ids could.
        token_bytes: For each id, how many bytes of text it stands for; 0 for special ids.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def eos_id(self) -> int: ...  # noqa: D102
    @property
    def bos_id(self) -> int | None: ...  # noqa: D102
    @property
    def pad_id(self) -> int: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, with no special ids added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts at once."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Turn ids into the exact bytes behind them, which may end inside a character."""
        ...

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Turn ids into pieces of text as they come, never splitting a character."""
        ...

    def save(self, path: Path) -> None:
        """Write everything that the tokenizer is."""
        ...


class TokenTable:
    """The bytes behind each id, and decoding, which needs nothing else.

    Args:
        pieces: For each id its bytes; empty for special ids.
    """

    def __init__(self, pieces: Sequence[bytes]):
        self.pieces = tuple(pieces)

    @cached_property
    def lengths(self) -> Int32[np.ndarray, " vocab"]:
        """For each id, how many bytes of UTF-8 it stands for."""
        lengths = np.array([len(piece) for piece in self.pieces], dtype=np.int32)
        lengths.flags.writeable = False
        return lengths

    def piece(self, token: int) -> bytes:
        """Give one id's bytes.

        Raises:
            UserError: The id is not in the vocabulary.
        """
        if not 0 <= token < len(self.pieces):
            raise UserError(
                f"token id {token}: expected 0 to {len(self.pieces) - 1}, the ids of this tokenizer; was it made "
                "by another tokenizer, or by a model with a larger vocabulary?"
            )
        return self.pieces[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Join the bytes of ids."""
        return b"".join(self.piece(int(token)) for token in ids)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield text as soon as its characters are whole; what is no UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            if text := decoder.decode(self.piece(int(token))):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text


class ByteTokenizer:
    """One token per byte of UTF-8: ids 0 to 255, then 256 for both ends of a document and 257 for padding.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né")
        [110, 195, 169]
        >>> list(tokenizer.decode_stream([110, 195, 169, tokenizer.eos_id]))
        ['n', 'é']
    """

    vocab_size = 258
    eos_id = 256
    bos_id: int | None = 256
    pad_id = 257
    fingerprint = "byte-1"

    def __init__(self):
        self._table = TokenTable([*(bytes([i]) for i in range(256)), b"", b""])

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """For each id, how many bytes of text it stands for."""
        return self._table.lengths

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by their text: none, since its own have no text."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, with no special ids added."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts at once."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; special ids give nothing."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Turn ids into the exact bytes behind them."""
        return self._table.decode_bytes(ids)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Turn ids into pieces of text as they come, never splitting a character."""
        return self._table.decode_stream(ids)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, which `load_tokenizer` reads."""
        Path(path).write_text(json.dumps({"type": "styrax-byte", "version": 1}) + "\n", encoding="utf-8")


def load_tokenizer(path: str | Path) -> StoreTokenizer:
    """Read a tokenizer that was saved, or any byte-level BPE `tokenizer.json` of the `tokenizers` library.

    Args:
        path: The file.

    Returns:
        The tokenizer. Decoding with it imports nothing more; encoding with BPE imports `tokenizers`.

    Raises:
        UserError: The file is missing, is not a tokenizer, or is not exact byte-level BPE.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no tokenizer at {path}; give a tokenizer.json, 'byte' or 'bpe:4096'") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error
    return parse_tokenizer(text, str(path))


def parse_tokenizer(text: str, name: str) -> StoreTokenizer:
    """Make a tokenizer of the content of its file; `name` is what errors call it."""
    from styrax.data.bpe import BPETokenizer

    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name} is not a tokenizer.json: {error}") from None
    if isinstance(content, dict) and content.get("type") == "styrax-byte":
        if content.get("version") != 1:
            raise UserError(
                f"{name}: expected a byte tokenizer of version 1, got {content.get('version')!r}; "
                "a newer styrax-data wrote it: upgrade"
            )
        return ByteTokenizer()
    return BPETokenizer(text, name=name)
