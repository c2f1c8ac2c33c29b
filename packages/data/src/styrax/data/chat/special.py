"""The special tokens of a tokenizer as the `tokenizers` library finds them in a text."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from styrax.data.chat.origin import Token
from styrax.data.tokenizer import END_OF_TEXT, StoreTokenizer

#: White space as Unicode has it, which is what the library takes it for.
SPACES = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
AFTER, BEFORE = re.compile(f"[{SPACES}]*"), re.compile(f"[{SPACES}]*\\Z")
WORD_BEFORE, WORD_AFTER = re.compile(r"\w\Z"), re.compile(r"\w")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        ids: Their ids, by their text; none where the tokenizer has no text for them.
        left: Those that take the white space before them.
        right: Those that take the white space after them.
        alone: Those that are none beside a letter.
        named: `bos_token`, `eos_token` and `pad_token` as a template reads them: text and id.
    """

    ids: Mapping[str, int]
    left: frozenset[int]
    right: frozenset[int]
    alone: frozenset[int]
    named: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, tokenizer: StoreTokenizer) -> SpecialTokens:
        """Ask a tokenizer.

        One without texts for its special tokens, such as `ByteTokenizer`, has them as variables of a template all the
        same: `eos_token` then is the end token, while its text is text wherever else it stands.
        """
        ids: Mapping[str, int] = getattr(tokenizer, "special_tokens", {})
        texts = {token: text for text, token in ids.items()}
        bos = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        named = {"bos_token": bos, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
        if not ids:
            texts = dict.fromkeys((bos, tokenizer.eos_id), END_OF_TEXT)
        flags = _added(tokenizer) if ids else []
        return cls(
            ids,
            *(
                frozenset(flag["id"] for flag in flags if flag.get(name))
                for name in ("lstrip", "rstrip", "single_word")
            ),
            named={name: (texts[token], token) for name, token in named.items() if token in texts},
        )

    def settle(self, text: str, tokens: Sequence[Token]) -> list[Token]:
        """Let special tokens take the white space beside them, or be text beside a letter, where they are made so.

        Args:
            text: The text.
            tokens: Where they stand.

        Source:
            `tokenizers`, `added_vocabulary.rs`, `find_matches`.
        """
        if not (self.left or self.right or self.alone):
            return list(tokens)
        settled: list[Token] = []
        last = 0
        for start, stop, token in tokens:
            if token in self.alone and (
                WORD_BEFORE.search(text, max(0, start - 1), start) or WORD_AFTER.match(text, stop)
            ):
                continue
            if token in self.left:
                spaces = BEFORE.search(text, last, start)
                start = spaces.start() if spaces and start > last else start
            if token in self.right:
                after = AFTER.match(text, stop)
                stop = after.end() if after else stop
            settled.append((max(start, last), stop, token))
            last = stop
        return settled


def _added(tokenizer: StoreTokenizer) -> list[dict[str, Any]]:
    """Read how a tokenizer's file describes its added tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        tokenizer.save(file)
        content = json.loads(file.read_text(encoding="utf-8"))
    return content.get("added_tokens") or []
