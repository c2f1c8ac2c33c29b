"""Processes that agree: all stop at the same step, soon, whichever is asked to and however fast each is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.train.accord import MOST, Accord


class Member(Accord):
    """One of several processes in one: what is reduced lies on a board, by how often was asked."""

    def __init__(self, board, received, clock):
        super().__init__(None, received, clock)
        self.several, self._board, self._number = True, board, 0

    def _reduce(self, own):
        self._board.setdefault(self._number, []).append(own)
        answers, self._number = self._board[self._number], self._number + 1

        class Later:
            def __array__(self, dtype=None, copy=None):
                return np.concatenate(answers).max(axis=0)

        return Later()


@settings(max_examples=60)
@given(
    when=st.integers(0, 150),
    who=st.integers(0, 2),
    kind=st.sampled_from(["SIGTERM", "SIGINT", "wish"]),
    seconds=st.lists(st.sampled_from([0.001, 0.01, 0.3, 2.0]), min_size=3, max_size=3),
)
def test_all_stop_at_the_same_step(when, who, kind, seconds):
    board, heard, wishes, time = {}, [None] * 3, [None] * 3, [0.0] * 3
    members = [
        Member(board, lambda i=i: heard[i], lambda i=i: time[i]) for i in range(3)
    ]  # fmt: skip
    for step in range(1, when + 2 * MOST + 10):
        for i in range(3):
            time[i] += seconds[i]
        if step > when:
            if kind == "wish":
                wishes[who] = "enough"
            else:
                heard[who] = kind
        # All take part in a step before any can end the next one.
        for i, member in enumerate(members):
            member.turn(wishes[i])
        stops = [member.signal or member.wish(wishes[i]) for i, member in enumerate(members)]
        if any(stops):
            break
    assert all(stops)
    assert step > when
    # The slowest decides: about a second of its steps, and two for asking and reading.
    slowest = max(seconds)
    assert step - when <= max(1, int(1.0 / slowest)) + 3 + (1 if when == 0 else 0)
    if kind == "wish":
        assert stops[who] == "enough"
        assert {stops[i] for i in range(3) if i != who} == {"a hook of another process wished so"}
    else:
        assert stops == [kind] * 3


def test_one_process_hears_at_once_and_needs_no_one():
    heard = []
    accord = Accord(None, lambda: heard[0] if heard else None)
    accord.turn("enough")
    accord.check_alike(anything=1)
    assert accord.signal is None
    assert accord.wish("enough") == "enough"
    heard.append("SIGINT")
    assert accord.signal == "SIGINT"
