"""Layers in stages: what each schedule needs of memory and of arithmetic, as compiled for eight CPU devices.

python tools/benchmarks/pipeline_memory.py [--quick]

Four stages by two ways of data; a model of 32 layers, eight to a stage, and a gradient of its loss. A microbatch has
four rows on each way, one for each stage. Nothing is run. Temporary memory is the compiler's, of one device, beside
arguments and results. Arithmetic is of the matrix products, each as often as its loop runs, counted in the traced
program, relative to GPipe without recomputation; it includes the ticks in which a stage waits, which compute too.
"""

from __future__ import annotations

import argparse
import os
from importlib.metadata import version
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from styrax.core import DEFAULT_RULES
from styrax.core.mesh import MeshConfig, shardings
from styrax.models import DecoderConfig, Runtime
from styrax.train.plan.flops import count_flops

AXES = {"data": 2, "stage": 4}
FULL = {"num_layers": 32, "embed_dim": 256, "num_heads": 4, "mlp_dim": 1024}
QUICK = {"num_layers": 8, "embed_dim": 32, "num_heads": 2, "mlp_dim": 64}
SCHEDULES = {"gpipe": {}, "gpipe, recompute_stages": {"recompute_stages": True}, "1f1b": {"schedule": "1f1b"}}


def measure(sizes: dict[str, Any], length: int, microbatches: int, remat: Any, **runtime: Any) -> tuple[int, float]:
    """Temporary bytes of a device, and the arithmetic of a stage."""
    config = DecoderConfig(**sizes, remat=remat, scan="on", runtime=Runtime(microbatches=microbatches, **runtime))
    mesh = MeshConfig(axes=AXES).build()
    empty = nnx.eval_shape(lambda: config.build(vocab_size=256, rngs=nnx.Rngs(0)))
    rules = {**DEFAULT_RULES, "vocab": ()}
    placed = shardings(empty, config.logical_axes(), rules, mesh)
    model = jax.tree.map(lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to), empty, placed)
    graph, params = nnx.split(model)
    rows = NamedSharding(mesh, PartitionSpec(("data", "stage")))
    tokens = jax.ShapeDtypeStruct((8 * microbatches, length), "int32", sharding=rows)

    def loss(params: Any, tokens: Any) -> Any:
        term = nnx.merge(graph, params).losses(tokens, tokens, jnp.ones(tokens.shape))["loss"]
        return term.total / term.weight

    gradient = jax.value_and_grad(loss)
    with jax.set_mesh(mesh):
        program = jax.jit(gradient).lower(params, tokens).compile()
        flops = count_flops(gradient, params, tokens)
    memory = program.memory_analysis()
    assert flops is not None
    assert memory is not None
    return memory.temp_size_in_bytes, flops


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: only whether the program runs")
    quick = parser.parse_args().quick
    counts, length, sizes = ((4,), 8, QUICK) if quick else ((8, 16, 32), 128, FULL)
    print(f"jax {jax.__version__}, flax {version('flax')}, {AXES}, {sizes}, {length} tokens a row")
    print(f"{'schedule':<24} remat  " + "".join(f"  M={count:<2} MiB  FLOPs" for count in counts))
    plain: dict[int, float] = {}
    for remat in ("none", "block"):
        for name, runtime in SCHEDULES.items():
            cells = []
            for count in counts:
                temporary, flops = measure(sizes, length, count, remat, **runtime)
                plain.setdefault(count, flops)
                cells.append(f"  {temporary / 2**20:8.1f}  {flops / plain[count]:5.2f}")
            print(f"{name:<24} {remat:<5}  " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
