"""Records by step, against a loop in plain Python."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.core.testing import check_iterator
from styrax.data import ArrayData, Loader


def plus_one(record):
    return {**record, "x": record["x"] + 1}


def noise(record, rng):
    return {**record, "noise": rng.normal(size=3).astype(np.float32)}


def columns(n):
    return {"x": np.arange(n * 4).reshape(n, 4).astype(np.float32), "label": np.arange(n)}


@given(
    n=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    hosts=st.sampled_from([1, 2, 3]),
    step=st.integers(0, 20),
)
def test_rows_are_the_records_in_order(n, batch_size, seed, shuffle, hosts, step):
    data = ArrayData(columns(n), batch_size=batch_size, seed=seed, shuffle=shuffle).map(plus_one)
    batch = data.batch(step)
    for row, (index, epoch) in enumerate(data.indices(step)):
        assert epoch == (step * batch_size + row) // n
        np.testing.assert_array_equal(batch["x"][row], columns(n)["x"][index] + 1)
        assert batch["label"][row] == index
        assert shuffle or index == (step * batch_size + row) % n
    cuts = [host * batch_size // hosts for host in range(hosts + 1)]
    parts = [data.batch(step, slice(low, high)) for low, high in itertools.pairwise(cuts)]
    for name, array in batch.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
        assert all(part[name].dtype == array.dtype for part in parts)


def test_every_record_once_an_epoch_in_new_orders():
    data = ArrayData(columns(12), batch_size=5)
    orders = []
    for epoch in range(3):
        rows = [place for step in range(12) for place in data.indices(step) if place[1] == epoch]
        orders.append([index for index, _ in rows])
        assert sorted(orders[-1]) == list(range(12))
    assert len({tuple(order) for order in orders}) == 3


def test_random_transforms_are_a_function_of_seed_epoch_and_record():
    def drawn(seed, steps=8):
        data = ArrayData(columns(8), batch_size=4, seed=seed).random_map(noise)
        return {
            place: tuple(data.batch(step)["noise"][row].tolist())
            for step in range(steps)
            for row, place in enumerate(data.indices(step))
        }

    one = drawn(0)
    assert one == drawn(0)
    assert len(set(one.values())) == len(one) == 32, "epochs and records draw their own numbers"
    assert not set(one.values()) & set(drawn(1).values())


def test_the_last_batch_is_padded_and_masked():
    data = ArrayData(columns(10), batch_size=4, max_epochs=1, shuffle=False)
    batches = list(data.loader())
    assert len(batches) == data.num_steps == 3
    kept = np.concatenate([batch["label"][batch["mask"] > 0] for batch in batches])
    np.testing.assert_array_equal(kept, np.arange(10))
    assert {batch["x"].shape for batch in batches} == {(4, 4)}
    with pytest.raises(UserError, match="step 3: expected 0 to 2"):
        data.batch(3)


def test_a_loader_over_records_conforms():
    data = ArrayData(columns(9), batch_size=2).random_map(noise)
    check_iterator(lambda: data.loader(), batches=7)
    loader = data.loader(step=5)
    state = json.loads(json.dumps(loader.get_state()))
    fresh = ArrayData(columns(9), batch_size=2).random_map(noise).loader()
    fresh.set_state(state)
    np.testing.assert_array_equal(next(fresh)["noise"], data.batch(5)["noise"])
    other = ArrayData({**columns(9), "label": np.zeros(9)}, batch_size=2, seed=1).loader()
    with pytest.raises(UserError) as caught:
        other.set_state(state)
    for part in ("source: saved with", "seed: saved with 0, now 1", "transforms: saved with ['random_map"):
        assert part in str(caught.value)
    other.set_state(state, allow=["source", "seed", "transforms"])


def test_a_sharding_over_the_batch():
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    data = ArrayData(columns(9), batch_size=4)
    with Loader(data, sharding=NamedSharding(mesh, PartitionSpec("data"))) as loader:
        batch = next(loader)
    for name, array in data.batch(0).items():
        np.testing.assert_array_equal(np.asarray(batch[name]), array)


def test_a_grain_dataset_can_be_the_source():
    import grain

    source = grain.MapDataset.source(list(range(20))).map(lambda i: {"value": np.int64(i * i)})
    data = ArrayData(source, batch_size=6, shuffle=False)
    assert data.batch(1)["value"].tolist() == [i * i for i in range(6, 12)]
    assert data.batch(3)["value"].tolist() == [i % 20 * (i % 20) for i in range(18, 24)]
    # The same pipeline made again has the same fingerprint, another has another.
    again, other = (
        ArrayData(
            grain.MapDataset.source(list(range(20))).map(lambda i, k=k: {"value": np.int64(i * i + k)}), batch_size=6
        )
        for k in (0, 1)
    )
    assert again.settings["source"] == data.settings["source"] != other.settings["source"]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (
            lambda: ArrayData({"a": np.zeros(3), "b": np.zeros(4)}, batch_size=1),
            r"one first dimension, got \{'a': 3, 'b': 4\}",
        ),
        (lambda: ArrayData({}, batch_size=1), "one first dimension, got none"),
        (lambda: ArrayData({"a": np.zeros(0)}, batch_size=1), "no records"),
        (lambda: ArrayData(columns(3), batch_size=0), "batch_size = 0"),
        (lambda: ArrayData(columns(3), batch_size=1, max_epochs=0), "max_epochs = 0"),
        (lambda: ArrayData(columns(3), batch_size=1).map(lambda r: None).batch(0), "gave NoneType for record"),
        (lambda: ArrayData([{"a": [1]}, {"a": [1, 2]}], batch_size=2).batch(0), "'a' has different shapes"),
        (lambda: ArrayData([{"a": 1}, {"b": 1}], batch_size=2).batch(0), "records with other names"),
        (lambda: ArrayData(columns(3), batch_size=1).batch(-1), "step -1"),
        (lambda: ArrayData([{"mask": 1}], batch_size=1, max_epochs=1).batch(0), "has the name 'mask'"),
    ],
)
def test_mistakes_are_named(make, part):
    with pytest.raises(UserError, match=part):
        make()
