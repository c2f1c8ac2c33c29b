"""Which source and place each row has, against a simulation row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data.plan.skips import Skips
from styrax.data.plan.timeline import ONE, Timeline, parse_points, quantise, ramp


def value_at(points, step):
    return [value for first, value in points if first <= step][-1]


def without(weights, source):
    """Share a source's weight out among the others, as cumulative parts rounded down."""
    kept = [0 if i == source else int(w) for i, w in enumerate(weights)]
    total = sum(kept)
    if total == 0:
        return None
    sums = [sum(kept[: i + 1]) * ONE // total for i in range(len(kept))]
    return [high - low for low, high in zip([0, *sums], sums)]


def simulate(batch, width, weights, limits, steps):
    """Go through all rows, one after another; lists (source, place) for each row of each step."""
    sources = len(weights[0][1])
    owed, due, used, queue = [0] * sources, [0] * sources, [0] * sources, []
    dropped, ended, out = [], False, []
    for step in range(steps):
        rows, columns = [], value_at(width, step)
        for _ in range(value_at(batch, step)):
            while not ended:
                now = [int(w) for w in value_at(weights, step)]
                for source in dropped:
                    now = without(now, source)
                    if now is None:
                        break
                if now is None:
                    ended = True
                    break
                over = [
                    i
                    for i, limit in enumerate(limits)
                    if limit is not None and due[i] == -(-limit // columns) and owed[i] + now[i] > due[i] * ONE
                ]
                if not over:
                    break
                dropped.append(over[0])
            if not ended:
                for i in range(sources):
                    owed[i] += now[i]
                    if owed[i] > due[i] * ONE:
                        queue.append(i)
                        due[i] += 1
            if not queue:
                rows.append((-1, 0))
                continue
            source = queue.pop(0)
            rows.append((source, used[source]))
            used[source] += columns
        out.append(rows)
    return out


def points(values):
    """Draw a schedule: values from rising steps on, the first 0."""
    return st.lists(st.tuples(st.integers(1, 7), values), max_size=3).flatmap(
        lambda later: values.map(
            lambda first: [(0, first), *((sum(gap for gap, _ in later[: i + 1]), v) for i, (_, v) in enumerate(later))]
        )
    )


def drawn_weights(sources):
    one = st.sampled_from([0.0, 0.0, 1e-9, 0.3, 1.0, 1.0, 7.0, 1e6])
    return st.lists(one, min_size=sources, max_size=sources).filter(any)


@settings(max_examples=150)
@given(data=st.data())
def test_rows_are_those_of_the_simulation(data):
    sources = data.draw(st.integers(1, 5))
    names = [str(i) for i in range(sources)]
    batch = data.draw(points(st.integers(1, 9)))
    width = data.draw(points(st.integers(1, 6)))
    weights = [(s, quantise(dict(zip(names, w)), names)) for s, w in data.draw(points(drawn_weights(sources)))]
    timeline = Timeline(batch, width, weights, [None] * sources)
    expected = simulate(batch, width, weights, [None] * sources, 30)
    for step in data.draw(st.permutations(range(30)))[:12]:
        rows = timeline.rows(step)
        assert list(zip(rows.source.tolist(), rows.place.tolist())) == expected[step]
        assert rows.width == value_at(width, step)
        assert timeline.batch_size(step) == value_at(batch, step)
        before = [row for earlier in expected[:step] for row in earlier]
        count, _ = timeline.before(step)
        assert count.tolist() == [sum(source == i for source, _ in before) for i in range(sources)]


@settings(max_examples=100)
@given(data=st.data())
def test_limits_are_those_of_the_simulation(data):
    sources = data.draw(st.integers(1, 4))
    names = [str(i) for i in range(sources)]
    batch, width = data.draw(points(st.integers(1, 9))), [(0, data.draw(st.integers(1, 6)))]
    weights = [(s, quantise(dict(zip(names, w)), names)) for s, w in data.draw(points(drawn_weights(sources)))]
    limits = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=sources, max_size=sources))
    timeline = Timeline(batch, width, weights, limits)
    expected = simulate(batch, width, weights, limits, 40)
    got = [list(zip(*(a.tolist() for a in (rows.source, rows.place)))) for rows in map(timeline.rows, range(40))]
    assert got == expected
    flat = [source for rows in expected for source, _ in rows]
    if -1 in flat:
        assert timeline.num_rows == flat.index(-1)
        assert timeline.num_steps == sum(rows[0][0] != -1 for rows in expected)
    for source, limit in enumerate(limits):
        assert limit is None or flat.count(source) <= -(-limit // width[0][1])


def test_each_source_is_near_what_it_is_owed():
    names = list("abcdef")
    given = dict(zip(names, [0.5, 0.25, 0.15, 0.1, 0.0, 1e-7]))
    timeline = Timeline([(0, 64)], [(0, 1)], [(0, quantise(given, names))], [None] * 6)
    for step in (1, 10, 1000, 10**6):
        count, _ = timeline.before(step)
        assert np.abs(count - 64 * step * np.array(list(given.values()))).max() <= 6
    assert timeline.before(10**6)[0][4] == 0


def test_a_later_change_leaves_what_was_before():
    names = list("abc")
    first = quantise({"a": 0.7, "b": 0.3}, names)
    plain = Timeline([(0, 5)], [(0, 1)], [(0, first)], [None] * 3)
    for step in range(1, 60):
        changed = Timeline([(0, 5)], [(0, 1)], [(0, first), (step, quantise({"c": 1, "a": 1}, names))], [None] * 3)
        for earlier in range(step):
            np.testing.assert_array_equal(changed.rows(earlier).source, plain.rows(earlier).source)
        # Each source goes on from where it was.
        rows = changed.rows(step)
        before, _ = plain.before(step)
        for source in range(3):
            places = rows.place[rows.source == source]
            np.testing.assert_array_equal(places, before[source] + np.arange(len(places)))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8).filter(lambda w: sum(w) > 0))
def test_quantised_weights_sum_to_one(weights):
    names = [str(i) for i in range(len(weights))]
    parts = quantise(dict(zip(names, weights)), names)
    assert parts.sum() == ONE
    assert ((parts > 0) == (np.array(weights) > 0)).all()
    exact = np.array(weights) / max(weights)
    assert np.abs(parts / ONE - exact / exact.sum()).max() <= len(weights) / ONE


def test_a_ramp_goes_evenly():
    low, high = quantise({"a": 1}, ["a", "b", "c"]), quantise({"a": 1, "b": 3}, ["a", "b", "c"])
    stairs = ramp((10, low), (20, high))
    assert [step for step, _ in stairs] == list(range(10, 20))
    for number, (_, parts) in enumerate(stairs):
        assert parts.sum() == ONE
        assert parts[2] == 0
        np.testing.assert_allclose(parts / ONE, [1 - 0.075 * number, 0.075 * number, 0], atol=1e-6)
    assert len(ramp((0, low), (10**6, high))) == 4096


def test_points_that_are_none():
    for value, part in [
        (0, "= 0: expected 1 or more"),
        ([(1, 2)], "begin with 0, got [1]"),
        ([(0, 2), (0, 3)], "rising steps"),
        ([(0, -1)], "= -1: expected 1 or more"),
        ("abc", "a number, or pairs"),
        (True, "= True: expected 1 or more"),
        ([], "begin with 0"),
    ]:
        problems = []
        parse_points("batch_size", value, problems)
        assert part in problems[0], value


@pytest.mark.parametrize("weights", [{"a": -1}, {"a": float("nan")}, {"a": float("inf")}, {"a": 0}, {}])
def test_weights_that_are_none(weights):
    with pytest.raises(UserError, match="numbers of 0 or more"):
        quantise(weights, ["a"])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4))
def test_skips_leave_out_what_they_say(ranges):
    skips = Skips.parse([(first, first + count) for first, count in ranges], [])
    left_out = {step for first, count in ranges for step in range(first, first + count)}
    kept = [step for step in range(120) if step not in left_out]
    assert [skips.data_step(step) for step in range(len(kept) - 1)] == kept[:-1]
    assert all(skips.steps_before(step) == sum(k < step for k in kept) for step in range(100))
