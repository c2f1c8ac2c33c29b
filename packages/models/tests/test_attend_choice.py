"""Which implementation of attention is chosen, what it refuses and is told, and how one is added."""

import functools
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.models import Runtime
from styrax.models.attention import Call, choose, get, names, register
from styrax.models.encoder_block import segment_mask
from styrax.models.layers.fence import on_cpu, platform
from styrax.models.layers.mask import document_mask

CALL = Call(platform="cpu", dtype="bfloat16", seq=256, keys=256, heads=4, kv_heads=2, head_dim=64, value_dim=64)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "blocked"),
        ({"patterned": False}, "blocked"),
        ({"platform": "tpu"}, "splash"),
        ({"platform": "tpu", "sinks": True, "softcap": 9.0, "value_dim": 32, "window": 7, "segments": True}, "splash"),
        ({"platform": "tpu", "seq": 200, "keys": 200}, "reference"),
        ({"platform": "tpu", "patterned": False}, "reference"),
        ({"platform": "gpu"}, "cudnn"),
        ({"platform": "gpu", "segments": True, "chunk": 8, "window": 4}, "cudnn"),
        ({"platform": "gpu", "dtype": "float32"}, "jax.nn"),
        ({"platform": "gpu", "patterned": False}, "jax.nn"),
        ({"platform": "gpu", "softcap": 30.0}, "reference"),
        ({"platform": "gpu", "value_dim": 32}, "reference"),
        ({"platform": "something else"}, "reference"),
    ],
)
def test_auto_takes_what_can(changes, expected):
    assert choose("auto", replace(CALL, **changes)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("splash", {}, ["platform: expected tpu, got cpu"]),
        (
            "splash",
            {"platform": "tpu", "seq": 1, "patterned": False, "dtype": "float16"},
            ["dtype: expected bfloat16 or float32, got float16", "mask: ", "keys: ", "seq: expected a multiple of 128"],
        ),
        (
            "cudnn",
            {"dtype": "float32", "softcap": 30.0, "sinks": True, "value_dim": 32, "head_dim": 60, "patterned": False},
            [
                "platform: expected gpu, got cpu",
                "dtype: expected bfloat16 or float16, got float32",
                "softcap: expected none, got 30.0",
                "sinks: expected no, got yes",
                "value_dim: expected 60, got 32",
                "head_dim: expected a multiple of 8 up to 128, got 60",
                "mask: expected one made of causal",
            ],
        ),
        ("cudnn", {"platform": "gpu", "segments": True, "seq": 33, "keys": 33}, ["seq: expected an even number"]),
        ("cudnn", {"platform": "gpu", "window": 4, "causal": False}, ["window: expected none without causal"]),
        ("cudnn", {"platform": "gpu", "head_dim": 256, "value_dim": 256}, ["head_dim: ", "up to 128, got 256"]),
        ("jax.nn", {"softcap": 30.0, "sinks": True}, ["softcap: ", "sinks: "]),
    ],
)
def test_a_named_one_that_cannot_refuses_with_all_reasons(name, changes, told):
    with pytest.raises(UserError) as caught:
        choose(name, replace(CALL, **changes))
    for text in told:
        assert text in str(caught.value)
    assert "set attention to 'auto', or to one that can: reference, blocked" in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "head_dim", "told"),
    [
        ("7.5", 64, "device: "),
        ("gfx942", 64, "device: "),
        ("8.0", 128, ""),
        ("8.9", 256, "head_dim: "),
        ("9.0", 256, ""),
    ],
)
def test_the_gpu_of_this_process_counts(capability, head_dim, told, monkeypatch):
    class Device:
        device_kind = "a GPU"
        compute_capability = capability

    monkeypatch.setattr(jax, "local_devices", lambda *, backend: [Device()])
    problems = get("cudnn").supports(replace(CALL, platform="gpu", head_dim=head_dim, value_dim=head_dim))
    assert [problem[: len(told)] for problem in problems] == ([told] if told else [])


def test_what_cudnn_is_told(monkeypatch):
    """It cannot run here, so only what `jax.nn` is called with is looked at."""
    told = {}

    def note(query, key, value, **given):
        told.update(given, shapes=(query.shape, key.shape, value.shape))
        return jnp.zeros(query.shape, query.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", note)
    query, key = jnp.zeros((2, 6, 4, 8)), jnp.zeros((2, 2, 6, 8))
    place, run = jnp.arange(6)[None], functools.partial(get("cudnn").attend, query, key, key, scale=0.5)
    run(document_mask(6), softcap=None, sinks=None)
    shapes = (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)
    assert told == {"implementation": "cudnn", "is_causal": True, "scale": 0.5, "shapes": shapes}
    run(document_mask(6).within(place, place, window=4), softcap=None, sinks=None)
    assert told["local_window_size"] == (3, 0)
    assert "mask" not in told
    run(segment_mask(6), softcap=None, sinks=None)
    assert told["is_causal"] is False
    ids = jnp.array([[1, 1, 2, 2, 0, 0]] * 2)
    run(document_mask(6, ids), softcap=None, sinks=None)
    assert (told["mask"] == document_mask(6, ids).allowed[:, None]).all()


def test_one_can_be_added(build, run, tokens):
    seen = []

    def mine(query, key, value, mask, **options):
        seen.append(mask.pattern.window)
        return get("reference").attend(query, key, value, mask, **options)

    register("mine", mine, supports=lambda call: call.expects(sinks=[False]))
    assert "mine" in names()
    expected = run(build(runtime=Runtime(attention="reference")), tokens)
    np.testing.assert_array_equal(run(build(runtime=Runtime(attention="mine")), tokens), expected)
    assert seen
    for name in ("auto", "blocked", "jax.nn"):
        np.testing.assert_allclose(run(build(runtime=Runtime(attention=name)), tokens), expected, atol=2e-5)
    for name in ("auto", "splash"):
        with pytest.raises(UserError, match=f"the name '{name}' is taken"):
            register(name, mine)


def test_a_config_knows_the_names_without_jax():
    code = """
import sys
from styrax.models.config import DecoderConfig, Runtime
for name in ("auto", "splash", "jax.nn"):
    Runtime(attention=name)
try:
    Runtime(attention="splosh", microbatches=-1)
except ValueError as error:
    print(error)
print("jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "got 'splosh' (did you mean 'splash'?)" in done.stdout
    assert "expected auto, reference, blocked, jax.nn, splash, ring, cudnn" in done.stdout
    assert "microbatches: expected" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_platform_is_that_of_the_mesh_in_scope_or_of_the_arrays(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    assert platform(jnp.ones(2)) == "gpu"
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found = []
    like = jax.ShapeDtypeStruct((4,), "float32", sharding=where)
    jax.jit(lambda x: found.extend([platform(), platform(2 * x), on_cpu(x)])).lower(like)
    assert found == ["gpu", "cpu", True]
    with jax.set_mesh(mesh):
        assert platform() == "cpu"
