import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core.config import build
from styrax.optim import WSD, Cosine

amounts = st.one_of(st.integers(0, 60), st.floats(0, 1))
schedules = st.one_of(
    st.builds(Cosine, warmup=amounts, final=st.floats(0, 1)),
    st.builds(WSD, warmup=amounts, decay=amounts, final=st.floats(0, 1)),
)


@settings(max_examples=25, deadline=None)
@given(schedules, st.sampled_from([1, 2, 10, 50]))
def test_laws(schedule, steps):
    """Within (0, 1] on every step, rising then never rising again, at the final value from step N on."""
    m = np.asarray(schedule.build(steps=steps)(np.arange(60)))
    assert m.dtype == np.float32
    assert (m[:steps] > 0).all()
    assert (m <= 1 + 1e-6).all()
    top = int(np.argmax(m))
    assert (np.diff(m[: top + 1]) >= -1e-6).all()
    assert (np.diff(m[top:]) <= 1e-6).all()
    warmup = schedule.warmup if isinstance(schedule.warmup, int) else round(schedule.warmup * steps)
    if warmup < steps:
        np.testing.assert_allclose(m[steps:], schedule.final, atol=1e-6)
        assert m[0] >= min(1 / max(warmup, 1), m.max()) * (1 - 1e-6)


def test_against_optax():
    """After the warm-up, the cosine of optax over the rest."""
    mine = Cosine(warmup=10, final=0.1).build(steps=100, peak=3e-4)
    theirs = optax.cosine_decay_schedule(3e-4, 90, alpha=0.1)
    t = np.arange(10, 120)
    np.testing.assert_allclose(mine(t), theirs(t - 10), rtol=1e-5)
    np.testing.assert_allclose(mine(np.arange(10)), 3e-4 * np.arange(1, 11) / 10, rtol=1e-6)


def test_float64_reference():
    t = np.arange(0, 1_000_001, 997)
    got = Cosine(warmup=0.01, final=0.0).build(steps=1_000_000)(t)
    p = np.clip((t - 10_000) / 990_000, 0, 1)
    expected = np.minimum((t + 1) / 10_000, 1) * 0.5 * (1 + np.cos(np.pi * p))
    np.testing.assert_allclose(got, expected, atol=2e-7)


def test_first_step_moves_and_peak_is_reached():
    for schedule in (Cosine(warmup=4), WSD(warmup=4)):
        m = schedule.build(steps=100)
        assert [float(m(t)) for t in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_traced_step_and_scalar_shape():
    m = jax.jit(WSD().build(steps=100))
    assert m(jnp.int32(3)).shape == ()
    assert m(jnp.int32(3)).dtype == jnp.float32


def test_more_steps_than_before():
    """WSD does not know the total until it decays, so a longer run has the same beginning."""
    t = np.arange(40)
    short, long = (WSD(warmup=5, decay=10).build(steps=n)(t) for n in (50, 500))
    np.testing.assert_array_equal(short, long)
    assert float(Cosine().build(steps=50)(60)) == pytest.approx(0.1)
    assert float(Cosine().build(steps=100)(60)) > 0.1


def test_a_run_shorter_than_its_warmup():
    m = Cosine(warmup=100).build(steps=5)
    np.testing.assert_allclose(m(np.arange(5)), np.arange(1, 6) / 100, rtol=1e-6)
    assert float(WSD(warmup=4, decay=4).build(steps=4)(3)) == pytest.approx(0.25)


def test_constant():
    np.testing.assert_array_equal(WSD(warmup=0, decay=0).build(steps=9)(np.arange(9)), 1.0)


def test_read_from_a_file():
    assert build(Cosine, {"warmup": 1}) == Cosine(warmup=1)
    assert build(Cosine, {"warmup": 0.5}).warmup == 0.5
    assert build(WSD, {"decay": 3}).decay == 3
    with pytest.raises(ValueError, match=r"warmup: expected integer >= 0 or number >= 0.0, <= 1.0, got 1.5"):
        build(Cosine, {"warmup": 1.5})


def test_errors():
    with pytest.raises(ValueError, match=r"WSD: warmup=-1 must be .*; decay=2.0 .* write 2 for a number of steps"):
        WSD(warmup=-1, decay=2.0)
    with pytest.raises(ValueError, match=r"Cosine: final=2.0 must be a fraction from 0.0 to 1.0$"):
        Cosine(final=2.0)
    with pytest.raises(ValueError, match="got steps=0"):
        Cosine().build(steps=0)
