"""Near-duplicate documents: MinHash signatures, and those of them that agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.build.shingles import WordHashes, hash_runs, mix, runs_within, words

if TYPE_CHECKING:
    from jaxtyping import Bool, Int64, UInt32, UInt64

VERSION = 1
BLOCK_WORDS = 1 << 17
BLOCK_PAIRS = 1 << 15
GRID = 1000
NOTHING = 0xFFFFFFFF
_KEY = 0x73747972_61782D64_6174612D_6D683031  # of the permutations: "styrax-data-mh01", for ever


@dataclass(frozen=True, kw_only=True)
class MinHash:
    r"""How near-duplicates are found.

    A document is the set A of its shingles, runs of `ngram` words (a shorter document is one shingle). For
    each of K functions $h_k(x) = a_k x + b_k \bmod 2^{32}$ the signature holds $\min_{x \in A} h_k(x)$, so that

    $$\Pr[\min h_k(A) = \min h_k(B)] = J(A, B) = \frac{\#(A \cap B)}{\#(A \cup B)}$$

    and the share of places in which two signatures agree estimates J with variance J (1 - J) / K. Two
    documents are compared when all `rows` places of one of `bands` bands agree, which has the probability
    $P(s) = 1 - (1 - s^{rows})^{bands}$ at similarity s; bands and rows are those with the smallest
    $\int_0^t P + \int_t^1 (1 - P)$, t the threshold.

    Attributes:
        ngram: Words in a shingle.
        permutations: K, places in a signature.
        threshold: Documents whose signatures agree in this share of places or more are duplicates.

    Raises:
        UserError: Numbers out of range.

    Source:
        Broder 1997, "On the resemblance and containment of documents"; Indyk and Motwani 1998, "Approximate
        nearest neighbors"; Leskovec et al., "Mining of massive datasets", 3.4 (bands).

    Example:
        >>> minhash = MinHash(ngram=2)
        >>> texts = ["The cat sat on the mat.", "A dog lay by the door.", "the cat sat on the mat"]
        >>> minhash.duplicates(minhash.signatures(texts)).tolist()
        [False, False, True]
    """

    ngram: int = 5
    permutations: int = 128
    threshold: float = 0.8

    def __post_init__(self):
        problems = [
            f"{name} = {value}: expected {least} to {most}"
            for name, value, least, most in (
                ("ngram", self.ngram, 1, 1000),
                ("permutations", self.permutations, 1, 4096),
            )
            if not least <= value <= most
        ]
        if not 0 < self.threshold <= 1:
            problems.append(f"threshold = {self.threshold}: expected more than 0, and 1 or less")
        if problems:
            raise UserError("cannot look for near-duplicates:\n" + "\n".join(f"  - {line}" for line in problems))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides which documents are duplicates, as JSON."""
        return {"version": VERSION, **self.__getstate__(), "bands": self.bands, "rows": self.rows}

    @property
    def bands(self) -> int:
        """In how many bands a signature is cut."""
        return self._shape[0]

    @property
    def rows(self) -> int:
        """How many places a band has; `bands * rows` may leave the last places of a signature unused."""
        return self._shape[1]

    def signatures(self, texts: Iterable[str]) -> UInt32[np.ndarray, "docs permutations"]:
        """Compute the signatures of texts.

        Args:
            texts: One text per document; each signature depends on its own text alone.

        Returns:
            uint32, one row per text. A text without words has 2^32 - 1 everywhere and is no duplicate of
            anything.
        """
        blocks = [self._sign(flat, lengths) for flat, lengths in self._blocks(texts)]
        return np.concatenate([np.zeros((0, self.permutations), np.uint32), *blocks])

    def duplicates(self, signatures: UInt32[np.ndarray, "docs permutations"]) -> Bool[np.ndarray, " docs"]:
        """Find the documents to drop: all but the first of each cluster.

        Pairs that share a band and agree in `threshold` of all places are joined; a cluster is what is joined
        directly or through others. Two signatures of 0.9 meet in some band with probability `P(0.9)`: see the
        class.

        Args:
            signatures: Of all documents, in the order in which the first wins; may be a memory map, of which
                one copy of one band is held in memory.

        Returns:
            True for a document to drop.

        Raises:
            UserError: The signatures are not of this shape.
        """
        if signatures.ndim != 2 or signatures.shape[1] != self.permutations or signatures.dtype != np.uint32:
            raise UserError(
                f"signatures {signatures.dtype}{list(signatures.shape)}: expected uint32[docs, {self.permutations}], "
                f"as `signatures` of {self} gives them"
            )
        clusters = _Clusters(signatures, math.ceil(self.threshold * self.permutations - 1e-9))
        empty = np.flatnonzero(signatures[:, 0] == NOTHING)
        empty = empty[(signatures[empty] == NOTHING).all(axis=1)]
        docs = np.delete(np.arange(len(signatures)), empty)
        for band in range(self.bands):
            clusters.join(docs, self._keys(signatures, band)[docs])
        return clusters.roots() != np.arange(len(signatures))

    @cached_property
    def _shape(self) -> tuple[int, int]:
        return _bands_and_rows(self.threshold, self.permutations)

    @cached_property
    def _hashes(self) -> WordHashes:
        return WordHashes()

    @cached_property
    def _functions(self) -> list[tuple[np.uint32, np.uint32]]:
        # The raw stream of Philox is what numpy promises not to change.
        raw = np.random.Philox(key=_KEY).random_raw(2 * self.permutations) >> np.uint64(32)
        raw = raw.astype(np.uint32)
        return list(zip(raw[0::2] | np.uint32(1), raw[1::2]))

    def _blocks(self, texts: Iterable[str]) -> Iterator[tuple[list[str], list[int]]]:
        """Lay the words of some documents end to end; a short document is filled up with empty words."""
        flat: list[str] = []
        lengths: list[int] = []
        for text in texts:
            found = words(text)
            if 0 < len(found) < self.ngram:
                found += [""] * (self.ngram - len(found))
            flat += found
            lengths.append(len(found))
            if len(flat) + len(lengths) >= BLOCK_WORDS:
                yield flat, lengths
                flat, lengths = [], []
        if lengths:
            yield flat, lengths

    def _sign(self, flat: list[str], lengths: list[int]) -> np.ndarray:
        begins, counts = runs_within(np.array(lengths, np.int64), self.ngram)
        shingles = (hash_runs(self._hashes(flat), self.ngram)[begins] >> np.uint64(32)).astype(np.uint32)
        signatures = np.full((len(lengths), self.permutations), NOTHING, np.uint32)
        some = np.flatnonzero(counts)
        if len(some):
            edges = (np.cumsum(counts) - counts)[some]
            moved = np.empty_like(shingles)
            for k, (a, b) in enumerate(self._functions):
                np.multiply(shingles, a, out=moved)
                np.add(moved, b, out=moved)
                signatures[some, k] = np.minimum.reduceat(moved, edges)
        return signatures

    def _keys(self, signatures: np.ndarray, band: int) -> UInt64[np.ndarray, " docs"]:
        """Hash one band of each signature."""
        part = signatures[:, band * self.rows : (band + 1) * self.rows]
        keys = np.zeros(len(part), np.uint64)
        for row in range(part.shape[1]):
            keys = mix(keys + part[:, row])
        return keys


class _Clusters:
    """Documents joined into clusters, each known by its first document.

    Args:
        signatures: Of all documents.
        needed: Places in which two must agree.
    """

    def __init__(self, signatures: np.ndarray, needed: int):
        self._signatures = signatures
        self._needed = needed
        self._parent = np.arange(len(signatures))

    def roots(self, docs: Int64[np.ndarray, " some"] | None = None) -> Int64[np.ndarray, " some"]:
        """Give the first document of the cluster of each of some documents, or of all."""
        docs = np.arange(len(self._parent)) if docs is None else docs
        while True:
            above = self._parent[docs]
            top = self._parent[above]
            if (above == top).all():
                return above
            self._parent[docs] = top

    def join(self, docs: Int64[np.ndarray, " some"], keys: UInt64[np.ndarray, " some"]) -> None:
        """Join all pairs that have one key and agree, as far as they are not joined already."""
        sort = np.argsort(keys, kind="stable")
        order = docs[sort]
        begins = np.flatnonzero(np.concatenate([[True], np.diff(keys[sort]) != 0])[: len(order)])
        sizes = np.diff(np.concatenate([begins, [len(order)]]))
        # Each with the first of its bucket: all buckets at once, and mostly enough.
        self._join_pairs(np.repeat(order[begins], sizes), order)
        begins, sizes = begins[sizes > 2], sizes[sizes > 2]
        members = order[np.repeat(begins, sizes) + _count_up(sizes)]
        mixed = self.roots(members) != np.repeat(self.roots(order[begins]), sizes)
        for bucket in np.unique(np.repeat(np.arange(len(begins)), sizes)[mixed]).tolist():
            self._join_bucket(order[begins[bucket] : begins[bucket] + sizes[bucket]])

    def _join_bucket(self, members: Int64[np.ndarray, " members"]) -> None:
        """Walk from each cluster to what is outside it, so that no pair of one cluster is compared."""
        while len(members):
            roots = self.roots(members)
            inside = roots == roots[0]
            frontier, members = members[inside], members[~inside]
            while len(frontier) and len(members):
                step = max(1, BLOCK_PAIRS // len(members))
                now, frontier = frontier[:step], frontier[step:]
                self._join_pairs(np.repeat(now, len(members)), np.tile(members, len(now)))
                found = self.roots(members) == self.roots(now[:1])
                frontier, members = np.concatenate([frontier, members[found]]), members[~found]

    def _join_pairs(self, one: Int64[np.ndarray, " pairs"], other: Int64[np.ndarray, " pairs"]) -> None:
        """Join those of the pairs that agree."""
        apart = self.roots(one) != self.roots(other)
        one, other = one[apart], other[apart]
        agree = np.zeros(len(one), bool)
        for i in range(0, len(one), BLOCK_PAIRS):
            part = slice(i, i + BLOCK_PAIRS)
            same = self._signatures[one[part]] == self._signatures[other[part]]
            agree[part] = np.count_nonzero(same, axis=1) >= self._needed
        one, other = one[agree], other[agree]
        while len(one):
            # A root may stand in many pairs: it takes its smallest partner, and the rest come again.
            one, other = self.roots(one), self.roots(other)
            apart = one != other
            one, other = one[apart], other[apart]
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))


def _count_up(sizes: np.ndarray) -> np.ndarray:
    """Give 0, 1, 2, ... for each of some sizes: `[2, 3]` gives `[0, 1, 0, 1, 2]`."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _bands_and_rows(threshold: float, permutations: int) -> tuple[int, int]:
    """Choose bands and rows by the areas of both errors.

    Only products, differences and an exactly rounded sum are used, so that every machine chooses the same.
    """
    s = (np.arange(GRID) + 0.5) / GRID
    below = s < threshold
    best, least = (1, 1), math.inf
    row_agrees = np.ones(GRID)
    for rows in range(1, permutations + 1):
        row_agrees = row_agrees * s
        missed = np.ones(GRID)
        for bands in range(1, permutations // rows + 1):
            missed = missed * (1 - row_agrees)
            area = math.fsum(np.where(below, 1 - missed, missed).tolist())
            if area < least:
                best, least = (bands, rows), area
    return best
