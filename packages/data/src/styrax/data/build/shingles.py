"""The words of a text, and hashes of runs of words: the same on every machine, in every process, for ever."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt64

# Scripts that are written without spaces: Thai, Lao, Burmese, Khmer, kana, Han. A sentence is no word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
_UNSPACED += "\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
KEPT_WORDS = 1 << 18
KEPT_LENGTH = 40


def words(text: str) -> list[str]:
    r"""Cut a text into words: casefolded runs of letters, digits and underscores (`\w+`).

    In scripts that are written without spaces each character is a word. The case folding and the classes are
    Unicode's, which do not change once a character exists; all Pythons from 3.11 on know Unicode 14.

    Example:
        >>> words("It's a Test_1, größer: 日本語")
        ['it', 's', 'a', 'test_1', 'grösser', '日', '本', '語']
    """
    text = text.casefold()
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text)


class WordHashes(dict[str, int]):
    """Hashes words to 64 bits (blake2b of UTF-8, little endian), remembering those it has seen.

    The empty word, which no text has, stands for "nothing here" and is 0.

    Example:
        >>> import hashlib
        >>> digest = hashlib.blake2b(b"cat", digest_size=8, person=b"word").digest()
        >>> WordHashes()(["cat", ""]).tolist() == [int.from_bytes(digest, "little"), 0]
        True
    """

    def __missing__(self, word: str) -> int:
        if not word:
            return 0
        content = word.encode("utf-8", "surrogatepass")
        value = int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"word").digest(), "little")
        if len(word) <= KEPT_LENGTH:
            if len(self) >= KEPT_WORDS:
                self.clear()
            self[word] = value
        return value

    def __call__(self, words: Sequence[str]) -> UInt64[np.ndarray, " words"]:
        """Hash a list of words."""
        return np.fromiter(map(self.__getitem__, words), np.uint64, len(words))

    def __reduce__(self):
        return WordHashes, ()


def hash_runs(hashes: UInt64[np.ndarray, " words"], n: int) -> UInt64[np.ndarray, " runs"]:
    r"""Hash every run of `n` words, from the hashes $w_i$ of the words:

    $$s_i = \operatorname{mix}\Big(\sum_{j<n} w_{i+j} M^{n-1-j} \bmod 2^{64}\Big)$$

    Args:
        hashes: A hash for each word.
        n: Words in a run, from 1.

    Returns:
        One hash for each of the `max(words - n + 1, 0)` runs. M is 2^64 over the golden ratio, and mix the
        finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    count = max(len(hashes) - n + 1, 0)
    total = hashes[:count].copy()
    for j in range(1, n):
        total *= _MULTIPLIER
        total += hashes[j : j + count]
    return mix(total)


def mix(values: UInt64[np.ndarray, " *shape"]) -> UInt64[np.ndarray, " *shape"]:
    """Spread 64-bit values one to one so that every bit depends on every bit (splitmix64's finaliser).

    Example:
        >>> hex(mix(np.array([0x9E3779B97F4A7C15], np.uint64))[0])
        '0xe220a8397b1dcdaf'
    """
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def runs_within(
    lengths: Int64[np.ndarray, " docs"], n: int
) -> tuple[Int64[np.ndarray, " runs"], Int64[np.ndarray, " docs"]]:
    """Say where in documents laid end to end the runs of `n` words begin that stay in one document.

    Args:
        lengths: Words in each document.
        n: Words in a run.

    Returns:
        The beginnings, in order, and how many each document has.

    Example:
        >>> [array.tolist() for array in runs_within(np.array([3, 1, 2]), 2)]
        [[0, 1, 4], [2, 0, 1]]
    """
    counts = np.maximum(lengths - n + 1, 0)
    shift = (np.cumsum(lengths) - lengths) - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(counts.sum()), counts
