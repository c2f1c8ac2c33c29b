import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import Policy
from styrax.models import arch
from styrax.models.layers.attend import attend
from styrax.models.layers.dropout import dropout
from styrax.models.layers.fence import fence, on_cpu, rows
from styrax.models.layers.mask import Mask, document_mask
from styrax.models.layers.norm import Norm
from styrax.models.layers.rope import rotate, rotation

F32 = Policy()


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def heads(batch, seq, count, dim, seed=0):
    return normal(batch, seq, count, dim, seed=seed)


# --- fence


def test_fence_is_the_identity_with_an_identity_gradient():
    x = normal(3, 4)
    assert (fence(x) == x).all()
    weight = normal(3, 4, seed=1)
    assert (jax.grad(lambda x: (fence(x) * weight).sum())(x) == weight).all()
    value, tangent = jax.jvp(fence, (x,), (weight,))
    assert (value == x).all()
    assert (tangent == weight).all()
    assert (jax.vmap(fence)(x) == x).all()


def test_fence_keeps_value_and_cotangent_apart_on_a_cpu():
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sin(fence(x * 2))))(1.0))
    assert text.count("optimization_barrier") == 2


def test_nothing_is_fenced_elsewhere(accelerator):
    assert not on_cpu()
    assert "barrier" not in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sin(fence(x * 2))))(1.0))
    assert rows(normal(2, 3, 4)).shape == (2, 3, 4)


def test_the_mesh_in_scope_decides(accelerator):
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert on_cpu()
        assert rows(normal(2, 3, 4)).shape == (6, 4)


# --- norm


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm_against_float64(scale):
    x = scale * normal(5, 16)
    norm = Norm(16, arch.Norm(), policy=F32)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


def test_norm_of_bfloat16_is_computed_in_float32():
    norm = Norm(256, arch.Norm(), policy=Policy.parse("bf16"))
    x = normal(4, 256).astype("bfloat16")
    exact = Norm(256, arch.Norm(), policy=F32)(x)
    assert norm(x).dtype == jnp.bfloat16
    assert (norm(x) == exact.astype("bfloat16")).all()


# --- rope


@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 500), second=st.integers(0, 500), shift=st.integers(0, 1500))
def test_rotation_depends_on_the_distance_only(first, second, shift):
    query, key = heads(1, 1, 2, 8), heads(1, 1, 2, 8, seed=1)

    def product(a, b):
        turned = rotate(query, rotation(jnp.array([[a]]), 8, 1e4)) * rotate(key, rotation(jnp.array([[b]]), 8, 1e4))
        return turned.sum(-1)

    np.testing.assert_allclose(product(first, second), product(first + shift, second + shift), rtol=1e-3, atol=3e-4)


def test_rotation_against_complex_numbers():
    x, positions = heads(1, 6, 2, 8), np.array([[0, 1, 2, 7, 100, 3]])
    turn = np.exp(1j * positions[0][:, None, None] * 100.0 ** (-np.arange(4) / 4))
    wide = np.asarray(x[0], np.float64)
    expected = (wide[..., :4] + 1j * wide[..., 4:]) * turn
    got = rotate(x, rotation(jnp.asarray(positions), 8, 100.0))[0]
    np.testing.assert_allclose(got, np.concatenate([expected.real, expected.imag], -1), atol=2e-5)


def test_angles_are_float32_for_bfloat16():
    turn = rotation(jnp.array([[4095]]), 64, 1e4)
    assert turn.cos.dtype == jnp.float32
    x = heads(1, 1, 1, 64)
    assert rotate(x.astype("bfloat16"), turn).dtype == jnp.bfloat16
    np.testing.assert_allclose(rotate(x.astype("bfloat16"), turn), rotate(x, turn), atol=0.05)


# --- attention


def reference(query, key, value, allowed):
    """Attend in float64, one query at a time; the keys are `[batch, seq, kv_heads, head_dim]`."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    out = np.zeros_like(query)
    for b, t, h in np.ndindex(query.shape[:3]):
        group = h * key.shape[2] // query.shape[2]
        seen = np.flatnonzero(np.broadcast_to(allowed, (len(query), *allowed.shape[1:]))[b, t])
        if len(seen):
            scores = key[b, seen, group] @ query[b, t, h] / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights @ value[b, seen, group] / weights.sum()
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 3]]])
def test_attention_against_float64(kv_heads, segments):
    query = heads(2, 7, 6, 8)
    key, value = heads(2, 7, kv_heads, 8, seed=1), heads(2, 7, kv_heads, 8, seed=2)
    mask = document_mask(7, None if segments is None else jnp.array(segments))
    got = attend(query, key.swapaxes(1, 2), value.swapaxes(1, 2), mask)
    np.testing.assert_allclose(got, reference(query, key, value, np.asarray(mask.allowed)), atol=2e-6)


def test_grouped_heads_are_repeated_heads():
    query, key, value = heads(1, 5, 6, 8), heads(1, 2, 5, 8, seed=1), heads(1, 2, 5, 8, seed=2)
    mask = document_mask(5)
    repeated = attend(query, key.repeat(3, 1), value.repeat(3, 1), mask)
    np.testing.assert_allclose(attend(query, key, value, mask), repeated, atol=1e-6)


def test_a_row_with_nothing_to_see_is_zero_with_finite_gradients():
    query, key, value = heads(1, 4, 2, 8), heads(1, 2, 4, 8, seed=1), heads(1, 2, 4, 8, seed=2)
    mask = document_mask(4, jnp.array([[0, 1, 1, 0]]))

    def run(query, key, value):
        return attend(query, key, value, mask)

    assert (run(query, key, value)[0, [0, 3]] == 0).all()
    grads = jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1, 2))(query, key, value)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    assert (grads[0][0, [0, 3]] == 0).all()


def test_nan_in_padding_goes_nowhere():
    query, key, value = heads(1, 4, 2, 8), heads(1, 2, 4, 8, seed=1), heads(1, 2, 4, 8, seed=2)
    ids = jnp.array([[1, 1, 1, 0]])
    mask = document_mask(4, ids)._replace(keys=ids != 0)
    bad = [jnp.where(jnp.arange(4)[:, None] == 3, jnp.nan, a) for a in (key, value)]
    assert (attend(query, *bad, mask) == attend(query, key, value, mask)).all()
    grads = jax.grad(lambda *a: attend(*a, mask).sum(), (0, 1, 2))(query, *bad)
    assert all(jnp.isfinite(grad).all() for grad in grads)


def test_bfloat16_scores_are_summed_in_float32():
    query, key, value = (a.astype("bfloat16") for a in (heads(1, 9, 2, 64), heads(1, 2, 9, 64), heads(1, 2, 9, 64)))
    got = attend(query, key, value, document_mask(9))
    exact = attend(*(a.astype("float32") for a in (query, key, value)), document_mask(9))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got, exact, atol=0.02)
    grad = jax.grad(lambda q: attend(q, key, value, document_mask(9)).astype("float32").sum())(query)
    assert grad.dtype == jnp.bfloat16


@pytest.mark.parametrize("seq", [64, 130, 520])
def test_blocks_of_queries_give_what_the_whole_gives(seq, monkeypatch):
    query = heads(1, seq, 2, 4)
    key, value = heads(1, 1, seq, 4, seed=1), heads(1, 1, seq, 4, seed=2)
    mask = document_mask(seq, jnp.asarray(np.arange(seq)[None] // 50 + 1))

    def value_and_grads(name):
        def loss(query, key, value):
            return (attend(query, key, value, mask, implementation=name) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    assert on_cpu()
    text = value_and_grads("auto").lower(query, key, value).as_text()
    assert (f"x{seq}x{seq}xf32" in text) == (seq <= 64)
    got, got_grads = value_and_grads("auto")(query, key, value)
    expected, grads = value_and_grads("reference")(query, key, value)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip(got_grads, grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert f"x{seq}x{seq}xf32" in value_and_grads("auto").lower(query, key, value).as_text()


def test_any_mask_is_allowed():
    query, key, value = heads(1, 3, 2, 4), heads(1, 2, 5, 4, seed=1), heads(1, 2, 5, 4, seed=2)
    allowed = np.array([[[1, 0, 0, 0, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]], bool)
    got = attend(query, key, value, Mask(jnp.asarray(allowed)))
    np.testing.assert_allclose(got, reference(query, key.swapaxes(1, 2), value.swapaxes(1, 2), allowed), atol=2e-6)


# --- dropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(rate):
    x = jnp.full((200, 200), 3.0)
    dropped = dropout(x, rate, jax.random.key(0))
    assert abs(float((dropped == 0).mean()) - rate) < 0.01
    np.testing.assert_allclose(dropped.mean(), 3.0, rtol=0.05)
    assert (dropout(x, 0.0, jax.random.key(0)) == x).all()
    assert (dropout(x, rate, None) == x).all()
    assert dropout(x.astype("bfloat16"), rate, jax.random.key(0)).dtype == jnp.bfloat16
