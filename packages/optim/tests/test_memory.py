"""Bytes that are counted against bytes that are there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import CASES
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core import registry
from styrax.core.tree import flatten
from styrax.optim import memory_table

PARAMS = {"embed": {"embedding": jnp.ones((16, 8))}, "layers": {"mlp": {"kernel": jnp.ones((2, 8, 8))}}}
PARAMS |= {"head": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}}
PARAMS["layers"]["norm"] = {"scale": jnp.ones((2, 8))}


@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_what_init_makes(name):
    tx = CASES[name](PARAMS)
    table = memory_table(tx, jax.eval_shape(lambda: PARAMS))
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, PARAMS))
    assert table.bytes == sum(np.prod(x.shape, dtype=int) * x.dtype.itemsize for x in leaves)
    assert sum(slot.arrays for slot in table) == len(leaves)
    assert table.parameters == sum(x.nbytes for x in jax.tree.leaves(PARAMS))


def test_small_states_are_small():
    """For a matrix of the size that they are for; counted, so it holds for any."""
    params = {"layers": {"up": {"kernel": jax.ShapeDtypeStruct((4, 1024, 4096), "float32")}}}

    def weigh(kind):
        return memory_table(registry.resolve("styrax.optim", kind)().build(params, steps=1), params).bytes

    adamw = weigh("adamw")
    assert weigh("eight_bit_adamw") <= 0.27 * adamw
    assert weigh("adam_mini") <= 0.55 * adamw
    assert weigh("lion") <= 0.51 * adamw
    assert weigh("adafactor") <= 0.01 * adamw


def test_one_device_holds_its_part():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    there = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {"w": jax.ShapeDtypeStruct((16, 4), "float32", sharding=there)}
    table = memory_table(CASES["adamw"](params), params)
    slots = {slot.name: (slot.bytes, slot.device_bytes) for slot in table}
    assert slots == {"count": (4, 4), "learning_rate": (4, 4), "mu": (256, 32), "nu": (256, 32)}
    assert table.device_bytes == 72
    assert "bytes a device" in str(table)
    assert "device" not in str(memory_table(CASES["adamw"](params), {"w": jax.ShapeDtypeStruct((16, 4), "float32")}))


def test_a_state_without_arrays():
    import optax

    table = memory_table(optax.sgd(0.1), PARAMS)
    assert (len(table), table.bytes) == (0, 0)
    assert "state 0 bytes" in str(table)
    assert flatten(optax.sgd(0.1).init(PARAMS)) == {}
