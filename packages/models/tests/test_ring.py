"""Attention over a sequence that devices share, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attend import CASES, ids_of, places_of

from styrax.core import UserError
from styrax.core.mesh import MeshConfig
from styrax.models import Arch, Attn, Runtime
from styrax.models.layers.attend import attend
from styrax.models.layers.mask import document_mask

SEQ = 128
KEPT = [name for name, case in CASES.items() if case.causal]


def arrays(case):
    rng = np.random.default_rng(0)
    shapes = (2, SEQ, case.heads, 8), (2, case.kv_heads, SEQ, 8), (2, case.kv_heads, SEQ, case.value_dim)
    made = [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]
    return [*made, jnp.asarray(rng.normal(size=case.heads), "float32") if case.sinks else None]


def run(case, name):
    ids = ids_of()
    mask = document_mask(SEQ, jnp.asarray(ids) if case.segments else None)
    place = jnp.asarray(places_of(ids)) if case.segments else jnp.arange(SEQ)[None]
    mask = mask.within(place, place, window=case.window, chunk=case.chunk)

    def objective(query, key, value, sinks):
        options = {"scale": case.scale, "softcap": case.softcap, "sinks": sinks, "implementation": name}
        out = attend(query, key, value, mask, **options)
        return jnp.sum(jnp.sin(out)), out

    which = (0, 1, 2, 3) if case.sinks else (0, 1, 2)
    return jax.jit(jax.value_and_grad(objective, which, has_aux=True))


@pytest.mark.parametrize("ways", [8, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["all", pytest.param("chunk of documents", marks=pytest.mark.slow)])
def test_many_devices_are_one(name, ways):
    case = CASES[name]
    expected = run(case, "reference")(*arrays(case))
    mesh = MeshConfig(axes={"context": ways, "data": 8 // ways}).build()
    with jax.set_mesh(mesh):
        got = run(case, "ring")(*arrays(case))
    pairs = zip(*(jax.tree.leaves((each[0][1], each[1])) for each in (got, expected)), strict=True)
    for ours, theirs in pairs:  # outputs and gradients; the sum of all cancels
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * max(1, float(jnp.abs(theirs).max())))


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_every_mask_on_four_devices(name):
    test_many_devices_are_one(name, 4)


def test_no_device_holds_all_keys_and_auto_takes_it(build):
    """The whole model, with a sequence over devices: the same logits, and no array of all keys or pairs."""
    model = build(num_layers=2, arch=Arch(attn=Attn(window=50)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 64)))
    expected = jax.jit(lambda model: model(tokens))(model)
    with jax.set_mesh(MeshConfig(axes={"context": 8}).build()):
        got = jax.jit(lambda model: model(tokens))(model)

        def hidden(model, ids):
            ids = jax.lax.with_sharding_constraint(ids, jax.sharding.PartitionSpec(None, "context"))
            return model.hidden(model.blocks(), ids).x

        text = jax.jit(hidden).lower(model, tokens).compile().as_text()
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert "collective-permute" in text
    assert "64,64]" not in text


def test_where_it_cannot_it_refuses(build):
    tokens = jnp.zeros((1, 12), int)
    with pytest.raises(UserError, match="expected an axis 'context' of 2 devices or more, got 1"):
        build(runtime=Runtime(attention="ring"))(tokens)
    with jax.set_mesh(MeshConfig(axes={"context": 8}).build()):
        with pytest.raises(UserError, match="seq: expected a multiple of 16, and as many keys, got 12"):
            build(runtime=Runtime(attention="ring"))(tokens)
        assert build()(tokens).shape == (1, 12, 23)
