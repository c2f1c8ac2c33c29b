"""Preference pairs by step, against rows made by hand in plain Python."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jinja2")

from styrax.core import UserError
from styrax.core.testing import check_iterator
from styrax.data import ByteTokenizer, Loader, to_grain, write_store
from styrax.data.chat import PreferenceData, build_preference_store

COUNT = 23
PAIRS = [
    {"prompt": f"p{i}:", "chosen": "c" * (1 + i % 7), "rejected": "r" * (1 + i % 4) + str(i)} for i in range(COUNT)
]
LONGEST = max(len((p["prompt"] + p[side]).encode()) + 1 for p in PAIRS for side in ("chosen", "rejected"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build_preference_store(PAIRS, tmp_path_factory.mktemp("pairs") / "s", ByteTokenizer())


def row_by_hand(pair, side, seq_len):
    ids = [*(pair["prompt"] + pair[side]).encode(), 256]
    loss = [0.0] * len(pair["prompt"]) + [1.0] * (len(ids) - len(pair["prompt"]))
    pad = seq_len - len(ids)
    return {
        "tokens": [256, *ids[:-1], *[257] * pad],
        "targets": [*ids, *[257] * pad],
        "loss_mask": [*loss, *[0.0] * pad],
        "segment_ids": [*[1] * len(ids), *[0] * pad],
        "positions": [*range(len(ids)), *[0] * pad],
    }


@settings(max_examples=50)
@given(
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 3),
    held_out=st.sampled_from([0.0, 0.01, 0.4]),
    max_epochs=st.sampled_from([None, 1, 3]),
    room=st.integers(0, 5),
    hosts=st.sampled_from([1, 2, 3]),
)
def test_rows_are_the_pairs_each_once_an_epoch(store, batch_size, seed, held_out, max_epochs, room, hosts):
    seq_len = LONGEST + room
    data = PreferenceData(
        store, seq_len=seq_len, batch_size=batch_size, seed=seed, held_out=held_out, max_epochs=max_epochs
    )
    steps = data.num_steps if max_epochs else math.ceil(3 * data.num_pairs / batch_size)
    named, seen = {f"records@{i}": pair for i, pair in enumerate(PAIRS)}, []
    for step in range(steps):
        batch, names = data.batch(step), data.pairs(step)
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == data.spec(step) == data.specs[0]
        seen += names
        for row, name in enumerate(names):
            for side in ("chosen", "rejected"):
                for part, expected in row_by_hand(named[name], side, seq_len).items():
                    assert batch[f"{side}_{part}"][row].tolist() == expected
        for side in ("chosen", "rejected"):  # rows after the end
            assert (
                not batch[f"{side}_loss_mask"][len(names) :].any()
                and not batch[f"{side}_segment_ids"][len(names) :].any()
            )
            assert (batch[f"{side}_targets"][len(names) :] == 257).all()
        cuts = [host * batch_size // hosts for host in range(hosts + 1)]
        parts = [data.batch(step, slice(low, high)) for low, high in pairwise(cuts)]
        for part, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([some[part] for some in parts]), array)
    count = data.num_pairs
    epochs = [seen[e * count : (e + 1) * count] for e in range(len(seen) // count)]
    held = {name for batch in range(len(data.held_out())) for name in held_names(data, batch, named)}
    assert len(epochs) == (max_epochs or 3) and len(seen) >= count * len(epochs)
    assert max_epochs is None or len(seen) == count * max_epochs
    for epoch in epochs:
        assert len(set(epoch)) == count and set(epoch) | held == set(named) and not set(epoch) & held
    assert len(epochs) == 1 or epochs[0] != epochs[1]


def held_names(data, index, named):
    """Find the pairs of a held-out batch by what is in them."""
    batch = data.held_out()[index]
    for row in np.flatnonzero(batch["chosen_segment_ids"][:, 0]):
        texts = [
            bytes(t for t in batch[f"{side}_targets"][row].tolist() if t < 256).decode()
            for side in ("chosen", "rejected")
        ]
        yield next(n for n, p in named.items() if [p["prompt"] + p[side] for side in ("chosen", "rejected")] == texts)


def test_held_out_pairs_are_the_same_for_every_seed(store):
    one, two = (PreferenceData(store, seq_len=LONGEST, batch_size=4, seed=seed, held_out=0.5) for seed in (0, 1))
    assert len(one.held_out()) == len(two.held_out()) == math.ceil((COUNT - one.num_pairs) / 4)
    for a, b in zip(one.held_out(), two.held_out()):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert len(PreferenceData(store, seq_len=99, batch_size=4, held_out=0.5, max_held_out_batches=1).held_out()) == 1
    assert len(PreferenceData(store, seq_len=99, batch_size=4, held_out=0).held_out()) == 0
    assert len(PreferenceData(store, seq_len=99, batch_size=4, held_out=1e-9).held_out()) == 1
    assert [batch["chosen_tokens"].shape for batch in one.held_out()[-1:]] == [(4, LONGEST)]
    with pytest.raises(IndexError):
        one.held_out()[99]


def test_pairs_that_are_too_long(store):
    too_long = [i for i, p in enumerate(PAIRS) if max(len(p["prompt"] + p[s]) for s in ("chosen", "rejected")) + 1 > 8]
    assert 0 < len(too_long) < COUNT
    with pytest.raises(
        UserError,
        match=rf"{len(too_long)} of {COUNT} pairs are longer than seq_len = 8; .*\({LONGEST}\).*seq_len of {LONGEST}",
    ):
        PreferenceData(store, seq_len=8, batch_size=2)
    data = PreferenceData(store, seq_len=8, batch_size=2, too_long="drop", held_out=0, max_epochs=1)
    assert data.num_dropped == len(too_long)
    names = {name for step in range(data.num_steps) for name in data.pairs(step)}
    assert names == {f"records@{i}" for i in range(COUNT) if i not in too_long}
    with pytest.raises(UserError, match="all 23 pairs are longer than seq_len = 2"):
        PreferenceData(store, seq_len=2, batch_size=2, too_long="drop")


def test_a_loader_over_pairs_conforms(store):
    def make(**changes):
        return PreferenceData(store, **{"seq_len": LONGEST, "batch_size": 3, "max_epochs": 2, **changes})

    check_iterator(lambda: make().loader(), batches=7)
    loader = make().loader(step=5)
    state = json.loads(json.dumps(loader.get_state()))
    fresh = make().loader()
    fresh.set_state(state)
    batch = next(fresh)
    for name, array in make().batch(5).items():
        np.testing.assert_array_equal(batch[name], array)
    other = make(seed=1, batch_size=4).loader()
    with pytest.raises(UserError, match=r"batch_size: saved with 3, now 4\n.*seed: saved with 0, now 1"):
        other.set_state(state)
    with pytest.raises(UserError, match=r"no setting 'sed' .did you mean 'seed'"):
        other.set_state(state, allow=["sed", "batch_size"])
    other.set_state(state, allow=["seed", "batch_size"])
    assert len(list(make().loader())) == make().num_steps
    np.testing.assert_array_equal(to_grain(make())[4]["rejected_targets"], make().batch(4)["rejected_targets"])


def test_a_sharding_over_the_batch(store):
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    data = PreferenceData(store, seq_len=LONGEST, batch_size=4)
    with Loader(data, sharding=NamedSharding(mesh, PartitionSpec("data"))) as loader:
        batch = next(loader)
    for name, array in data.batch(0).items():
        np.testing.assert_array_equal(np.asarray(batch[name]), array)


def test_mistakes_are_named(store, tmp_path):
    with pytest.raises(UserError) as caught:
        PreferenceData(store, seq_len=0, batch_size=0, held_out=1, max_epochs=0, too_long="cut")
    for part in ("seq_len = 0", "batch_size = 0", "held_out = 1", "max_epochs = 0", "too_long = 'cut'"):
        assert part in str(caught.value)
    data = PreferenceData(store, seq_len=LONGEST, batch_size=4, max_epochs=1)
    for step in (-1, data.num_steps):
        with pytest.raises(UserError, match=f"step {step}: expected 0 to {data.num_steps - 1}"):
            data.batch(step)
    for ids in (
        ["a", "b"],
        ["a#chosen", "b#rejected"],
        ["a#chosen", "a#rejected", "b#chosen"],
        ["a#rejected", "a#chosen"],
    ):
        other = write_store(tmp_path / str(ids), dict.fromkeys(ids, "x"), ByteTokenizer())
        with pytest.raises(UserError, match="holds no preference pairs"):
            PreferenceData(other, seq_len=9, batch_size=1)
    single = build_preference_store(PAIRS[:1], tmp_path / "one", "byte")
    with pytest.raises(UserError, match=r"held_out = 0.01 needs two pairs or more, got 1"):
        PreferenceData(single.path, seq_len=9, batch_size=1)
