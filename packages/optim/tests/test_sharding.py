import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core.errors import UserError
from styrax.core.tree import flatten
from styrax.optim import guard, state_shardings
from styrax.optim.adafactor import adafactor
from styrax.optim.adam_mini import adam_mini
from styrax.optim.eight_bit import eight_bit_adamw
from styrax.optim.groups import groups
from styrax.optim.kron import kron
from styrax.optim.muon import muon
from styrax.optim.sharding import init
from styrax.optim.soap import soap
from styrax.optim.specs import ParamSpec, specs

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from styrax.core.errors import UserError
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


def meshes(*kinds):
    return [jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2) for kind in kinds]


def placed(mesh, **leaves):
    """Abstract parameters: name -> shape and entries of the spec."""
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*entries)))
        for name, (shape, entries) in leaves.items()
    }


def test_what_is_smaller_than_its_parameter_keeps_the_axes_that_are_left():
    (mesh,) = meshes(AxisType.Auto)
    params = placed(
        mesh,
        w=((8, 16, 512), (None, "a", "b")),
        v=((256, 256), ("a", "b")),
        u=((256, 128), ("a", "b")),
        q=((16, 24), ("b", "a")),
    )
    found = {
        **{name: ParamSpec("matrix", "io") for name in "vuq"},
        "w": ParamSpec("matrix", "sio"),
        "q": ParamSpec("matrix", "io", heads=4),
    }

    def where(tx, params=params):
        return {path: tuple(s.spec) for path, s in flatten(state_shardings(tx, params)).items()}

    mini = where(adam_mini(1e-3, specs=found))
    assert mini["nu/w"] == (None, None, "b") and mini["nu/u"] == (None, "b") and mini["nu/q"] == (None, "a")
    factored = where(adafactor(1e-3, specs=found, min_size=16))
    assert factored["rows/w"] == (None, "a") and factored["columns/w"] == (None, None, "b")
    eight = where(eight_bit_adamw(1e-3, specs=found, block=64, min_size=1))
    assert eight["mu/w"] == eight["nu_scale/w"] == (None, "a", "b")
    assert eight["mu_scale/q"] == ("b",), "one block of the last axis cannot be divided"
    normed = where(muon(1e-3, specs=found, normalize=True))
    assert normed["nu/w"] == (None, None, "b")
    # Of optax's vectors those of a square matrix may be rows or columns.
    plain = where(optax.adafactor(1e-3), {name: params[name] for name in "vu"})
    vectors = {path.split("/", 1)[1]: spec for path, spec in plain.items() if "v_row" in path or "v_col" in path}
    assert vectors == {"v_row/v": (), "v_col/v": (), "v_row/u": ("b",), "v_col/u": ("a",)}
    assert all(spec == () for path, spec in plain.items() if path.endswith("count"))


def test_stacks_of_sides_lie_by_copies_then_by_rows():
    (mesh,) = meshes(AxisType.Auto)
    params = placed(
        mesh,
        square=((8, 16, 16), (None, "a", "b")),
        four=((4, 16, 16), (None, "a", "b")),
        one=((16, 24), ("a", "b")),
        bias=((16,), ("a",)),
    )
    found = specs(params, axes={"square": "sio", "four": "sio"}, roles_by_path={"bias": "vector"})
    wrapped = guard(groups({"all": soap(1e-3, specs=found)}, {"**": "all"}))
    for tx in (soap(1e-3, specs=found), wrapped):
        where = {path.split("left/")[-1]: tuple(s.spec) for path, s in flatten(state_shardings(tx, params)).items()}
        assert where["square"] == (("a", "b"),)
        assert where["four"] == ("a", "b")
        assert where["one"] == (None, ("a", "b"))
    where = flatten(state_shardings(kron(1e-3, specs=found, max_size_triangular=20), params))
    assert tuple(where["right/one"].spec) == (None, ("a", "b")) and tuple(where["mu/square"].spec) == (None, "a", "b")


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_init_makes_the_state_in_its_shards(kind):
    """Each of eight devices has an eighth of what is not small, whatever the parameters' shape has become."""
    (mesh,) = meshes(kind)
    abstract = placed(mesh, w=((8, 16, 64), (None, "a", "b")), v=((64, 64), ("b", "a")))
    params = {name: jax.device_put(jnp.ones(x.shape), x.sharding) for name, x in abstract.items()}
    found = specs(params, axes={"w": "sio"})
    for tx, share in (
        (soap(1e-3, specs=found), 1 / 8),
        (eight_bit_adamw(1e-3, specs=found, block=16, min_size=1), 1 / 8),
        (adam_mini(1e-3, specs=found), 1 / 8 + 0.02),
    ):
        state = init(tx, params)
        leaves = jax.tree.leaves(state)
        total, most = sum(x.nbytes for x in leaves), sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert most <= share * total + 64, (most, total)
        for x, s in zip(leaves, jax.tree.leaves(state_shardings(tx, params)), strict=True):
            assert x.sharding.is_equivalent_to(s, x.ndim)


def test_init_on_one_device():
    params = {"w": jnp.ones((2, 3))}
    state = init(guard(optax.adam(1e-3)), params)
    jax.tree.map(np.testing.assert_array_equal, state, guard(optax.adam(1e-3)).init(params))


def test_every_parameter_without_a_sharding_is_named():
    params = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"without a sharding.*\n  a: None$"):
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


def test_init_on_one_device_compiles_a_step_once():
    """Its arrays are no more committed to the device than the parameters, and NumPy's are as good as any."""
    params = {"w": jnp.ones((4, 2))}
    tx = optax.adam(0.1)
    step = jax.jit(tx.update)
    state = init(tx, params)
    for _ in range(2):
        updates, state = step(params, state, params)
        params = optax.apply_updates(params, updates)
    assert step._cache_size() == 1
    assert init(tx, {"w": np.ones(2, np.float32)})[0].mu["w"].shape == (2,)


def test_a_state_on_no_mesh_is_told_from_one_on_it():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    params = {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, PartitionSpec("fsdp", None)))}
    tx = soap(0.1, specs=specs(params))
    plain = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tx.init(params))
    with pytest.raises(UserError, match=r"lie on no mesh.*make the state by styrax.optim.init"):
        jax.jit(tx.update)(params, plain, params)
