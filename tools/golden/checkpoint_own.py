"""Writes small checkpoints of this version, which every later version has to read: packages/checkpoint/tests.

    uv run --locked python tools/golden/checkpoint_own.py

makes packages/checkpoint/tests/golden/own-2.zip, where 2 is the version of the manifest; run it anew only when that
changes, and keep the old file. What they hold is told by a rule that the test has again, in plain numpy: array number
n counts 0, 1, 0, 1, ... from n modulo 2, cast to its dtype.
"""

import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.checkpoint import CheckpointConfig

OUT = Path(__file__).parents[2] / "packages/checkpoint/tests/golden/own-2.zip"
DTYPES = ("bool", "int8", "int32", "uint16", "float16", "float32", "float64", "complex64", "bfloat16", "int4", "uint4")
DTYPES += ("float8_e4m3fn", "float8_e5m2")


class Iterator:
    """A position."""

    def get_state(self):
        return {"step": 7, "seed": [1, 2]}

    def set_state(self, state):
        pass


def array(number: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count) % 2 + number % 2).reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))


def items() -> dict:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, PartitionSpec("x", "y"))
    return {
        "dtypes": {name: array(number, (6, 8), name) for number, name in enumerate(DTYPES)},
        "params": {
            "layers": [{"w": jax.device_put(array(number, (8, 12), "float32"), spread)} for number in range(2)],
            "a.b/c": array(3, (4, 16), "float32"),
            "empty": np.zeros((0, 3), np.float32),
            "ints": {5: (array(4, (64,), "int32"), None), 11: array(6, (3,), "int8")},
        },
        "zipped": {"w": array(5, (32, 8), "float32")},
        "rng": {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2)},
        "python": {"n": 3, "x": 0.5, "c": 1 + 2j, "t": "text", "b": b"\x00\xff", "f": np.float32(2.5)},
        "data": Iterator(),
        "run": {"name": "golden", "list": [1, None, {"a": True}]},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for profile in ("local", "shared"):
            for pack_below in (1, 2**20):
                config = CheckpointConfig(profile=profile, pack_below=pack_below, compress=("zipped",))
                with config.build(Path(folder) / f"{profile}-{pack_below}") as store:
                    store.save(12, items(), metrics={"loss": 0.25}).committed()
        shutil.make_archive(str(OUT.with_suffix("")), "zip", folder)


if __name__ == "__main__":
    main()
