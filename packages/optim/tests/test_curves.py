"""More schedules against optax and float64."""

import numpy as np
import optax
import pytest

from styrax.core.config import build
from styrax.optim import WSD, Cosine
from styrax.optim.curves import Cycles, InverseSqrt, Linear, Piecewise

T = np.arange(140)


def test_linear_is_optax_after_the_warm_up():
    mine = Linear(warmup=10, final=0.1).build(steps=100, peak=3e-4)
    theirs = optax.linear_schedule(3e-4, 3e-5, 90)
    np.testing.assert_allclose(mine(T[10:]), theirs(T[10:] - 10), rtol=1e-5)
    np.testing.assert_allclose(mine(T[:10]), 3e-4 * np.arange(1, 11) / 10, rtol=1e-6)


def test_inverse_square_root():
    got = InverseSqrt(warmup=0.1, decay=20, final=0.5).build(steps=100)(T)
    t = T.astype(float)
    cool = np.minimum(1, 0.5 + 0.5 * np.clip((100 - t) / 20, 0, 1))
    expected = np.minimum(1, (t + 1) / 10) * np.sqrt(10 / np.maximum(t + 1, 10)) * cool
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_piecewise_is_optax():
    points = ((0, 1.0), (50, 0.1), (80, 0.01))
    theirs = optax.piecewise_constant_schedule(1.0, {50: 0.1, 80: 0.1})
    mine = Piecewise(points=points, interpolate="hold").build(steps=100)
    np.testing.assert_allclose(mine(T), theirs(T), rtol=1e-6)
    lines = Piecewise(points=((0.0, 0.0), (0.5, 2.0), (100, 1.0))).build(steps=100, peak=0.5)
    np.testing.assert_allclose(lines(T), 0.5 * np.interp(T, [0, 50, 100], [0, 2, 1]), rtol=1e-6)


@pytest.mark.parametrize("each", [Cosine(warmup=3), WSD(warmup=0.1, decay=0.5), Linear(warmup=0)])
def test_cycles_repeat(each):
    got = np.asarray(Cycles(each=each, count=3, decay=0.5).build(steps=100)(T[:100]))
    for k, (begin, end) in enumerate([(0, 33), (33, 66), (66, 100)]):
        expected = np.asarray(each.build(steps=end - begin)(np.arange(end - begin))) * 0.5**k
        np.testing.assert_allclose(got[begin:end], expected, rtol=1e-6)
    one = Cycles(each=each).build(steps=100)
    np.testing.assert_array_equal(one(T[:100]), each.build(steps=100)(T[:100]))


def test_the_parts_come_from_a_file():
    made = build(Cycles, {"count": 2, "each": {"kind": "linear", "warmup": 0.5}})
    assert made == Cycles(count=2, each=Linear(warmup=0.5))
    assert build(Piecewise, {"points": [[0, 0.5], [0.5, 1.0]]}).points == ((0, 0.5), (0.5, 1.0))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Piecewise(points=()), "one or more pairs"),
        (lambda: Piecewise(points=((5, 1.0), (3, 1.0))).build(steps=10), "rising steps"),
        (lambda: Piecewise(points=((0, -1.0),)), "points"),
        (lambda: Cycles(count=5).build(steps=3), "5 cycles, but the run has 3 steps"),
        (lambda: Cycles(count=0), "count"),
        (lambda: Linear(warmup=2.5), "fraction"),
        (lambda: InverseSqrt(decay=-1), "0 or more"),
        (lambda: Linear().build(steps=0), "total number of steps"),
    ],
)
def test_mistakes(make, part):
    with pytest.raises(ValueError, match=part):
        make()
