"""Saved on one layout of devices, restored on any other."""

from pathlib import Path

import pytest

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


UNEVEN = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import jax
import numpy as np
import peers
import xxhash
from jax.sharding import NamedSharding, PartitionSpec as P
from styrax.checkpoint import CheckpointConfig, CheckpointError, Store

directory, config = Path(sys.argv[2]), CheckpointConfig(pack_below=int(sys.argv[4]), profile=sys.argv[3])
values = peers.values(1)


def likes(devices):
    where = peers.shardings(jax.devices()[:devices])
    return {name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where[name]) for name, v in values.items()}


def same(got):
    for name, value in values.items():
        assert got[name].dtype == value.dtype and np.asarray(got[name]).tobytes() == value.tobytes(), name


with config.build(directory) as store:
    store.save(1, peers.items(1))
    store.wait()
    manifest = store.manifest(1)
    # The digests are those of the numpy data, and the shards are the whole of it.
    split = 0
    for leaf in manifest.items["params"].leaves:
        value = values[leaf.path]
        if leaf.digest is not None:
            assert leaf.digest == xxhash.xxh3_128_hexdigest(value.tobytes()), leaf
            continue
        seen = np.zeros(value.shape, np.int8)
        for shard in leaf.shards:
            box = tuple(map(slice, shard.start, shard.stop))
            seen[box] += 1
            assert shard.digest == xxhash.xxh3_128_hexdigest(value[box].tobytes()), leaf
        assert (seen == 1).all() and len(leaf.shards) > 1, leaf
        split += 1
    assert split == (6 if sys.argv[4] == "1" else 0), split
    for devices in (8, 6, 4, 2, 1):
        got = store.restore(1, {"params": likes(devices)})["params"]
        assert {name: got[name].sharding for name in got} == {n: like.sharding for n, like in likes(devices).items()}
        same(got)
    # The mesh turned, and replicated.
    turned = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for spec in (P("x"), P(None, "y"), P()):
        like = jax.ShapeDtypeStruct((24, 48), np.float32, sharding=NamedSharding(turned, spec))
        got = store.restore(1, {"params": {"even": like}}, on_extra="drop")["params"]["even"]
        assert got.sharding == like.sharding and np.asarray(got).tobytes() == values["even"].tobytes()
    same(store.restore(1, {"params": values})["params"])
    same(store.restore(1, {"params": None})["params"])
# A flipped bit is noticed on any layout.
flipped = noticed = 0
for name, file in manifest.files.items():
    if not name.startswith("orbax/params/" if sys.argv[4] == "1" else "aux/leaves") or file.size < 64 or "/.z" in name:
        continue
    path = directory / "00000001" / name
    before = path.read_bytes()
    damaged = bytearray(before)
    damaged[len(before) // 3] ^= 8
    path.write_bytes(damaged)
    flipped += 1
    for like in (likes(8), likes(6), likes(1), values, None)[flipped % 2 :: 2]:
        try:
            got = Store(directory, config, read_only=True).restore(1, {"params": like})["params"]
        except CheckpointError as error:
            assert "is damaged" in str(error)
            noticed += 1
        else:
            same(got)  # it is a file that says nothing of values
    path.write_bytes(before)
least = {"local": 40, "shared": 4}[sys.argv[3]] if sys.argv[4] == "1" else 2
assert flipped and noticed >= least, (flipped, noticed)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "pack_below"), [("local", 1), ("shared", 1), ("local", 2**20)])
def test_uneven_shapes_digests_and_flipped_bits(profile, pack_below, tmp_path, run_python):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = run_python(UNEVEN, Path(__file__).parent, tmp_path / "run", profile, pack_below, env=env)
    assert done.stdout == "done\n", done.stderr[-3000:]
