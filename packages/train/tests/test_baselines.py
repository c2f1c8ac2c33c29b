import gzip
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.train.baselines import Bigram, counted_pairs, gzip_bits_per_byte

PAIRS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=0, max_size=60)


def slow_kneser_ney(pairs, vocab, u, w):
    """The equations, from dictionaries."""
    count = Counter(pairs)
    ones, twos = (sum(c == n for c in count.values()) for n in (1, 2))
    d = ones / (ones + 2 * twos) if ones and twos else 0.5
    ends = Counter(b for _, b in count)
    kinds = len(count)
    lower = 1 / vocab if not kinds else max(ends[w] - d, 0) / kinds + d * len(ends) / kinds / vocab
    total = sum(c for (a, _), c in count.items() if a == u)
    if not total:
        return lower
    starts = sum(a == u for a, _ in count)
    return (max(count[u, w] - d, 0) + d * starts * lower) / total


@settings(max_examples=60, deadline=None)
@given(PAIRS)
def test_bigram_is_a_distribution_and_follows_the_equations(pairs):
    model = Bigram(5)
    for part in (pairs[:20], pairs[20:]):
        model.update(np.array([a for a, _ in part], int), np.array([b for _, b in part], int))
    for u in range(5):
        got = model.probability(np.full(5, u), np.arange(5))
        np.testing.assert_allclose(got, [slow_kneser_ney(pairs, 5, u, w) for w in range(5)], rtol=1e-12)
        assert got.sum() == pytest.approx(1)


def test_bits_per_byte_counts_only_what_carries_loss():
    batch = {
        "tokens": np.array([[0, 1, 1]]),
        "targets": np.array([[1, 1, 0]]),
        "loss_mask": np.array([[1.0, 1.0, 0.0]]),
    }
    assert [x.tolist() for x in counted_pairs(batch)] == [[0, 1], [1, 1]]
    assert Bigram(4).bits_per_byte([batch], np.array([1, 2, 1, 1])) == pytest.approx(2 * math.log2(4) / 4)


def test_gzip_is_gzip():
    text = b"def f(x):\n    return x\n" * 50
    assert gzip_bits_per_byte(text) == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text))
