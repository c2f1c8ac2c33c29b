import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from styrax.optim import state_shardings

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from styrax.core.tree import flatten
from styrax.optim import AdamW, state_shardings

specs = {"layers": {"up": {"kernel": P(None, "fsdp", "tensor")}, "norm": {"scale": P(None, None)}},
         "embed": {"embedding": P("tensor", "fsdp")}, "up": {"kernel": P("fsdp", None)}}
shapes = {"layers": {"up": {"kernel": (2, 8, 4)}, "norm": {"scale": (2, 8)}},
          "embed": {"embedding": (4, 8)}, "up": {"kernel": (8, 4)}}
rng = np.random.default_rng(0)
host = jax.tree.map(lambda s: rng.normal(size=s).astype("float32"), shapes, is_leaf=lambda s: type(s) is tuple)

def run(params, make):
    tx = AdamW(learning_rate=1e-2, clip_norm=0.5).build(params, steps=10)
    state = make(tx, params)
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state
    step = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state = step(params, state)
    return params, state

plain, reference = run(jax.tree.map(jnp.asarray, host), lambda tx, p: tx.init(p))

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
    where = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    def make(tx, params):
        derived = state_shardings(tx, params)
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, where)
        assert jax.tree.all(jax.tree.map(lambda a, b: a == b, derived, state_shardings(tx, abstract)))
        assert derived.inner.mu["up"]["kernel"].spec == P("fsdp", None)
        assert derived.inner.nu["layers"]["up"]["kernel"].spec == P(None, "fsdp", "tensor")
        assert derived.inner.count.spec == derived.grad_norm.spec == P()
        state = jax.jit(tx.init, out_shardings=derived)(params)
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, derived))
        return state
    with jax.set_mesh(mesh):
        params, state = run(jax.tree.map(jax.device_put, host, where), make)
    for tree in (params, state.inner.mu, state.inner.nu):
        for (path, x), s in zip(flatten(tree).items(), jax.tree.leaves(where)):
            assert x.sharding.is_equivalent_to(s, x.ndim), (kind, path, x.sharding)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), params, plain)
    np.testing.assert_allclose(state.grad_norm, reference.grad_norm, rtol=1e-6)
print("as expected on", jax.device_count(), "devices")
"""


def test_state_lies_as_its_parameters_on_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "as expected on 8 devices\n"


def test_single_device():
    params = {"w": jnp.ones((2, 2))}
    derived = state_shardings(optax.adam(1e-3), params)
    assert set(jax.tree.leaves(derived)) == {params["w"].sharding}
    jax.jit(optax.adam(1e-3).init, out_shardings=derived)(params)


def test_tree_that_is_one_array():
    x = jnp.ones((2, 2))
    assert jax.tree.leaves(state_shardings(optax.adam(1e-3), x)) == [x.sharding] * 3


def test_factored_state_is_replicated():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    there = NamedSharding(mesh, PartitionSpec("data", None))
    params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=there)}
    derived = state_shardings(optax.adafactor(1e-3), params)
    specs = {tuple(s.spec) for s in jax.tree.leaves(derived)}
    assert specs == {()}


def test_every_parameter_without_a_sharding_is_named():
    params = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"without a NamedSharding.*\n  a: None$"):
        state_shardings(optax.adam(1e-3), params)


def test_parameters_on_two_meshes():
    a, b = (jax.make_mesh((1,), (name,), axis_types=(jax.sharding.AxisType.Auto,)) for name in "ab")
    params = {
        name: jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        for name, mesh in (("x", a), ("y", b))
    }
    with pytest.raises(ValueError, match=r"not lie on one mesh.*\n  x: NamedSharding.*\n  y: NamedSharding"):
        state_shardings(optax.adam(1e-3), params)


def test_abstract_mesh():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    there = NamedSharding(mesh, PartitionSpec("data"))
    derived = state_shardings(optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=there)})
    assert derived[0].mu["w"] == there
    assert derived[0].count == NamedSharding(mesh, PartitionSpec())
