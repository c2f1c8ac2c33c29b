"""Whole-epoch packing against the textbook algorithm, piece by piece."""

from bisect import bisect_left, insort
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.data import ByteTokenizer, LMData, write_store
from styrax.data.plan.best_fit import best_fit_decreasing


def textbook(lengths, block):
    """Best-fit decreasing, one piece after another; gives the room left in each block."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else block
        insort(rooms, room - length)
    return rooms


@settings(max_examples=200)
@given(st.integers(1, 60).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(1, b), max_size=200))))
def test_the_blocks_are_those_of_the_textbook(drawn):
    block, lengths = drawn
    slots = best_fit_decreasing(np.array(lengths, np.int64), block)
    assert Counter(slots.length.tolist()) == Counter(lengths)
    row = slots.begin // block
    used = np.bincount(row, weights=slots.length, minlength=slots.num_blocks)
    assert sorted((block - used).astype(int).tolist()) == textbook(lengths, block)
    ends = slots.begin + slots.length
    assert (ends <= (row + 1) * block).all()
    assert (slots.begin[1:] >= ends[:-1]).all()


@pytest.fixture(scope="module")
def texts():
    lengths = np.random.default_rng(0).lognormal(3.5, 1.2, 300).astype(int) + 1
    return {f"{i:03d}": chr(65 + i % 26) * int(n) for i, n in enumerate(lengths)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory, texts):
    store = write_store(tmp_path_factory.mktemp("s") / "s", texts, ByteTokenizer())
    return LMData(store, seed=0, seq_len=256, batch_size=1, pack="best_fit", held_out=0.1)


@pytest.mark.parametrize("epoch", [0, 3])
def test_every_token_is_a_target_once_an_epoch(packed, epoch):
    seen = Counter()
    for step in range(epoch * packed.num_rows, (epoch + 1) * packed.num_rows):
        batch = packed.batch(step)
        for span in packed.provenance(step, 0):
            seen.update((span.index, place) for place in range(span.start, span.start + span.length))
            ids = packed.store[span.index][span.start : span.start + span.length]
            np.testing.assert_array_equal(batch["targets"][0, span.column : span.column + span.length], ids)
            # Only documents that are longer than a row are cut, and then at whole rows.
            assert span.start % 256 == 0
            assert span.length == min(256, len(packed.store[span.index]) - span.start)
    expected = {(i, place) for i in packed.train_documents.tolist() for place in range(len(packed.store[i]))}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_epochs_are_different_and_fixed(packed):
    def rows(epoch):
        first = epoch * packed.num_rows
        return [tuple(s.document for s in packed.provenance(first + i, 0)) for i in range(packed.num_rows)]

    one, other = rows(0), rows(1)
    assert one != other
    assert {frozenset(row) for row in one} != {frozenset(row) for row in other}, "the same documents meet again"
    assert rows(0) == one


def test_the_contract_holds(packed):
    for step in range(packed.num_rows):
        batch = packed.batch(step)
        segments, mask = batch["segment_ids"][0], batch["loss_mask"][0]
        np.testing.assert_array_equal(mask, segments > 0)
        assert (np.diff(segments[segments > 0]) >= 0).all()
        inside = np.flatnonzero(segments[1:] == segments[:-1])
        inside = inside[segments[inside] > 0]
        np.testing.assert_array_equal(batch["tokens"][0][inside + 1], batch["targets"][0][inside])
        np.testing.assert_array_equal(batch["positions"][0][inside + 1], batch["positions"][0][inside] + 1)


def test_held_out_documents_are_packed_too(packed, texts):
    batches = packed.held_out()
    count = sum(int(batch["loss_mask"].sum()) for batch in batches)
    assert count == sum(len(texts[packed.store.ids[i]]) + 1 for i in packed.held_out_documents)


@pytest.mark.slow
@pytest.mark.parametrize(("pack", "most"), [("concat", 1e-3), ("best_fit", 1e-3)])
def test_the_standard_library_is_read_once_an_epoch_with_little_padding(tmp_path_factory, pack, most):
    from styrax.data import build_store

    store = build_store(["python:stdlib"], tmp_path_factory.mktemp("stdlib") / "s", tokenizer="bpe:1024")
    data = LMData(store, seq_len=2048, batch_size=1, pack=pack, held_out=0)
    for epoch in range(3):
        change = np.zeros(store.num_tokens + 1, np.int64)
        padding = 0
        for step in range(epoch * data.num_rows, (epoch + 1) * data.num_rows):
            spans = data.provenance(step, 0)
            for span in spans:
                start = store.docs["start"][span.index] + span.start
                change[start] += 1
                change[start + span.length] -= 1
            padding += 2048 - sum(span.length for span in spans)
        assert (np.cumsum(change)[:-1] == 1).all(), "every token once, and its document's end"
        assert padding <= most * data.num_rows * 2048
