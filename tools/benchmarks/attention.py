"""Attention on a CPU: what "auto" takes, `jax.nn.dot_product_attention`, and torch's `scaled_dot_product_attention`.

python tools/benchmarks/attention.py [--rounds 10]

Causal, forward and with gradients, of the same numbers, in turn on all cores. Printed are medians of the ratios of time
within a round, above 1 where ours is faster, and the bytes that ours and `jax.nn` need besides arguments and results.
torch is not part of the workspace: put it on PYTHONPATH, else it is n/a.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from styrax.models.layers.attend import attend
from styrax.models.layers.mask import document_mask
from styrax.train.machine import keep_freed_memory

SHAPES = ((8, 256, 6, 64), (4, 512, 8, 64), (2, 1024, 8, 64), (1, 2048, 8, 64))
"""Rows, tokens, heads, width."""
PAUSE = 0.05


def ours(query: Any, key: Any, value: Any) -> Any:
    """Arrays `[rows, tokens, heads, width]`."""
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    return attend(query, key, value, document_mask(query.shape[1]))


def jax_nn(query: Any, key: Any, value: Any) -> Any:
    """The same."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def in_jax(function: Callable[..., Any], arrays: list[np.ndarray], dtype: str) -> tuple[dict[str, Any], int]:
    """What to call for either direction, and the bytes for both."""
    *given, back = (jnp.asarray(array, dtype) for array in arrays)

    def both(back: Any, *given: Any) -> Any:
        out, vjp = jax.vjp(function, *given)
        return out, vjp(back)

    forward, whole = jax.jit(function), jax.jit(both).lower(back, *given).compile()
    calls = {
        "forward": lambda: jax.block_until_ready(forward(*given)),
        "with gradients": lambda: jax.block_until_ready(whole(back, *given)),
    }
    memory: Any = whole.memory_analysis()
    return calls, memory.temp_size_in_bytes


def in_torch(arrays: list[np.ndarray], dtype: str) -> dict[str, Any] | None:
    """The same in torch, if it is there."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    *given, back = (torch.tensor(array).to(getattr(torch, dtype)) for array in arrays)
    given = [array.requires_grad_() for array in given]

    def run() -> Any:
        parts = (array.transpose(1, 2) for array in given)
        return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)

    def forward() -> Any:
        with torch.no_grad():
            return run()

    return {"forward": forward, "with gradients": lambda: torch.autograd.grad(run(), given, back)}


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    keep_freed_memory()
    print(f"jax {version('jax')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        arrays = [rng.normal(size=shape).astype("float32") for _ in range(4)]
        for dtype in ("float32", "bfloat16"):
            own, own_bytes = in_jax(ours, arrays, dtype)
            plain, plain_bytes = in_jax(jax_nn, arrays, dtype)
            works = {"ours": own, "jax.nn": plain, "torch": in_torch(arrays, dtype)}
            print(f"\n{shape} {dtype}: {own_bytes / 2**20:.0f} MiB, jax.nn {plain_bytes / 2**20:.0f} MiB")
            for what in own:
                took: dict[str, list[float]] = {name: [] for name in works}
                for _ in range(rounds + 1):
                    for name, calls in works.items():
                        if calls is None:
                            continue
                        time.sleep(PAUSE)
                        calls[what]()
                        begin = time.perf_counter()
                        calls[what]()
                        took[name].append(time.perf_counter() - begin)
                line = f"  {what:<15} {1e3 * statistics.median(took['ours'][1:]):7.1f} ms"
                for name in ("jax.nn", "torch"):
                    ratios = [theirs / own for own, theirs in zip(took["ours"][1:], took[name][1:])]
                    line += f", {name} / ours {statistics.median(ratios):.2f}" if ratios else f", {name} n/a"
                print(line, flush=True)


if __name__ == "__main__":
    main()
