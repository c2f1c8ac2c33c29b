import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import Policy, UsageError, stream
from styrax.core.random import purpose_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32", ("float32", "float32", "float32")),
        ("bf16", ("float32", "bfloat16", "float32")),
        ("params=bf16, compute=bf16,output=f32", ("bfloat16", "bfloat16", "float32")),
        ("compute=float16", ("float32", "float16", "float32")),
    ],
)
def test_policies(text, expected):
    policy = Policy.parse(text)
    assert (policy.param, policy.compute, policy.output) == expected
    assert policy.param_dtype == jnp.dtype(expected[0])
    assert policy.compute_dtype == jnp.dtype(expected[1])
    assert policy.output_dtype == jnp.dtype(expected[2])
    assert jnp.zeros(1, policy.compute_dtype).dtype == expected[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp32", "expected 'f32', 'bf16' or 'params=f32,compute=bf16,output=f32', got 'fp32'"),
        ("param=f32", r"'param' in 'param=f32' is not a key \(did you mean 'params'\?\)"),
        ("params=f32,params=f32", "is given twice"),
        ("compute=bf61", r"compute dtype 'bf61' is not one of .* \(did you mean 'bf16'\?\)"),
        ("", "got ''"),
    ],
)
def test_policy_errors(text, message):
    with pytest.raises(UsageError, match=message):
        Policy.parse(text)


def test_streams_are_stable():
    # The bits are part of the contract: a run resumed under a new version must go on with the same noise.
    data = jax.random.key_data(stream(jax.random.key(0), "dropout", 1, 2))
    key = jax.random.fold_in(jax.random.key(0), int(hashlib.sha256(b"dropout").hexdigest()[:8], 16) >> 1)
    expected = jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, 1), 2))
    np.testing.assert_array_equal(data, expected)
    assert purpose_id("dropout") == 228984084


def test_streams_are_distinct():
    keys = [
        stream(jax.random.key(seed), purpose, *steps)
        for seed, purpose, steps in itertools.product((0, 1), ("init", "dropout"), ((), (0,), (1,), (0, 0), (0, 1)))
    ]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == len(keys)


def test_streams_under_jit_and_with_old_keys():
    key = jax.random.key(3)
    jitted = jax.jit(lambda step: stream(key, "x", step))
    assert jitted(jnp.uint32(5)) == stream(key, "x", 5)
    assert stream(jax.random.PRNGKey(0), "x", 1).shape == (2,)
    with pytest.raises(ValueError, match=r"stream\('x'\): a step must be in \[0, 2\*\*32\), got -1"):
        stream(key, "x", -1)
