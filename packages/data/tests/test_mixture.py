"""Mixtures and schedules as batches: exactly once, in any slices, through every kind of change."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data import ByteTokenizer, LMData, Mixture, train_bpe, write_store


def write(folder, name, count, longest, seed):
    rng = np.random.default_rng(seed)
    texts = {f"{name}/{i}": name * int(rng.integers(1, longest)) for i in range(count)}
    return write_store(folder / name, texts, ByteTokenizer())


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {"a": write(folder, "a", 40, 90, 0), "b": write(folder, "b", 25, 200, 1), "c": write(folder, "c", 9, 30, 2)}


BASE = {"seed": 0, "seq_len": 32, "batch_size": 8, "held_out": 0.1}


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def places(data, steps):
    """Count how often each place of each document was a target."""
    seen = Counter()
    for step in steps:
        for row in range(data.shape(step)[0]):
            for span in data.provenance(step, row):
                seen.update((span.source, span.index, span.start + i) for i in range(span.length))
    return seen


@settings(max_examples=40)
@given(
    seed=st.integers(0, 3),
    pack=st.sampled_from(["concat", "best_fit", "none"]),
    sizes=st.sampled_from([8, [(0, 4), (3, 8), (9, 16)]]),
    widths=st.sampled_from([32, [(0, 16), (4, 32)], [(0, 8), (2, 24), (5, 20)]]),
    weights=st.sampled_from(
        [{"a": 1, "b": 1}, [(0, {"a": 0.9, "b": 0.1}), (6, {"b": 0.2, "c": 0.8})], {"c": 1, "a": 1e-6}]
    ),
    interpolate=st.sampled_from(["hold", "linear"]),
    step=st.integers(0, 40),
    hosts=st.sampled_from([1, 2, 4, 8]),
)
def test_hosts_make_their_rows_of_one_batch(stores, seed, pack, sizes, widths, weights, interpolate, step, hosts):
    def make():
        mixture = Mixture(stores, weights, interpolate=interpolate)
        return LMData(mixture, seed=seed, pack=pack, batch_size=sizes, seq_len=widths, held_out=0.1)

    whole = make().batch(step)
    rows = make().shape(step)[0]
    parts = [make().batch(step, slice(h * rows // hosts, (h + 1) * rows // hosts)) for h in range(hosts)]
    same(whole, {name: np.concatenate([part[name] for part in parts]) for name in whole})
    # The tokens are those of the documents that provenance names.
    data = make()
    for row in range(rows):
        for span in data.provenance(step, row):
            ids = stores[span.source][span.index][span.start : span.start + span.length]
            np.testing.assert_array_equal(whole["targets"][row, span.column : span.column + span.length], ids)
            assert span.document == stores[span.source].ids[span.index]


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
@pytest.mark.parametrize("widths", [32, [(0, 16), (5, 32), (9, 24)]])
def test_every_source_is_read_once_an_epoch(stores, pack, widths):
    data = LMData(Mixture(stores, {"a": 1, "b": 3, "c": 0.1}), pack=pack, **{**BASE, "seq_len": widths})
    steps, length = 60, {name: line.targets for name, line in zip(stores, data.lines)}
    seen = places(data, range(steps))
    for number, name in enumerate(stores):
        epochs = data.epochs(steps)[name]
        counts = Counter({key: n for key, n in seen.items() if key[0] == name})
        if epochs >= 1:
            assert len(counts) == length[name]
        # No place is ahead of another by more than the epoch that is under way.
        assert set(counts.values()) <= {int(epochs), int(epochs) + 1}
        assert data.lines[number].places == data.lines[number].num_blocks * 32


def test_the_realised_mixture_is_the_target(stores):
    points = [(0, {"a": 0.8, "b": 0.2}), (1000, {"a": 0.2, "b": 0.5, "c": 0.3})]
    data = LMData(Mixture(stores, points, interpolate="linear"), **{**BASE, "batch_size": 64})
    rows = Counter()
    for step in range(1000):
        rows.update(data.sources_of(step))
    for name, low, high in (("a", 0.8, 0.2), ("b", 0.2, 0.5), ("c", 0.0, 0.3)):
        target = np.mean([low + (high - low) * step / 1000 for step in range(1000)])
        assert abs(rows[name] / 64000 - target) < 1e-3


def test_a_limit_gives_each_document_so_often_and_then_ends(stores):
    mixture = Mixture(stores, {"a": 5, "b": 1, "c": 1}, max_epochs={"a": 2, "b": 1, "c": 3})
    data = LMData(mixture, **BASE)
    seen = places(data, range(data.num_steps))
    for number, (name, times) in enumerate((("a", 2), ("b", 1), ("c", 3))):
        counts = [n for key, n in seen.items() if key[0] == name]
        assert len(counts) == data.lines[number].targets
        assert set(counts) == {times}
    last = data.batch(data.num_steps - 1)
    assert last["tokens"].shape == (8, 32)
    with pytest.raises(UserError, match=f"step {data.num_steps}: the data end after"):
        data.batch(data.num_steps)
    for prefetch in (0, 3):
        with data.loader(prefetch=prefetch) as loader:
            batches = list(loader)
            assert len(batches) == data.num_steps
            assert list(loader) == []
            same(batches[-1], last)


def test_one_epoch_of_one_store(stores):
    data = LMData(stores["b"], max_epochs=1, **BASE)
    seen = places(data, range(data.num_steps))
    assert set(seen.values()) == {1}
    assert len(seen) == data.num_tokens


def test_skipped_steps_are_left_out(stores):
    plain, skipping = LMData(stores["a"], **BASE), LMData(stores["a"], skip_steps=[(5, 9), (2, 3)], **BASE)
    read = [0, 1, 3, 4, 9, 10, 11]
    for step, data_step in enumerate(read):
        same(skipping.batch(step), plain.batch(data_step))
    # A schedule counts the steps that were left out too.
    sized = LMData(stores["a"], skip_steps=[(5, 9)], **{**BASE, "batch_size": [(0, 2), (9, 4)]})
    assert [sized.shape(step)[0] for step in (4, 5)] == [2, 4]


def edited(stores, step, **changes):
    """The same run with a mixture that changes at a step."""
    points = [(0, {"a": 0.7, "b": 0.3}), (step, {"b": 0.5, "c": 0.5})]
    return LMData(Mixture(stores, points), **{**BASE, **changes})


def test_an_edit_of_the_mixture_neither_repeats_nor_leaves_out(stores):
    first = {name: stores[name] for name in ("a", "b")}
    before = LMData(Mixture(first, {"a": 0.7, "b": 0.3}), **BASE)
    for step in (1, 7, 19):
        with before.loader() as loader:
            for _ in range(step):
                next(loader)
            state = json.loads(json.dumps(loader.get_state()))
        after = edited(stores, step)
        with after.loader() as loader:
            with pytest.raises(UserError, match=r"mixture: saved with .*'a': 0.7"):
                loader.set_state(state)
            loader.set_state(state, allow=["mixture"])
            same(next(loader), after.batch(step))
        for earlier in range(step):
            same(after.batch(earlier), before.batch(earlier))
        seen = places(after, range(step + 30))
        for name in ("b", "c"):
            epochs = after.epochs(step + 30)[name]
            assert {n for key, n in seen.items() if key[0] == name} <= {int(epochs), int(epochs) + 1}


def test_an_edit_that_reaches_back_is_refused(stores):
    before = LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **BASE)
    state = {**before.loader(step=10).get_state()}
    cases = [
        (edited(stores, 9), ["mixture"], "mixture: the change reaches back before step 10"),
        (LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **{**BASE, "batch_size": 4}), ["batch_size"], "reaches back"),
        (
            LMData(Mixture({"b": stores["b"], "c": stores["c"]}, {"b": 1}), **BASE),
            ["mixture"],
            "source 'a' was read before step 10, and it is gone",
        ),
        (
            LMData(Mixture({**stores, "a": stores["c"]}, {"a": 0.7, "b": 0.3}), **BASE),
            ["mixture"],
            "source 'a' was read before step 10, and it is another store",
        ),
        (
            LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), skip_steps=[(9, 12)], **BASE),
            ["skip_steps"],
            "skip_steps: the change reaches back before step 10; leave out data steps from 10 on",
        ),
        (
            LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **{**BASE, "seed": 1}),
            ["sed"],
            "no setting 'sed'.*did you mean",
        ),
    ]
    for after, allow, part in cases:
        with pytest.raises(UserError, match=part):
            after.loader().set_state(state, allow=allow)


def test_named_changes_go_on(stores):
    before = LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **BASE)
    state = before.loader(step=10).get_state()
    for allow, changed in [
        (["mixture"], edited(stores, 10)),
        (["batch_size"], LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **{**BASE, "batch_size": [(0, 8), (10, 16)]})),
        (["seq_len"], LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **{**BASE, "seq_len": [(0, 32), (12, 16)]})),
        (["skip_steps"], LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), skip_steps=[(10, 14)], **BASE)),
        (["seed"], LMData(Mixture(stores, {"a": 0.7, "b": 0.3}), **{**BASE, "seed": 1})),
        (["mixture", "batch_size"], edited(stores, 11, batch_size=[(0, 8), (10, 2)])),
    ]:
        loader = changed.loader()
        loader.set_state(state, allow=allow)
        same(next(loader), changed.batch(10))
        loader.close()


def test_metrics_of_a_step(stores):
    data = LMData(Mixture(stores, {"a": 1, "b": 1}), pack="none", **BASE)
    found, batch = data.metrics(3), data.batch(3)
    assert found["pad_fraction"] == pytest.approx(1 - batch["loss_mask"].mean())
    assert found["tokens/a"] + found["tokens/b"] == batch["loss_mask"].sum()
    assert found["tokens/c"] == found["epoch/c"] == 0
    assert found["epoch/a"] == pytest.approx(4 * 3 / data.lines[0].num_blocks)


def test_held_out_batches_stand_for_all_sources(stores):
    data = LMData(Mixture(stores, {"a": 1}), **{**BASE, "held_out": 0.3, "batch_size": 4})
    batches = list(data.held_out())
    letters = {chr(t) for batch in batches for t in np.unique(batch["targets"][batch["loss_mask"] > 0]) if t < 256}
    assert letters == {"a", "b", "c"}
    text = data.held_out_text()
    assert len(text) == sum(int(data.stores[i].docs["bytes"][docs].sum()) for i, docs in enumerate(data._held))


def test_mistakes_are_all_named(stores, tmp_path):
    with pytest.raises(UserError) as caught:
        Mixture(stores, [(1, {"a": 1}), (0, {"x": 1})], interpolate="cubic", max_epochs={"d": 1, "a": 0})
    for part in ("begin with 0", "no source 'x'", "interpolate = 'cubic'", "no source 'd'", "max_epochs of 'a' = 0"):
        assert part in str(caught.value)
    other = write_store(tmp_path / "bpe", {"x": "abc"}, train_bpe(["abc"], 258))
    with pytest.raises(UserError, match="different tokenizers"):
        Mixture({"a": stores["a"], "x": other})
    with pytest.raises(UserError, match="a source or more"):
        Mixture({})
    with pytest.raises(UserError, match="max_epochs: a mixture has its own"):
        LMData(Mixture(stores), max_epochs=1, **BASE)
