"""Saved on one layout of devices, restored on any other."""

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from styrax.checkpoint import CheckpointConfig

directory = sys.argv[1]
assert len(jax.devices()) == 8


def mesh(*shape):
    return jax.make_mesh(shape, tuple("xy"[: len(shape)]), axis_types=(AxisType.Auto,) * len(shape))


values = {
    "rows": np.arange(64.0 * 48, dtype=np.float32).reshape(64, 48),
    "half": np.arange(64 * 4).reshape(64, 4).astype(jnp.bfloat16),
    "replicated": np.arange(16, dtype=np.int32),
    "scalar": np.float32(3),
}
specs = {"rows": P("x"), "half": P("x"), "replicated": P(), "scalar": P()}
donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
pair = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[3:5])
one = SingleDeviceSharding(jax.devices()[5])


def check(directory, pack_below):
    arrays = {name: jax.device_put(values[name], NamedSharding(mesh(8), spec)) for name, spec in specs.items()}
    keys = jax.device_put(jax.random.split(jax.random.key(1), 16), NamedSharding(mesh(8), P("x")))
    with CheckpointConfig(pack_below=pack_below).build(directory) as store:
        store.save(1, {"params": arrays, "keys": {"k": keys}})
        jax.block_until_ready(donate(arrays))
        store.wait()
        where = {leaf.where for leaf in store.manifest(1).items["params"].leaves}
        assert where == ({"packed"} if pack_below > 1 else {"orbax"}), where
        grid = {"rows": P("x", "y"), "half": P("y", "x"), "replicated": P(("x", "y")), "scalar": P()}
        for devices, layout in ((mesh(4, 2), grid), (pair, specs), (mesh(8), specs), (mesh(2, 4), grid)):
            like = {
                path: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(devices, layout[path]))
                for path, value in values.items()
            }
            got = store.restore(1, {"params": like})["params"]
            for path, value in values.items():
                assert got[path].sharding == like[path].sharding, path
                assert got[path].dtype == value.dtype
                assert np.asarray(got[path]).tobytes() == value.tobytes(), path
        on_one = {path: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=one) for path, value in values.items()}
        for like, device in ((on_one, 5), (jax.eval_shape(lambda: values), 0), (None, None)):
            got = store.restore(1, {"params": like})["params"]
            for path, value in values.items():
                assert np.asarray(got[path]).tobytes() == value.tobytes(), path
                if device is None:
                    assert not isinstance(got[path], jax.Array)
                else:
                    assert got[path].devices() == {jax.devices()[device]}
        for sharding in (NamedSharding(mesh(4, 2), P("y")), NamedSharding(pair, P()), one):
            like = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding)
            got = store.restore(1, {"keys": {"k": like}})["keys"]["k"]
            assert got.sharding.is_equivalent_to(sharding, 1), (got.sharding, sharding)
            assert (np.asarray(jax.random.key_data(got)) == np.asarray(jax.random.key_data(keys))).all()


check(directory + "/orbax", 1)
check(directory + "/packed", 2**20)
print("done")
"""


def test_any_layout_to_any_layout(tmp_path, run_python):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = run_python(SCRIPT, tmp_path, env=env)
    assert done.stdout == "done\n", done.stderr[-3000:]
