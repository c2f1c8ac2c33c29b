import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from styrax.core import UserError
from styrax.core.testing import check_iterator
from styrax.data import LMData

EIGHT = """
    import sys
    import jax, numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    from styrax.data import LMData

    data = LMData(sys.argv[1] if len(sys.argv) > 1 else STORE, seed=0, seq_len=32, batch_size=16, held_out=0.1)
    assert jax.device_count() == 8
    asked = []

    class Watched:
        fingerprint, settings, num_steps = data.fingerprint, data.settings, None
        specs, spec = data.specs, data.spec
        def batch(self, step, rows=None):
            asked.append((step, rows))
            return data.batch(step, rows)

    from styrax.data import Loader
    for shape in [(8, 1), (4, 2), (2, 4), (1, 8)]:
        devices = np.array(jax.devices()).reshape(shape)
        mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
        for spec in [P("data"), P("data", "context"), P(("data", "context")), P(None, "context"), P()]:
            sharding = NamedSharding(mesh, spec)
            asked.clear()
            with Loader(Watched(), step=3, sharding=sharding, prefetch=0) as loader:
                batch = next(loader)
            reference = data.batch(3)
            assert batch.keys() == reference.keys()
            for name, array in batch.items():
                assert array.shape == (16, 32) and array.dtype == reference[name].dtype
                assert array.sharding.is_equivalent_to(sharding, 2)
                np.testing.assert_array_equal(np.asarray(array), reference[name])
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), reference[name][shard.index])
            # Each stretch of rows was made once, and is no larger than a shard.
            rows = 16 // np.prod([mesh.shape[a] for a in np.ravel([spec[0]]) if a] or [1]) if len(spec) else 16
            assert len(asked) == len(set(map(str, asked))) == 16 // rows, (shape, spec, asked)
            assert all(r.stop - r.start == rows for _, r in asked), (shape, spec, asked)
            with data.loader(sharding=sharding, prefetch=2) as loader:
                for step, batch in zip(range(4), loader):
                    np.testing.assert_array_equal(np.asarray(batch["tokens"]), data.batch(step)["tokens"])
    print("done")
"""


def test_eight_devices_in_any_mesh_equal_the_reference(store, run_python):
    code = EIGHT.replace("STORE", repr(str(store.path)))
    done = run_python(code, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.stdout == "done\n"


@pytest.fixture
def sharding():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("data"))


def test_conformance_with_a_sharding(store, sharding):
    data = LMData(store, seq_len=16, batch_size=4, held_out=0.1)
    check_iterator(lambda: data.loader(sharding=sharding), batches=4)
    check_iterator(lambda: data.loader(sharding=SingleDeviceSharding(jax.devices()[0])), batches=2)


def test_a_batch_that_does_not_divide(store):
    class Four:
        def shard_shape(self, shape):
            raise ValueError("dimension 0 of 6 is not divisible by 4")

    data = LMData(store, seq_len=16, batch_size=6, held_out=0.1)
    with pytest.raises(UserError, match=r"(?s)6 x 16.*not divisible.*choose a batch_size"):
        data.loader(sharding=Four())
