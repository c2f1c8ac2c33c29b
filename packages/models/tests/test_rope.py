import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.models.layers.rope import Rotation, frequencies, rope_scale, rotate, rotation
from styrax.models.rope_config import Llama3, LongRope, Rope, Yarn

SHORT, LONG = (1.0, 1.1, 1.5, 2.5, 3.0, 3.5), (1.5, 2.0, 4.0, 8.0, 9.0, 20.0)
# Head widths and fractions that all give 12 rotated channels, so that one LongRope fits every case.
WIDTHS = [(12, 1.0), (16, 0.75), (48, 0.25)]

ROPES = {
    "default": Rope(theta=500.0),
    "linear": Rope(kind="linear", theta=700.0, factor=3.0),
    "dynamic": Rope(kind="dynamic", theta=900.0, factor=2.5, original_max_len=40),
    "yarn": Rope(kind="yarn", theta=150.0, factor=6.0, original_max_len=96),
    "yarn-real-ramp": Rope(
        kind="yarn",
        theta=150.0,
        factor=6.0,
        original_max_len=96,
        attention_factor=1.7,
        yarn=Yarn(beta_fast=7.0, beta_slow=0.6, truncate=False),
    ),
    "yarn-mscale": Rope(
        kind="yarn", theta=900.0, factor=6.0, original_max_len=300, yarn=Yarn(mscale=0.7, mscale_all_dim=1.3)
    ),
    "yarn-long-ramp": Rope(  # it would end beyond the last channel
        kind="yarn", theta=20.0, factor=6.0, original_max_len=10_000, yarn=Yarn(beta_fast=200.0)
    ),
    "yarn-step": Rope(kind="yarn", factor=6.0, original_max_len=5),  # both ends of the ramp are at 0
    "longrope": Rope(
        kind="longrope", factor=4.0, original_max_len=40, longrope=LongRope(short_factor=SHORT, long_factor=LONG)
    ),
    "longrope-factor": Rope(
        kind="longrope",
        factor=4.0,
        original_max_len=40,
        attention_factor=0.8,
        longrope=LongRope(short_factor=SHORT, long_factor=LONG),
    ),
    "llama3": Rope(kind="llama3", theta=5000.0, factor=8.0, original_max_len=128),
    "llama3-ends": Rope(
        kind="llama3",
        theta=5000.0,
        factor=8.0,
        original_max_len=256,
        llama3=Llama3(low_freq_factor=0.5, high_freq_factor=11.0),
    ),
    "proportional": Rope(kind="proportional", theta=300.0),
    "proportional-factor": Rope(kind="proportional", theta=300.0, factor=2.0),
}


def changed(rope, **fields):
    return Rope(**{name: getattr(rope, name) for name in Rope.__dataclass_fields__} | fields)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


# --- an independent reference: one frequency at a time, in Python's floats


def slow_frequencies(rope, head_dim, length):
    """The formulas as the papers and transformers' documentation tell them, by if and else."""
    d = head_dim if rope.kind == "proportional" else int(head_dim * rope.fraction)
    theta, s, original = rope.theta, rope.factor, rope.original_max_len
    if rope.kind == "dynamic" and length > original:
        theta = theta * (s * length / original - s + 1) ** (d / (d - 2))
    result = []
    for i in range(d // 2):
        f = 1 / theta ** (2 * i / d)
        if rope.kind == "linear":
            f = f / s
        elif rope.kind == "proportional":
            f = f / (s or 1) if 2 * i < 2 * int(head_dim * rope.fraction / 2) else 0.0
        elif rope.kind == "longrope":
            f = f / (rope.longrope.long_factor if length > original else rope.longrope.short_factor)[i]
        elif rope.kind == "llama3":
            ends, wavelength = rope.llama3 or Llama3(), 2 * math.pi / f
            if wavelength > original / ends.low_freq_factor:
                f = f / s
            elif wavelength >= original / ends.high_freq_factor:
                smooth = (original / wavelength - ends.low_freq_factor) / (ends.high_freq_factor - ends.low_freq_factor)
                f = (1 - smooth) * f / s + smooth * f
        elif rope.kind == "yarn":
            yarn = rope.yarn or Yarn()
            low, high = (
                d * math.log(original / (2 * math.pi * turns), theta) / 2 for turns in (yarn.beta_fast, yarn.beta_slow)
            )
            if yarn.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, d - 1)
            if i <= low:
                stretched = 0.0
            elif i >= high:
                stretched = 1.0
            else:
                stretched = (i - low) / (high - low)
            f = stretched * f / s + (1 - stretched) * f
        result.append(f)
    return np.array(result)


def slow_factor(rope):
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor, rope.original_max_len))
    if rope.kind != "yarn":
        return 1.0
    if rope.yarn and rope.yarn.mscale:
        top, bottom = (0.1 * c * math.log(rope.factor) + 1 for c in (rope.yarn.mscale, rope.yarn.mscale_all_dim))
        return top / bottom
    return 0.1 * math.log(rope.factor) + 1


@pytest.mark.parametrize(("head_dim", "fraction"), WIDTHS)
@pytest.mark.parametrize("length", [40, 41, 1000])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_against_one_at_a_time(name, length, head_dim, fraction):
    rope = changed(ROPES[name], fraction=fraction)
    made, factor = frequencies(rope, head_dim, length)
    assert made.dtype == np.float64
    np.testing.assert_allclose(made, slow_frequencies(rope, head_dim, length), rtol=1e-12)
    assert factor == pytest.approx(slow_factor(rope), rel=1e-12)


def test_the_cases_reach_every_part_of_a_ramp():
    """Frequencies that are kept, divided and between, or the comparison above would see less than it says."""
    for name in ("yarn", "yarn-real-ramp", "yarn-mscale", "llama3", "llama3-ends"):
        rope = ROPES[name]
        ratio = frequencies(Rope(theta=rope.theta), 12)[0] / frequencies(rope, 12)[0]
        inside = (ratio > 1.001) & (ratio < rope.factor - 0.001)
        assert inside.any() and (ratio < 1.001).any() and (ratio > rope.factor - 0.001).any(), (name, ratio)


@pytest.mark.parametrize("top", [39, 40, 700])
@pytest.mark.parametrize("name", ROPES)
def test_rotation_against_float64(name, top):
    rope = changed(ROPES[name], fraction=0.75)
    positions = np.array([[0, 1, 5, top, 17], [3, 0, 2, 38, 1]])
    got = jax.jit(lambda p: rotation(p, 16, rope))(positions)
    angles = positions[:, :, None, None] * slow_frequencies(rope, 16, positions.max() + 1)
    np.testing.assert_allclose(
        got.cos, slow_factor(rope) * np.cos(angles), atol=2e-6 if "dynamic" not in name else 2e-4
    )
    np.testing.assert_allclose(
        got.sin, slow_factor(rope) * np.sin(angles), atol=2e-6 if "dynamic" not in name else 2e-4
    )


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
@pytest.mark.parametrize("top", [2**12, 2**20, 2**31 - 1])
def test_angles_are_exact_at_any_position(top, theta):
    positions = np.array([[top, top - 1, top // 2 + 1, top // 3, 7, -top]], np.int64)
    got = rotation(jnp.asarray(positions, "int32"), 128, Rope(theta=theta))
    angles = positions[0][:, None] * theta ** (-np.arange(64) / 64)
    np.testing.assert_allclose(got.cos[0, :, 0], np.cos(angles), atol=2e-6)
    np.testing.assert_allclose(got.sin[0, :, 0], np.sin(angles), atol=2e-6)


def test_dynamic_angles_are_as_good_as_a_float32_product():
    rope = Rope(kind="dynamic", factor=4.0, original_max_len=4096)
    top = 2**17
    got = rotation(jnp.array([[top - 1]]), 64, rope)
    angles = (top - 1) * frequencies(rope, 64, top)[0]
    np.testing.assert_allclose(got.cos[0, 0, 0], np.cos(angles), atol=2 * 2**-23 * top)


def test_a_base_alone_is_the_default_kind():
    both = rotation(jnp.arange(5)[None], 8, 300.0), rotation(jnp.arange(5)[None], 8, Rope(theta=300.0))
    assert all((a == b).all() for a, b in zip(*both, strict=True))


def test_the_kind_none_turns_nothing():
    by = rotation(jnp.arange(5)[None], 8, Rope(kind="none"))
    assert by.cos.shape == (1, 5, 1, 0)
    x = normal(1, 5, 2, 8)
    assert (rotate(x, by) == x).all()
    assert (rotate(x, by, interleaved=True) == x).all()


# --- rotate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 6, 10])
def test_rotate_against_complex_numbers(width, interleaved, dtype):
    x = normal(2, 7, 3, 10).astype(dtype)
    angles = np.random.default_rng(1).uniform(-9, 9, (2, 7, 1, width // 2))
    by = Rotation(jnp.asarray(np.cos(angles), "float32"), jnp.asarray(np.sin(angles), "float32"))
    wide = np.array(x, np.float64)
    first, second = np.arange(width // 2), np.arange(width // 2) + width // 2
    if interleaved:
        first, second = np.arange(0, width, 2), np.arange(1, width, 2)
    turned = (wide[..., first] + 1j * wide[..., second]) * np.exp(1j * angles)
    wide[..., first], wide[..., second] = turned.real, turned.imag
    got = rotate(x, by, interleaved=interleaved)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), wide, atol=1e-6 if dtype == "float32" else 0.02)
    assert (got[..., width:] == x[..., width:]).all()


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([name for name, rope in ROPES.items() if rope.kind not in ("dynamic", "longrope")]),
    first=st.integers(0, 500),
    second=st.integers(0, 500),
    shift=st.integers(-(10**6), 10**6),
    interleaved=st.booleans(),
)
def test_scores_depend_on_the_distance_only(name, first, second, shift, interleaved):
    rope = changed(ROPES[name], fraction=0.75)
    query, key = normal(1, 1, 2, 16), normal(1, 1, 2, 16, seed=1)

    def score(a, b):
        turned = (
            rotate(x, rotation(jnp.array([[at]]), 16, rope), interleaved=interleaved)
            for x, at in ((query, a), (key, b))
        )
        return math.prod(turned).sum(-1)

    np.testing.assert_allclose(score(first, second), score(first + shift, second + shift), atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(list(ROPES)), top=st.integers(0, 2000), interleaved=st.booleans())
def test_turning_keeps_the_norm_times_the_factor(name, top, interleaved):
    rope, x = ROPES[name], normal(1, 1, 2, 12)
    turned = rotate(x, rotation(jnp.array([[top]]), 12, rope), interleaved=interleaved)
    expected = slow_factor(rope) * np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), expected, rtol=1e-5)


def test_length_is_that_of_the_whole_call():
    """One long row makes all rows of a call long, as in transformers."""
    rope = ROPES["longrope"]
    alone = rotation(jnp.array([[3, 4]]), 12, rope)
    beside = rotation(jnp.array([[3, 4], [99, 100]]), 12, rope)
    assert not np.allclose(alone.cos[0], beside.cos[0], atol=1e-2)
    np.testing.assert_allclose(
        beside.cos[0, 1, 0], slow_factor(rope) * np.cos(4 / np.array(LONG) * 1e4 ** (-np.arange(6) / 6)), atol=2e-6
    )


# --- the factor of the scale


def test_rope_scale():
    assert rope_scale(Rope()) == rope_scale(ROPES["yarn"]) == 1.0
    assert rope_scale(ROPES["yarn-mscale"]) == pytest.approx((1 + 0.13 * math.log(6)) ** 2, rel=1e-12)


# --- against transformers


def hf_config(rope, head_dim, fraction):
    transformers = pytest.importorskip("transformers")
    given = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "partial_rotary_factor": fraction,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_len,
        "attention_factor": rope.attention_factor,
    }
    for part in (rope.yarn, rope.llama3, rope.longrope):
        if part is not None:
            given |= {name: getattr(part, name) for name in type(part).__dataclass_fields__}
    if rope.kind == "llama3" and rope.llama3 is None:
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v is not None}
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=rope.original_max_len or 2048,
        rope_parameters=given,
    )


@pytest.mark.parametrize(("head_dim", "fraction"), WIDTHS)
@pytest.mark.parametrize("length", [30, 1000])
@pytest.mark.parametrize("name", [name for name, rope in ROPES.items() if rope.kind != "default"])
def test_frequencies_against_transformers(name, length, head_dim, fraction):
    pytest.importorskip("torch")
    config = hf_config(ROPES[name], head_dim, fraction)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = changed(ROPES[name], fraction=fraction)
    expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu", seq_len=length)
    got, got_factor = frequencies(rope, head_dim, length)
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6)
    assert got_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [30, 200])
@pytest.mark.parametrize(("head_dim", "fraction"), WIDTHS[:2])
@pytest.mark.parametrize("name", ROPES)
def test_turned_heads_against_transformers(name, head_dim, fraction, length):
    torch = pytest.importorskip("torch")
    config = hf_config(ROPES[name], head_dim, fraction)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    if name == "default" and fraction < 1:
        pytest.skip("this class of transformers does not read the fraction for the default kind")
    query, key = normal(2, length, 3, head_dim), normal(2, length, 3, head_dim, seed=1)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    q, k = (torch.from_numpy(np.array(x)).transpose(1, 2) for x in (query, key))
    expected = [x.transpose(1, 2).numpy() for x in apply_rotary_pos_emb(q, k, cos, sin)]
    by = rotation(jnp.arange(length)[None], head_dim, changed(ROPES[name], fraction=fraction))
    for got, wanted in zip((rotate(query, by), rotate(key, by)), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_neighbouring_pairs_against_transformers():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb, yarn_apply_mscale
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    x = normal(2, 50, 3, 12)
    by = rotation(jnp.arange(50)[None], 12, Rope())
    got = np.asarray(rotate(x, by, interleaved=True))
    cos, sin = (torch.from_numpy(np.array(part[:, :, 0])) for part in by)
    heads = torch.from_numpy(np.array(x)).transpose(1, 2)
    turned, _ = apply_rotary_emb(heads, heads, torch.complex(cos, sin))
    np.testing.assert_allclose(got, turned.transpose(1, 2).numpy(), atol=1e-6)
    # The later code also puts the firsts of the pairs before the seconds, in queries and keys alike.
    split, _ = apply_rotary_pos_emb_interleave(heads, heads, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    np.testing.assert_allclose(np.concatenate([got[..., ::2], got[..., 1::2]], -1), split.transpose(1, 2), atol=1e-6)

    for name in ("default", "yarn", "yarn-mscale"):
        rope = ROPES[name]
        given = {
            "rope_type": rope.kind,
            "factor": rope.factor,
            "mscale_all_dim": rope.yarn and rope.yarn.mscale_all_dim,
        }
        assert rope_scale(rope) == pytest.approx(yarn_apply_mscale(given, 1.0), rel=1e-12)
