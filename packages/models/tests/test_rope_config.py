import jax.numpy as jnp
import pytest

from styrax.core import UserError
from styrax.core.config import build
from styrax.models.layers.rope import rotation
from styrax.models.rope_config import Llama3, LongRope, Rope, Yarn

LONG = Rope(
    kind="longrope",
    fraction=0.5,
    factor=2.0,
    original_max_len=40,
    longrope=LongRope(short_factor=(1.0,) * 6, long_factor=(2.0,) * 6),
)


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"kind": "yarm"}, ["did you mean 'yarn'?"]),
        ({"kind": "yarn"}, ["factor: missing", "original_max_len: missing"]),
        ({"kind": "linear"}, ['factor: missing, kind "linear" needs it']),
        ({"kind": "longrope", "factor": 2.0}, ["original_max_len: missing", "longrope: missing"]),
        (
            {"factor": 2.0, "llama3": Llama3()},
            ['factor: kind "default" has no use', 'llama3: kind "default" has no use'],
        ),
        ({"kind": "linear", "factor": 0.5}, ["factor: expected number >= 1.0", "got 0.5"]),
        ({"theta": 0.0, "fraction": 1.5}, ["theta: expected number > 0.0", "fraction: expected number > 0.0, <= 1.0"]),
        ({"kind": "linear", "factor": 2.0, "attention_factor": 2.0}, ["attention_factor: kind"]),
        ({"kind": "yarn", "factor": 2.0, "original_max_len": 9, "theta": 1.0}, ["theta: expected another"]),
        (
            {
                "kind": "longrope",
                "factor": 2.0,
                "original_max_len": 1,
                "longrope": LongRope(short_factor=(1.0,), long_factor=(1.0,)),
            },
            ["original_max_len: expected 2 or more"],
        ),
    ],
)
def test_a_wrong_rope_lists_all_problems(fields, lines):
    with pytest.raises(ValueError) as caught:
        Rope(**fields)
    for line in lines:
        assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == len(lines) - (fields.get("factor") == 0.5)


def test_wrong_parts():
    with pytest.raises(ValueError, match=r"beta_fast: expected more than beta_slow = 1.0, got 1.0"):
        Yarn(beta_fast=1.0)
    with pytest.raises(ValueError, match=r"high_freq_factor: expected more than low_freq_factor = 4.0, got 4.0"):
        Llama3(low_freq_factor=4.0)
    with pytest.raises(ValueError, match="long_factor: expected as many as in short_factor, 2, got 1"):
        LongRope(short_factor=(1.0, 2.0), long_factor=(1.0,))


@pytest.mark.parametrize(
    ("rope", "head_dim", "lines"),
    [
        (Rope(), 7, ["expected an even number of rotated channels, got 7, which is head_dim = 7"]),
        (Rope(fraction=0.25), 12, ["an even number of rotated channels, got 3, which is 0.25 of head_dim = 12"]),
        (Rope(fraction=0.1), 8, ["2 or more rotated channels, got 0"]),
        (Rope(kind="dynamic", factor=2.0, original_max_len=40), 2, ["4 or more rotated channels, got 2"]),
        (LONG, 10, ["got 5, which", "short_factor: expected 2 numbers", "got 6"]),
        (Rope(kind="proportional", fraction=0.25), 9, ["got 9, which is head_dim = 9"]),
    ],
)
def test_a_rope_that_does_not_fit_the_head(rope, head_dim, lines):
    text = "\n".join(rope.misfits(head_dim))
    assert all(line in text for line in lines), text
    with pytest.raises(UserError) as caught:
        rotation(jnp.zeros((1, 1), int), head_dim, rope)
    assert str(caught.value) == "\n".join(f"rope.{line}" for line in rope.misfits(head_dim))


def test_from_plain_values():
    tree = {"kind": "yarn", "factor": 32, "original_max_len": 4096, "yarn": {"truncate": False}}
    assert build(Rope, tree) == Rope(kind="yarn", factor=32, original_max_len=4096, yarn=Yarn(truncate=False))
    lists = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]}
    made = build(Rope, {"kind": "longrope", "factor": 2.0, "original_max_len": 64, "longrope": lists})
    assert made.longrope == LongRope(short_factor=(1.0, 2.0), long_factor=(2.0, 4.0))
    with pytest.raises(UserError, match=r"yarn.truncated: unknown key"):
        build(Rope, {**tree, "yarn": {"truncated": False}})
