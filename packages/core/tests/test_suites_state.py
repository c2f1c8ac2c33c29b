"""The suite for iterators accepts a right one and refuses wrong ones, each for its own fault."""

import numpy as np
import pytest

from styrax.core import protocols
from styrax.core.testing import check_iterator


class Numbers:
    """A right iterator over ten batches."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.step == 10:
            raise StopIteration
        self.step += 1
        return {"x": np.arange(3) + self.step}

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


class ReusesItsBuffer(Numbers):
    """Allowed: every batch is the same array with new contents."""

    buffer = np.zeros(3, np.int64)

    def __next__(self):
        self.buffer[:] = super().__next__()["x"]
        return {"x": self.buffer}


class OffByOne(Numbers):
    def set_state(self, state):
        self.step = state["step"] + 1


class Forgets(Numbers):
    def __init__(self):
        super().__init__()
        self.hidden = 0

    def __next__(self):
        self.hidden += 1
        return {"x": super().__next__()["x"] * self.hidden}


class Drifts(Numbers):
    def get_state(self):
        self.step += 1
        return {"step": self.step - 1}


class NotJson(Numbers):
    def get_state(self):
        return {"step": np.int64(self.step)}


class Tuples(Numbers):
    def get_state(self):
        return {"step": (self.step,)}


class Large(Numbers):
    def get_state(self):
        return {"step": self.step, "buffer": [0] * 100_000}


class Short(Numbers):
    def __next__(self):
        if self.step == 3:
            raise StopIteration
        return super().__next__()


@pytest.mark.parametrize("good", [Numbers, ReusesItsBuffer])
def test_a_right_iterator(good):
    assert isinstance(good(), protocols.DataIterator)
    check_iterator(good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (OffByOne, "reads back"),
        (Forgets, "batch 0 from there"),
        (Drifts, "get_state changed the state"),
        (NotJson, "must be plain JSON"),
        (Tuples, "changes on its way through JSON"),
        (Large, "bytes, at most"),
        (Short, "the iterator ended"),
    ],
)
def test_a_wrong_iterator(bad, message):
    with pytest.raises(AssertionError, match=message):
        check_iterator(bad)
