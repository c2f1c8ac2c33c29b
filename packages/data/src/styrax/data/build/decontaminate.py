"""Evaluation texts in training documents: the runs of words that both have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError, nearest
from styrax.data.build.shingles import WordHashes, hash_runs, runs_within, words

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt64

VERSION = 1
SHOWN = 10


class Decontaminator:
    """Finds the n-grams of held-out texts in documents.

    Texts and documents are compared as words (`words`: casefolded, punctuation and white space aside). A held
    text of `ngram` words or more is found by any run of `ngram` of its words, a shorter one as a whole. Runs
    are looked up by 64-bit hash and then compared as text, so that no hit is false. (Two of the held n-grams
    have one hash, so that one of them is missed, with a probability of 3e-6 for ten million n-grams.)

    It can be pickled, and takes about 20 bytes for each word that is held.

    Args:
        texts: What must not be trained on.
        ngram: Words in a run.
        shortest: Leave out texts with fewer words: one held text of a single common word would hit nearly every
            document. How many were left out is in `num_left_out`.

    Raises:
        UserError: Numbers out of range, or texts without words.

    Source:
        Brown et al. 2020, "Language models are few-shot learners", appendix C (13-grams).

    Example:
        >>> held = Decontaminator(["What is the capital of France?"], ngram=4)
        >>> held.hits("Asked 'what is the capital of Peru', she said: Lima.")
        ['what is the capital', 'is the capital of']
        >>> held.hits("What is the time?")
        []
    """

    def __init__(self, texts: Iterable[str], *, ngram: int = 13, shortest: int = 1):
        problems = [
            f"{name} = {value}: expected 1 or more"
            for name, value in (("ngram", ngram), ("shortest", shortest))
            if value < 1
        ]
        if problems:
            raise UserError("cannot look for held-out texts:\n" + "\n".join(f"  - {line}" for line in problems))
        self.ngram, self.shortest = ngram, shortest
        self.num_left_out = 0
        self._words = WordHashes()
        flat: list[str] = []
        lengths: list[int] = []
        for text in texts:
            found = words(text)
            if len(found) < max(shortest, 1):
                self.num_left_out += 1
                continue
            flat += found
            lengths.append(len(found))
        if not lengths:
            raise UserError(
                f"there is nothing to look for: none of {self.num_left_out} held-out texts has "
                f"{'a word' if shortest == 1 else f'{shortest} words'}; give the evaluation texts"
            )
        self._held = dict(self._index(flat, np.array(lengths, np.int64)))
        self._text = _join(flat, lengths)

    @classmethod
    def from_files(
        cls, paths: Sequence[str | Path], *, ngram: int = 13, text: str = "text", shortest: int = 1
    ) -> Decontaminator:
        """Read what is held out from files.

        Args:
            paths: `.txt` files, one text each, and `.jsonl` files, one text per line.
            ngram: Words in a run.
            text: The field of a `.jsonl` line that holds the text.
            shortest: Leave out texts with fewer words.

        Raises:
            UserError: Files that are missing, of another kind or malformed, all in one message.
        """
        problems: list[str] = []
        texts = [found for path in paths for found in _read(Path(path), text, problems)]
        if problems:
            more = f"\n  - and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            lines = "\n".join(f"  - {problem}" for problem in problems[:SHOWN])
            raise UserError(f"cannot read the held-out texts:\n{lines}{more}")
        return cls(texts, ngram=ngram, shortest=shortest)

    def __repr__(self) -> str:
        return f"Decontaminator({self.num_ngrams} n-grams of {self.ngram} words or whole texts)"

    @property
    def num_ngrams(self) -> int:
        """How many different runs of words are looked for."""
        return sum(len(hashes) for hashes, _ in self._held.values())

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what a document is found to have, as JSON; the order of the held texts does not."""
        held = hashlib.blake2b(digest_size=16)
        for length, (hashes, _) in sorted(self._held.items()):
            held.update(length.to_bytes(8, "little") + len(hashes).to_bytes(8, "little"))
            held.update(hashes.astype("<u8").tobytes())
        return {"version": VERSION, "ngram": self.ngram, "shortest": self.shortest, "held": held.hexdigest()}

    def hits(self, text: str) -> list[str]:
        """Give the runs of words in a document that are held, each once, in the order of the document.

        Args:
            text: The document.

        Returns:
            Words joined by spaces, as they were compared; an empty list for a clean document.
        """
        found = words(text)
        hashes = self._words(found)
        places: list[tuple[int, int]] = []
        for length, (held, at) in self._held.items():
            own = hash_runs(hashes, length)
            where = np.minimum(np.searchsorted(held, own), len(held) - 1)
            for place in np.flatnonzero(held[where] == own).tolist():
                run = " ".join(found[place : place + length])
                start = int(at[where[place]])
                if self._text.startswith(run, start) and self._text[start + len(run)] in " \n":
                    places.append((place, length))
        return list(dict.fromkeys(" ".join(found[place : place + length]) for place, length in sorted(places)))

    def _index(
        self, flat: list[str], lengths: Int64[np.ndarray, " texts"]
    ) -> Iterator[tuple[int, tuple[UInt64[np.ndarray, " runs"], np.ndarray]]]:
        """For each length of run: the hashes in order, and where in `_text` each run begins."""
        hashes = self._words(flat)
        sizes = np.fromiter(map(len, flat), np.int64, len(flat)) + 1
        offsets = np.cumsum(sizes) - sizes
        offsets = offsets.astype(np.uint32 if sizes.sum() < 1 << 32 else np.int64)
        firsts = np.cumsum(lengths) - lengths
        for length in np.unique(np.minimum(lengths, self.ngram)).tolist():
            whole = length < self.ngram
            begins = firsts[lengths == length] if whole else runs_within(lengths, length)[0]
            runs, first = np.unique(hash_runs(hashes, length)[begins], return_index=True)
            yield length, (runs, offsets[begins[first]])


def _join(flat: list[str], lengths: list[int]) -> str:
    """Lay texts out one per line, their words separated by spaces."""
    lines, start = [], 0
    for length in lengths:
        lines.append(" ".join(flat[start : start + length]) + "\n")
        start += length
    return "".join(lines)


def _read(path: Path, field: str, problems: list[str]) -> list[str]:
    if path.suffix.casefold() not in (".txt", ".jsonl"):
        problems.append(f"{path}: expected a .txt file (one text) or a .jsonl file (one per line)")
        return []
    try:
        content = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        problems.append(f"{path} is not UTF-8 at byte offset {error.start}: expected text ({error.reason})")
        return []
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")
        return []
    if path.suffix.casefold() == ".txt":
        return [content]
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    return [text for number, line in lines for text in _field(f"{path}:{number}", line, field, problems)]


def _field(where: str, line: str, field: str, problems: list[str]) -> list[str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        problems.append(f"{where}: expected JSON, got {error}")
        return []
    if not isinstance(record, dict):
        problems.append(f"{where}: expected a JSON object, got {type(record).__name__}")
    elif field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        problems.append(f"{where}: has no field {field!r}{nearest(field, record)}; its fields: {fields}")
    elif not isinstance(record[field], str):
        problems.append(f"{where}: expected text in {field!r}, got {type(record[field]).__name__}")
    else:
        return [record[field]]
    return []
