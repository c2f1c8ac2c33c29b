import pickle

import grain
import numpy as np
import pytest

from styrax.core.testing import check_iterator
from styrax.data import LMData, to_grain


@pytest.fixture(scope="module")
def data(store):
    return LMData(store, seed=0, seq_len=32, batch_size=4, held_out=0.1)


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def test_elements_are_steps(data):
    dataset = to_grain(data)
    for step in (0, 5, 1000):
        same(dataset[step], data.batch(step))
    assert len(to_grain(data, steps=7)) == 7
    assert [int(b["tokens"].sum()) for b in to_grain(data, steps=3)] == [
        int(data.batch(step)["tokens"].sum()) for step in range(3)
    ]


def test_grains_own_iterators_and_state(data):
    iterator = iter(to_grain(data).map(lambda batch: {**batch, "twice": 2 * batch["tokens"]}).to_iter_dataset(OPTIONS))
    for step in range(3):
        same({"twice": next(iterator)["twice"]}, {"twice": 2 * data.batch(step)["tokens"]})
    state = iterator.get_state()
    expected = next(iterator)
    iterator.set_state(state)
    same(next(iterator), expected)
    iterator.close()


def test_conformance_of_grains_iterator(data):
    check_iterator(lambda: iter(to_grain(data).to_iter_dataset(OPTIONS)), batches=3)


def test_a_dataset_can_go_to_another_process(data):
    data.batch(0)
    other = pickle.loads(pickle.dumps(data))
    same(other.batch(17), data.batch(17))
    assert other.fingerprint == data.fingerprint


@pytest.mark.slow
def test_workers(data, run_python):
    code = f"""
        import grain, numpy as np
        from absl import flags
        from styrax.data import LMData, to_grain
        if __name__ == "__main__":
            flags.FLAGS.mark_as_parsed()
            data = LMData({str(data.store.path)!r}, seed=0, seq_len=32, batch_size=4, held_out=0.1)
            dataset = to_grain(data, steps=6).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            batches = list(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
            assert len(batches) == 6
            for step, batch in enumerate(batches):
                np.testing.assert_array_equal(batch["tokens"], data.batch(step)["tokens"])
    """
    run_python(code)
