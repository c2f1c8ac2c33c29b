"""Byte-level BPE: trained here, or read from a `tokenizer.json`; encoding is the `tokenizers` library's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint
from styrax.data.spec import SMALLEST_VOCAB
from styrax.data.tokenizer import END_OF_TEXT, PADDING, TokenTable

if TYPE_CHECKING:
    import tokenizers
    from jaxtyping import Int32

EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")
PAD_NAMES = (PADDING, "<pad>", "[PAD]", "<|finetune_right_pad_id|>")


def byte_alphabet() -> dict[str, int]:
    """Give the printable character that byte-level BPE writes for each byte, with the byte.

    Source:
        Radford et al. 2019 (GPT-2), `encoder.py`: printable Latin-1 stands for itself, the rest moves.

    Example:
        >>> byte_alphabet()["Ġ"]
        32
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(moved)}


class BPETokenizer:
    """Byte-level BPE from the JSON of the `tokenizers` library.

    Special tokens that stand in a text are encoded as the characters they are, so text always comes back
    as it was and cannot forge the end of a document.

    Args:
        content: The text of a `tokenizer.json`.
        name: How errors call it.

    Raises:
        UserError: The tokenizer would lose or change text (all reasons are listed), or has no end token.
    """

    def __init__(self, content: str, *, name: str = "tokenizer"):
        self._content = content
        spec = _parse(content, name)
        model, added = spec["model"], spec.get("added_tokens") or []
        alphabet = byte_alphabet()
        vocab: dict[str, int] = model["vocab"]
        self.vocab_size = 1 + max([*vocab.values(), *(token["id"] for token in added)])
        pieces = [b""] * self.vocab_size
        for token, index in vocab.items():
            pieces[index] = bytes(alphabet[char] for char in token if char in alphabet)
        for token in added:
            pieces[token["id"]] = b"" if token["special"] else token["content"].encode()
        self._table = TokenTable(pieces)
        special = {token["content"]: token["id"] for token in added if token["special"]}
        self._special = special
        eos = next((special[text] for text in EOS_NAMES if text in special), None)
        if eos is None:
            raise UserError(
                f"{name} has no token that ends a document; expected one of {', '.join(EOS_NAMES)} among its "
                f"special tokens, got {', '.join(special) or 'none'}; add one to the tokenizer"
            )
        self.eos_id: int = eos
        self.bos_id: int | None = next((special[text] for text in BOS_NAMES if text in special), eos)
        self.pad_id: int = next((special[text] for text in PAD_NAMES if text in special), eos)
        merges = [part if isinstance(part, str) else " ".join(part) for part in model["merges"]]
        tokens = [[token["id"], token["content"], token["special"]] for token in added]
        decides = [
            sorted(vocab.items()),
            merges,
            tokens,
            spec.get("pre_tokenizer"),
            model.get("ignore_merges"),
        ]
        self.fingerprint = "bpe-" + fingerprint({"content": decides})

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """For each id, how many bytes of text it stands for."""
        return self._table.lengths

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        return dict(self._special)

    @cached_property
    def _encoder(self) -> tokenizers.Tokenizer:
        import tokenizers

        encoder = tokenizers.Tokenizer.from_str(self._content)
        encoder.encode_special_tokens = True
        encoder.no_padding()
        encoder.no_truncation()
        return encoder

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_encoder"}

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, with no special ids added."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts at once, on all cores."""
        encoded = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encoded]

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
        """Write a `tokenizer.json`, which `load_tokenizer` and the `tokenizers` library read."""
        Path(path).write_text(self._content, encoding="utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int = 4096) -> BPETokenizer:
    """Train byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: The text to learn merges from.
        vocab_size: How many ids at most: 256 bytes, 2 special ids and the merges; fewer when the texts hold
            no more pairs to merge.

    Returns:
        The tokenizer; `<|endoftext|>` both begins and ends a document, `<|pad|>` pads.

    Raises:
        UserError: `vocab_size` is below 258.

    Source:
        Sennrich et al. 2016, "Neural machine translation of rare words with subword units".

    Example:
        >>> tokenizer = train_bpe(["the cat sat on the mat"] * 2, vocab_size=262)
        >>> tokenizer.decode(tokenizer.encode("the mat"))
        'the mat'
    """
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"a BPE vocabulary holds 256 bytes and 2 special ids; expected {SMALLEST_VOCAB} or more, "
            f"got {vocab_size}; use 'byte' for no merges"
        )
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    return BPETokenizer(learner.to_str())


def _parse(content: str, name: str) -> dict[str, Any]:
    """Read the JSON and refuse what is not exact byte-level BPE."""
    spec = json.loads(content)
    model = spec.get("model") if isinstance(spec, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or "merges" not in model:
        raise UserError(f"{name}: expected the JSON of a BPE tokenizer with model.vocab and model.merges")
    steps = spec.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    missing = sorted(set(byte_alphabet()) - set(model["vocab"]))
    reasons = {
        "it is not byte-level (no ByteLevel pre-tokenizer)": not levels,
        "it adds a space before a text (add_prefix_space)": any(s.get("add_prefix_space") for s in levels),
        "it normalizes text (normalizer)": spec.get("normalizer") is not None,
        "it drops merges at random (model.dropout)": bool(model.get("dropout")),
        "it decorates words (continuing_subword_prefix, end_of_word_suffix)": bool(
            model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        ),
        f"its vocabulary lacks {len(missing)} of the 256 bytes": bool(levels and missing),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UserError(
            f"{name} cannot make a token store, since text would not come back exactly: {'; '.join(found)}. "
            "Use byte-level BPE without normalizer (as GPT-2's and Llama 3's), 'byte' or 'bpe:4096'"
        )
    return spec
