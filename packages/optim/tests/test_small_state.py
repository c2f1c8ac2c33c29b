"""Optimizers with less state than AdamW: Adafactor, Adam-mini and 8-bit AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trajectories import GOLDEN, run

from styrax.core.errors import UserError
from styrax.core.testing import check_optimizer
from styrax.core.tree import flatten
from styrax.optim import adamw, guard
from styrax.optim.adafactor import adafactor
from styrax.optim.adam_mini import adam_mini
from styrax.optim.eight_bit import dequantise, dynamic_table, eight_bit_adamw, quantise
from styrax.optim.specs import ParamSpec, specs

MATRIX = {"w": ParamSpec("matrix", "io")}
SMALL = {"a/kernel": ParamSpec("matrix", "io"), "b": ParamSpec("vector", "o")}


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (5,)])
def test_adafactor_as_optax(shape):
    """optax adds the decay after the rate, and has the momentum after it; so none of either here."""
    rng = np.random.default_rng(1)
    params, grads = {"w": rng.normal(size=shape).astype("float32")}, {"w": rng.normal(size=(20, *shape))}
    specs = {"w": ParamSpec("matrix", "io") if len(shape) == 2 else ParamSpec("vector", "o")}
    got, _ = run(adafactor(0.1, specs=specs, min_size=4), params, {"w": grads["w"].astype("float32")})
    reference = optax.adafactor(0.1, min_dim_size_to_factor=4)
    expected, _ = run(reference, params, {"w": grads["w"].astype("float32")})
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("axes", "shape"), [("sioo", (2, 4, 3, 5)), ("sio", (2, 4, 15)), ("soi", (2, 15, 4))])
def test_adam_mini_has_one_moment_a_head(axes, shape):
    """Written out with a loop over layers and heads, in whatever order the axes are."""
    rng = np.random.default_rng(2)
    g = rng.normal(size=(3, 2, 4, 3, 5)).astype("float32")  # step, layer, input, head, output
    laid = {"sioo": g, "sio": g.reshape(3, 2, 4, 15), "soi": g.reshape(3, 2, 4, 15).swapaxes(2, 3)}[axes]
    tx = adam_mini(0.1, specs={"w": ParamSpec("matrix", axes, heads=3)}, weight_decay=0.0)
    got, states = run(tx, {"w": jnp.zeros(shape)}, {"w": laid})
    w = np.zeros((2, 4, 3, 5))
    for layer in range(2):
        for head in range(3):
            m = v = 0.0
            for t, step in enumerate(np.float64(g[:, layer, :, head]), 1):
                m, v = 0.9 * m + 0.1 * step, 0.95 * v + 0.05 * (step**2).mean()
                w[layer, :, head] -= 0.1 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    back = np.asarray(got["w"][-1])
    back = (back.swapaxes(1, 2) if axes == "soi" else back).reshape(2, 4, 3, 5)
    np.testing.assert_allclose(back, w, rtol=1e-5, atol=1e-6)
    assert states.nu["w"][-1].size == 6


def state_bytes(tx, params):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, params)))


def decoder():
    """Shapes of a small decoder, not its numbers."""
    shapes = {
        "embed": {"embedding": (4096, 256)},
        "layers": {
            **{name: {"kernel": (4, 256, 4, 64)} for name in "qkv"},
            "o": {"kernel": (4, 4, 64, 256)},
            "up": {"kernel": (4, 256, 1024)},
            "down": {"kernel": (4, 1024, 256)},
            "norm": {"scale": (4, 256)},
        },
        "head": {"kernel": (256, 4096), "bias": (4096,)},
    }
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def decoder_specs(params):
    axes = {"**/o/kernel": "siio", **{f"layers/{name}/kernel": "sioo" for name in "qkv"}}
    return specs(params, axes=axes, heads={"layers/q/kernel": 4, "layers/k/kernel": 4})


def test_adam_mini_saves_half_of_the_state():
    params = decoder()
    tx = adam_mini(1e-3, specs=decoder_specs(params))
    assert state_bytes(tx, params) <= 0.51 * state_bytes(adamw(1e-3), params)
    nu = jax.eval_shape(tx.init, params).nu
    assert nu["embed"]["embedding"].shape == (4096, 1)
    assert nu["head"]["kernel"].shape == (1, 4096)
    assert nu["head"]["bias"].shape == (4096,)
    assert nu["layers"]["q"]["kernel"].shape == (4, 1, 4, 1)
    assert nu["layers"]["v"]["kernel"].shape == (4, 1, 4, 64)
    assert nu["layers"]["o"]["kernel"].shape == (4, 1, 1, 256)
    assert nu["layers"]["norm"]["scale"].shape == (4, 1)


def test_adafactor_has_no_moment_of_a_matrix():
    params = decoder()
    assert state_bytes(adafactor(1e-3, specs=decoder_specs(params)), params) <= 0.01 * state_bytes(adamw(1e-3), params)


def test_eight_bit_tables_codes_and_weights_are_those_of_bitsandbytes():
    golden = np.load(GOLDEN / "eight_bit.npz")
    for signed, name in ((True, "signed"), (False, "unsigned")):
        np.testing.assert_allclose(dynamic_table(signed=signed), golden[name], rtol=3e-7)
    got, states = run(eight_bit_adamw(1e-2, specs=MATRIX), {"w": golden["w0"]}, {"w": golden["gw"].astype("float32")})
    for row, step in enumerate((0, 3)):
        np.testing.assert_allclose(got["w"][step], golden["w"][row], rtol=2e-6, atol=2e-6)
        for slot in ("mu", "nu"):
            codes = np.asarray(getattr(states, slot)["w"][step], np.int32)
            off = np.abs(codes - golden[slot][row])
            assert off.max() <= 1 and (off > 0).mean() < 1e-3, (slot, step)
            scale = getattr(states, f"{slot}_scale")["w"][step]
            np.testing.assert_allclose(scale.ravel(), golden[f"{slot}_scale"][row], rtol=2e-6)


@pytest.mark.parametrize("shape", [(64,), (3, 600), (2, 3, 256), (5, 17)])
@pytest.mark.parametrize("signed", [True, False])
def test_quantised_to_the_nearest_of_the_table(shape, signed):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype("float32")
    x = x if signed else np.abs(x)
    codes, scale = quantise(x, 256, signed=signed)
    assert codes.shape == shape
    table, n = dynamic_table(signed=signed), shape[-1]
    for i in range(0, n, 256):
        part = np.float64(x[..., i : i + 256])
        largest = np.abs(part).max(-1, keepdims=True)
        np.testing.assert_array_equal(scale[..., i // 256], largest[..., 0].astype("float32"))
        distance = np.abs(part[..., None] / largest[..., None] - table)
        chosen = np.take_along_axis(distance, np.asarray(codes[..., i : i + 256, None], int), -1)[..., 0]
        limit = distance.min(-1) + (0 if signed else 4e-7)
        assert (chosen <= limit + 1e-7).all()
    back = dequantise(codes, scale, 256, signed=signed)
    assert (np.asarray(back == 0) <= (np.abs(x) < 1e-6 * np.abs(x).max() if signed else x == 0)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_quantised_as_by_a_search_at_and_beside_every_edge(signed):
    table = dynamic_table(signed=signed)
    edges = (table[1:] + table[:-1]) / 2
    beside = [np.nextafter(edges, np.float32(to)) for to in (-2, 2)]
    x = np.concatenate([edges, *beside, table, -table[:5], np.float32([-0.0, 1.0])])
    x = x if signed else np.abs(x)
    expected = np.searchsorted(edges, x)
    expected = expected if signed else np.maximum(expected, x > 0)
    np.testing.assert_array_equal(quantise(jnp.asarray(x), len(x), signed=signed)[0], expected)


def test_eight_bit_begins_with_what_zeros_become():
    params = {"w": jnp.ones((3, 70))}
    state = jax.jit(eight_bit_adamw(1e-3, specs=MATRIX, block=32, min_size=0).init)(params)
    for slot, signed in (("mu", True), ("nu", False)):
        codes, scale = quantise(jnp.zeros((3, 70)), 32, signed=signed)
        np.testing.assert_array_equal(getattr(state, slot)["w"], codes)
        np.testing.assert_array_equal(getattr(state, f"{slot}_scale")["w"], scale)


def test_eight_bit_saves_three_quarters_of_the_state_and_spares_the_rest():
    params = decoder()
    params.pop("embed")
    tx = eight_bit_adamw(1e-3, specs=decoder_specs(params))
    assert state_bytes(tx, params) <= 0.27 * state_bytes(adamw(1e-3), params)
    params = decoder()
    mu = jax.eval_shape(eight_bit_adamw(1e-3, specs=decoder_specs(params)).init, params).mu
    wide = {path for path, x in flatten(mu).items() if x.dtype == jnp.float32}
    assert wide == {"embed/embedding", "layers/norm/scale"}
    tx = eight_bit_adamw(1e-3, specs=decoder_specs(params), keep=())
    assert state_bytes(tx, params) <= 0.27 * state_bytes(adamw(1e-3), params)
    with pytest.raises(UserError, match=r"keep: 'embd' is no role.*'embed'"):
        eight_bit_adamw(1e-3, specs=decoder_specs(params), keep=("embd",))


def test_eight_bit_small_parameters_are_as_in_adamw(small, gradients):
    params = small()
    grads = jax.tree.map(lambda *rows: jnp.stack(rows), *(gradients(params, seed) for seed in range(5)))
    got, _ = run(eight_bit_adamw(1e-2, specs=SMALL), params, grads)
    expected, _ = run(adamw(1e-2), params, grads)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("tail", [1.5, 3.0])
def test_eight_bit_follows_adamw_on_heavy_tailed_gradients(tail):
    """Steps stay within Adam's bounds, also where a gradient comes once and then never again."""
    rng = np.random.default_rng(0)
    grads = rng.standard_t(tail, size=(40, 16, 300)).astype("float32")
    grads[5:, :4] = 0.0
    w = rng.normal(size=(16, 300)).astype("float32")
    got, _ = run(eight_bit_adamw(1e-2, specs=MATRIX, weight_decay=0.0), {"w": w}, {"w": grads})
    expected, _ = run(adamw(1e-2, weight_decay=0.0), {"w": w}, {"w": grads})
    steps = np.abs(np.diff(np.asarray(got["w"]), axis=0))
    assert steps.max() < 0.1
    away, moved = np.asarray(got["w"][-1]) - expected["w"][-1], expected["w"][-1] - w
    assert np.sqrt((away**2).mean()) < 0.1 * np.sqrt((moved**2).mean())


@pytest.mark.slow
def test_eight_bit_skips_bit_for_bit():
    params = {"w": jnp.ones((16, 300))}
    tx = guard(eight_bit_adamw(1e-2, specs=MATRIX))
    _, state = tx.update({"w": jnp.cos(jnp.arange(4800.0)).reshape(16, 300)}, tx.init(params), params)
    assert state.inner.mu["w"].dtype == jnp.uint8
    updates, after = tx.update({"w": jnp.full((16, 300), jnp.nan)}, state, params)
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    assert not updates["w"].any()
    check_optimizer(tx, params)
