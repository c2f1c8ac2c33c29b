"""Whole matrices on each device: what is moved for it is counted in the compiled program."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from styrax.core import UserError
from styrax.optim import state_shardings
from styrax.optim.kron import kron
from styrax.optim.muon import muon
from styrax.optim.shampoo import shampoo
from styrax.optim.soap import soap
from styrax.optim.specs import specs
from styrax.optim.spreading import mesh_of, spread

MAKE = {
    "muon": lambda found: muon(0.02, specs=found),
    "soap": lambda found: soap(0.02, specs=found),
    "shampoo": lambda found: shampoo(0.02, specs=found),
    "kron": lambda found: kron(0.02, specs=found),
}


def compiled(make, mesh, m, n, split, *, apart):
    """Compile an update of eight matrices as `init` lays them; nothing is said about where results lie."""
    shapes = {f"w{i}": (m, n) for i in range(8)} if apart else {"layers": {"w": (8, m, n)}}
    where = NamedSharding(mesh, P(*split) if apart else P(None, *split))
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=where), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    tx = make(specs(params))
    places = state_shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, params), places
    )
    done = jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, state, params).compile()
    return done, where, places, state


#: Most all-to-alls for a stacked leaf, whose sides lie with their copies, and for eight, whose sides are split too.
MOVES = {"muon": (2, 2), "soap": (5, 13), "shampoo": (3, 11), "kron": (2, 6)}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind", "split", "apart"),
    [
        ("shampoo", AxisType.Auto, ("fsdp", None), False),
        *(
            pytest.param(name, kind, split, apart, marks=SLOW)
            for name in ("soap", "shampoo", "kron")
            for kind, split in ((AxisType.Auto, (None, "fsdp")), (AxisType.Explicit, ("fsdp", None)))
            for apart in (False, True)
        ),
    ],
    ids=str,
)
def test_collectives_of_preconditioners(name, kind, split, apart):
    """Each array of the batch is moved once; else numbers for each matrix are added up, and nothing is gathered."""
    m, n = 16, 32
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    done, where, places, state = compiled(MAKE[name], mesh, m, n, split, apart=apart)
    found = collectives(done.as_text())
    moved = [size for what, size in found if what == "all-to-all"]
    assert {what for what, _ in found} <= {"all-to-all", "all-reduce"}
    assert len(moved) <= MOVES[name][apart]
    # An eighth of each matrix, and of each side where these are not with their copies already.
    sides = {"soap": 4, "shampoo": 4, "kron": 2}[name] * (m * m + n * n) if apart else 0
    assert sum(moved) <= 4 * (MOVES[name][0] * m * n + sides)
    assert sum(size for what, size in found if what == "all-reduce") <= 8 * 4 * 4
    updates, after = done.output_shardings
    assert all(s.is_equivalent_to(where, 2 + (not apart)) for s in jax.tree.leaves(updates))
    for got, expected, x in zip(jax.tree.leaves(after), jax.tree.leaves(places), jax.tree.leaves(state)):
        assert got.is_equivalent_to(expected, x.ndim), (got, expected)


@pytest.mark.parametrize("name", ["muon", *(pytest.param(name, marks=SLOW) for name in ("soap", "shampoo", "kron"))])
def test_nothing_moves_where_layers_are_split(name):
    """Then every device has whole matrices, though under `jax.jit` nobody but the compiler knows."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P("fsdp"))
    params = {"layers": {"w": jax.ShapeDtypeStruct((8, 16, 32), jnp.float32, sharding=where)}}
    tx = MAKE[name](specs(params))
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        state_shardings(tx, params),
    )
    assert not collectives(jax.jit(tx.update).lower(params, state, params).compile().as_text())


@pytest.mark.parametrize("copies", [8, 3, 12, 1])
def test_spread_is_the_function(copies):
    """Whatever the number of copies, and whether what it needs from outside is traced."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(copies, 4, 2)).astype(np.float32)
    there = jax.device_put(x, NamedSharding(mesh, P(None, "a", "b")))
    seen = []

    @jax.jit
    def run(x, c):
        def f(x, y):
            seen.append(x.shape[0])
            return c * x, y + jnp.sum(x, axis=(1, 2))

        return spread(f, home=1)(x, jnp.zeros(x.shape[0]))

    got, sums = run(there, 2.0)
    np.testing.assert_array_equal(got, 2 * x)
    np.testing.assert_allclose(sums, x.sum((1, 2)), rtol=1e-5, atol=1e-6)
    # Twelve copies are padded to sixteen; one is given to all.
    assert seen == [{8: 1, 3: 1, 12: 2, 1: 1}[copies]]


def test_mesh_is_found():
    auto = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones((8, 2, 2), np.float32), NamedSharding(auto, P("a")))
    found = []
    jax.jit(lambda x: found.append(mesh_of([jnp.zeros(3), 2 * x])))(x)
    assert found[0].axis_names == ("a",) and mesh_of([x]) == auto
    assert mesh_of([np.ones(3), jnp.ones(3)]) is None
    np.testing.assert_array_equal(spread(lambda x: 2 * x)(x), 2 * np.ones((8, 2, 2)))
    with pytest.raises(UserError, match=r"stack_axes: the mesh has no data; it has a"):
        spread(lambda x: x, auto, ["data"])(np.ones((8, 2, 2)))


TPU = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh
from collectives import collectives
from styrax.optim.muon import muon
from test_spreading import compiled

devices = np.array(get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
for apart in (True, False):
    for split in (("fsdp", None), (None, "fsdp")):
        done, *_ = compiled(lambda found: muon(0.02, specs=found), mesh, 256, 1024, split, apart=apart)
        found = collectives(done.as_text())
        print(apart, split, sorted({name for name, _ in found}), len(found), sum(size for _, size in found))
"""


@pytest.mark.slow
def test_collectives_of_muon_on_tpu():
    """Compiled for eight chips that are not there: as few collectives as on the host."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    here = str(Path(__file__).parent)
    run = subprocess.run([sys.executable, "-c", TPU, here], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert "['all-to-all']" in line, line
        number, size = (int(word) for word in line.split()[-2:])
        assert number <= 3 and size <= 4 * 2**20, line
