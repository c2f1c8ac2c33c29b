"""Conformance of a `DataIterator`."""

import json
from collections.abc import Callable
from typing import Any

from styrax.core.testing.compare import assert_same

_LARGEST_STATE = 64 * 1024


def check_iterator(factory: Callable[[], Any], *, batches: int = 6) -> None:
    """Check that a data iterator can be stopped and resumed with no batch lost, repeated or changed.

    - two fresh iterators give the same batches;
    - `get_state` gives small JSON (64 KiB at most) that survives text, and asking for it changes nothing;
    - a state, set on a fresh iterator, gives exactly the batches that followed, at every step;
    - a state that was just set reads back equal;
    - `set_state` on an iterator that has moved on, forwards and backwards, works the same.

    Args:
        factory: Makes a fresh iterator of the same data at each call.
        batches: How many batches to look at; the data must have at least as many.

    Raises:
        AssertionError: The iterator breaks one of these.

    Example:
        >>> class Count:
        ...     n = 0
        ...     def __iter__(self): return self
        ...     def __next__(self): self.n += 1; return {"x": self.n}
        ...     def get_state(self): return {"n": self.n}
        ...     def set_state(self, state): self.n = state["n"]
        >>> check_iterator(Count)
    """
    iterator = factory()
    assert iter(iterator) is iterator, "iter(iterator) must give the iterator itself"
    states, expected = [_state(iterator, "at the start")], []
    for number in range(batches):
        expected.append(_next(iterator, f"batch {number}"))
        states.append(_state(iterator, f"after batch {number}"))
        again = _state(iterator, f"after batch {number}, asked twice")
        assert again == states[-1], f"get_state changed the state: {states[-1]} became {again}"

    second = factory()
    for number, batch in enumerate(expected):
        what = f"batch {number} of a second fresh iterator"
        assert_same(_next(second, what), batch, what)

    for start, state in enumerate(states):
        fresh = factory()
        _resume(fresh, state, expected[start:], f"a fresh iterator set to the state after {start} batches")
    for start in (0, batches // 2, batches - 1):
        _resume(iterator, states[start], expected[start:], f"the used iterator set back to after {start} batches")


def _resume(iterator: Any, state: str, expected: list[Any], what: str) -> None:
    iterator.set_state(json.loads(state))
    now = _state(iterator, what)
    assert now == state, f"{what}: reads back {now}, expected {state}"
    for number, batch in enumerate(expected):
        assert_same(_next(iterator, f"{what}, batch {number}"), batch, f"{what}, batch {number} from there")


def _next(iterator: Any, what: str) -> Any:
    try:
        # A copy: an iterator may hand out the same buffer again.
        return _copy(next(iterator))
    except StopIteration:
        raise AssertionError(f"{what}: the iterator ended; give data with more batches") from None


def _copy(batch: Any) -> Any:
    import jax
    import numpy as np

    return jax.tree.map(np.array, batch)


def _state(iterator: Any, what: str) -> str:
    state = iterator.get_state()
    try:
        text = json.dumps(state, sort_keys=True)
    except TypeError as error:
        raise AssertionError(f"{what}: get_state() must be plain JSON: {error}") from error
    assert json.loads(text) == state, f"{what}: the state changes on its way through JSON: {state}"
    assert len(text) <= _LARGEST_STATE, f"{what}: the state has {len(text)} bytes, at most {_LARGEST_STATE}"
    return text
