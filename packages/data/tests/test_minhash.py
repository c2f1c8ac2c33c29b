import hashlib
import json
import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data.build import minhash as module
from styrax.data.build.minhash import MinHash
from styrax.data.build.shingles import WordHashes, hash_runs, runs_within, words

MASK = (1 << 64) - 1


# The definitions once more, in plain Python.


def slow_words(text):
    found, word = [], ""
    for char in text.casefold() + " ":
        if char.isalnum() or char == "_":
            word += char
        elif word:
            found.append(word)
            word = ""
    return found


def slow_hash_word(word):
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8, person=b"word").digest(), "little")


def slow_mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def slow_run(hashes):
    total = 0
    for value in hashes:
        total = (total * 0x9E3779B97F4A7C15 + value) & MASK
    return slow_mix(total)


def slow_shingles(text, n):
    found = slow_words(text)
    found += [""] * (n - len(found)) if found else []
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


def slow_signature(text, n, functions):
    shingles = slow_shingles(text, n)
    hashed = [slow_run([slow_hash_word(word) if word else 0 for word in shingle]) >> 32 for shingle in shingles]
    return [min(((a * x + b) % 2**32 for x in hashed), default=2**32 - 1) for a, b in functions]


def slow_functions(count):
    key = int.from_bytes(b"styrax-data-mh01", "big")
    raw = [int(value) >> 32 for value in np.random.Philox(key=key).random_raw(2 * count)]
    return [(raw[2 * k] | 1, raw[2 * k + 1]) for k in range(count)]


def slow_bands_and_rows(threshold, permutations, grid=400):
    def area(bands, rows):
        total = 0.0
        for i in range(grid):
            s = (i + 0.5) / grid
            meets = 1 - (1 - s**rows) ** bands
            total += meets if s < threshold else 1 - meets
        return total / grid

    shapes = [(b, r) for b in range(1, permutations + 1) for r in range(1, permutations // b + 1)]
    return area, shapes


def slow_duplicates(signatures, threshold, bands, rows):
    leader = list(range(len(signatures)))

    def find(i):
        while leader[i] != i:
            i = leader[i]
        return i

    for j, other in enumerate(signatures):
        for i, one in enumerate(signatures[:j]):
            if set(one) == {2**32 - 1} or set(other) == {2**32 - 1}:  # without words
                continue
            meet = any(one[b * rows : (b + 1) * rows] == other[b * rows : (b + 1) * rows] for b in range(bands))
            if meet and sum(x == y for x, y in zip(one, other, strict=True)) / len(one) >= threshold - 1e-12:
                low, high = sorted((find(i), find(j)))
                leader[high] = low
    return [find(i) != i for i in range(len(signatures))]


def jaccard(one, other):
    return len(one & other) / len(one | other)


def document(rng, length, vocabulary=5000):
    return [f"w{rng.randrange(vocabulary)}" for _ in range(length)]


@given(st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["M"]), max_size=60))
def test_words_are_runs_of_letters_and_digits(text):
    assert words(text) == slow_words(text)


def test_scripts_without_spaces_give_one_word_per_character():
    assert words("Tokyo東京,カナ") == ["tokyo", "東", "京", "カ", "ナ"]
    assert words("ภาษา") == list("ภาษา")
    assert words("한국어 글") == ["한국어", "글"]


@given(st.lists(st.text("abé", min_size=1, max_size=3), max_size=12), st.integers(1, 5))
def test_runs_are_hashed_as_written(found, n):
    hashes = WordHashes()(found)
    assert hashes.tolist() == [slow_hash_word(word) for word in found]
    expected = [slow_run(hashes[i : i + n].tolist()) for i in range(len(found) - n + 1)]
    assert hash_runs(hashes, n).tolist() == expected


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 4))
def test_runs_stay_within_their_document(lengths, n):
    begins, counts = runs_within(np.array(lengths, np.int64), n)
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    whole = [i for i in range(len(owner) - n + 1) if owner[i] == owner[i + n - 1]]
    assert begins.tolist() == whole
    assert counts.tolist() == [sum(owner[i] == k for i in whole) for k in range(len(lengths))]


def test_the_memory_of_word_hashes_is_bounded(monkeypatch):
    monkeypatch.setattr("styrax.data.build.shingles.KEPT_WORDS", 3)
    hashes, found = WordHashes(), [*"abcdefgabc", "x" * 100]
    assert hashes(found).tolist() == [slow_hash_word(word) for word in found]
    assert len(hashes) <= 3
    assert pickle.loads(pickle.dumps(hashes)) == {}


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.sampled_from(["a", "B", "ß", "c3", "...", ""]), max_size=9).map(" ".join), max_size=6),
    st.integers(1, 4),
    st.integers(1, 20),
)
def test_signatures_equal_the_slow_ones(texts, ngram, permutations):
    got = MinHash(ngram=ngram, permutations=permutations).signatures(texts)
    functions = slow_functions(permutations)
    assert got.dtype == np.uint32
    assert got.shape == (len(texts), permutations)
    assert got.tolist() == [slow_signature(text, ngram, functions) for text in texts]


def test_signatures_are_the_same_for_ever():
    got = MinHash().signatures(["The quick brown fox jumps over the lazy dog."])
    assert got[0, :4].tolist() == [2568438084, 529316596, 134512526, 252794556]
    assert hashlib.sha256(got.astype("<u4").tobytes()).hexdigest()[:16] == "fa4116079a70451f"


def test_a_signature_depends_on_its_own_text_alone(monkeypatch):
    rng = random.Random(1)
    texts = [" ".join(document(rng, length, 50)) for length in (0, 3, 40, 5, 0, 100, 4)]
    minhash = MinHash()
    whole = minhash.signatures(texts)
    monkeypatch.setattr(module, "BLOCK_WORDS", 7)
    np.testing.assert_array_equal(minhash.signatures(iter(texts)), whole)
    np.testing.assert_array_equal(np.concatenate([minhash.signatures([text]) for text in texts]), whole)
    assert minhash.signatures([]).shape == (0, 128)


def test_agreement_estimates_jaccard():
    """400 pairs: every estimate within 5 standard deviations, no bias, and the variance of the theory."""
    rng, texts, exact = random.Random(0), [], []
    for _ in range(400):
        sizes = [rng.choice([1, 2, 5, 30, 300]) for _ in range(3)]
        both, one, other = ([f"{rng.random()}".replace(".", "") for _ in range(size)] for size in sizes)
        texts += [" ".join(both + one), " ".join(both + other)]
        exact.append(jaccard(slow_shingles(texts[-2], 1), slow_shingles(texts[-1], 1)))
    signatures = MinHash(ngram=1).signatures(texts)
    estimates = (signatures[0::2] == signatures[1::2]).mean(axis=1)
    j = np.array(exact)
    z = (estimates - j) / np.sqrt(j * (1 - j) / 128)
    assert np.abs(z).max() < 5
    assert abs(z.mean()) < 4 / math.sqrt(len(z))
    assert 0.8 < z.std() < 1.2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40).map(" ".join), min_size=2, max_size=2))
def test_agreement_is_near_jaccard_for_any_documents(texts):
    j = jaccard(*(slow_shingles(text, 2) for text in texts))
    one, other = MinHash(ngram=2, permutations=1024).signatures(texts)
    # Hoeffding: a deviation of 0.12 has probability 2 exp(-2 * 1024 * 0.12^2) < 1e-12.
    assert abs((one == other).mean() - j) < 0.12


@pytest.mark.parametrize(
    ("threshold", "permutations"), [(0.8, 128), (0.5, 128), (0.9, 64), (0.7, 20), (1.0, 8), (0.05, 16), (0.3, 1)]
)
def test_bands_and_rows_have_the_smallest_error(threshold, permutations):
    minhash = MinHash(threshold=threshold, permutations=permutations)
    area, shapes = slow_bands_and_rows(threshold, permutations)
    assert (minhash.bands, minhash.rows) in shapes
    assert area(minhash.bands, minhash.rows) <= min(area(*shape) for shape in shapes) + 2e-3


def test_bands_and_rows_of_the_usual_settings():
    # Published by datasketch for the same thresholds, with equal weights.
    shapes = {t: (MinHash(threshold=t).bands, MinHash(threshold=t).rows) for t in (0.5, 0.8, 0.9)}
    assert shapes == {0.5: (25, 5), 0.8: (9, 13), 0.9: (5, 25)}


def test_planted_duplicates_are_found_and_others_are_not():
    rng, texts, planted = random.Random(3), [], []
    for i in range(60):
        base = document(rng, 204)  # 200 shingles
        texts.append(" ".join(base))
        if i % 3 == 0:  # one changed word in the middle: 195 shingles of 205
            copy = [*base[:100], "changed", *base[101:]]
        elif i % 3 == 1:  # 92 of 308 shingles
            copy = base[:96] + document(rng, 108)
        else:
            continue
        texts.append(" ".join(copy))
        j = jaccard(*(slow_shingles(text, 5) for text in texts[-2:]))
        assert j == pytest.approx(0.951 if i % 3 == 0 else 0.299, abs=2e-3)
        if i % 3 == 0:
            planted.append(len(texts) - 1)
    # Copies far away from their original, and one in other dress.
    texts += [texts[0], "  " + texts[1].upper().replace(" ", ", ") + "!"]
    planted += [len(texts) - 2, len(texts) - 1]
    minhash = MinHash()
    drop = minhash.duplicates(minhash.signatures(texts))
    assert drop.dtype == bool
    assert np.flatnonzero(drop).tolist() == planted


def test_the_first_in_order_wins_and_chains_are_clusters():
    rng = random.Random(4)
    base = document(rng, 1004)
    steps = [[*(f"x{k}" for k in range(i * 20)), *base[i * 20 :]] for i in range(12)]  # each near the next only
    texts = [" ".join(step) for step in steps]
    assert jaccard(slow_shingles(texts[0], 5), slow_shingles(texts[-1], 5)) < 0.7
    minhash = MinHash()
    for order in (list(range(12)), rng.sample(range(12), 12)):
        drop = minhash.duplicates(minhash.signatures(texts[i] for i in order))
        assert drop.tolist() == [False] + [True] * 11


def test_texts_without_words_are_no_duplicates():
    minhash = MinHash()
    assert not minhash.duplicates(minhash.signatures(["", "...", "", "!", "a"])).any()
    assert minhash.duplicates(minhash.signatures(["a", "A.", "a b", "b a"])).tolist() == [False, True, False, False]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_duplicates_equal_the_slow_ones(data):
    permutations = data.draw(st.integers(1, 12))
    threshold = data.draw(st.sampled_from([0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 1.0]))
    value = st.sampled_from([0, 1, 2, 2**32 - 1])
    signatures = data.draw(st.lists(st.lists(value, min_size=permutations, max_size=permutations), max_size=14))
    minhash = MinHash(permutations=permutations, threshold=threshold)
    got = minhash.duplicates(np.array(signatures, np.uint32).reshape(-1, permutations))
    assert got.tolist() == slow_duplicates(signatures, threshold, minhash.bands, minhash.rows)


def test_large_buckets_are_walked_in_blocks(monkeypatch, tmp_path):
    """Three interleaved families of drifting copies meet in one bucket; then the same from a memory map."""
    rng = np.random.default_rng(5)
    minhash = MinHash(permutations=16, threshold=0.75)
    signatures = rng.integers(0, 2**32, (3, 16), dtype=np.uint32)[np.arange(90) % 3]
    signatures[:, : minhash.rows] = 7
    places = rng.integers(minhash.rows, 16, (90, 3))
    signatures[np.arange(90)[:, None], places] = rng.integers(0, 4, (90, 3))
    expected = slow_duplicates(signatures.tolist(), 0.75, minhash.bands, minhash.rows)
    assert 3 <= expected.count(False) < 60
    assert minhash.duplicates(signatures).tolist() == expected
    monkeypatch.setattr(module, "BLOCK_PAIRS", 5)
    np.save(tmp_path / "s.npy", signatures)
    assert minhash.duplicates(np.load(tmp_path / "s.npy", mmap_mode="r")).tolist() == expected


def test_settings_are_json_and_survive_a_pickle():
    minhash = MinHash(ngram=3, threshold=0.9)
    expected = {"version": 1, "ngram": 3, "permutations": 128, "threshold": 0.9, "bands": 5, "rows": 25}
    assert json.loads(json.dumps(minhash.settings)) == expected
    signature = minhash.signatures(["one two three four"])
    again = pickle.loads(pickle.dumps(minhash))
    assert again == minhash
    np.testing.assert_array_equal(again.signatures(["one two three four"]), signature)


def test_all_wrong_numbers_at_once():
    with pytest.raises(UserError) as caught:
        MinHash(ngram=0, permutations=0, threshold=1.2)
    for part in ("ngram = 0: expected 1", "permutations = 0: expected 1", "threshold = 1.2: expected more than 0"):
        assert part in str(caught.value)
    for wrong in (np.zeros((2, 64), np.uint32), np.zeros((2, 128), np.int64), np.zeros(128, np.uint32)):
        with pytest.raises(UserError, match=r"expected uint32\[docs, 128\]"):
            MinHash().duplicates(wrong)
