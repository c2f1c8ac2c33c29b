"""Our training step against the same maths written by hand in plain JAX, and the host time of the loop.

python tools/benchmarks/train_overhead.py [--rounds 30] [--host-steps 2000] [--shape quickstart|small|wide]

Both steps are compiled in this process and run in turn on the same batches, so that whatever else the machine does
hits both. Printed: the median of the ratios ours / by hand, for the yardstick with and without rematerialisation (the
faster one is its best form here), and the loop's own time a step, on a model so small that XLA takes next to nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import statistics
import time
from typing import Any

import jax
import numpy as np
import plain_jax
from flax import nnx

from styrax.core import Policy
from styrax.models import DecoderConfig
from styrax.optim import AdamW
from styrax.optim.schedules import Cosine
from styrax.train import fit, init_state, make_step, next_token_loss
from styrax.train.hooks import Hook
from styrax.train.step import split_model

SHAPES = {  # layers, width, heads, key-value heads, sequence, batch, vocabulary
    "quickstart": (4, 192, 3, 3, 128, 8, 512),
    "small": (4, 128, 4, 4, 64, 12, 256),
    "wide": (6, 384, 6, 6, 256, 8, 4096),
}


def batches(vocab: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """One batch of random tokens, two documents a row."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, length + 1)).astype(np.int32)
    half = np.arange(length) < length // 2
    positions = np.where(half, np.arange(length), np.arange(length) - length // 2)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((rows, length), np.float32),
        "segment_ids": np.tile(np.where(half, 1, 2).astype(np.int32), (rows, 1)),
        "positions": np.tile(positions.astype(np.int32), (rows, 1)),
    }


def compare(name: str, rounds: int) -> None:
    """Print the ratio for one shape."""
    layers, width, heads, kv_heads, length, rows, vocab = SHAPES[name]
    config = DecoderConfig(num_layers=layers, embed_dim=width, num_heads=heads, num_kv_heads=kv_heads)
    model = config.build(vocab_size=vocab, rngs=nnx.Rngs(0), policy=Policy.parse("f32"))
    recipe = AdamW(learning_rate=1e-3, schedule=Cosine(warmup=10))
    params = split_model(model)[1]
    tx = recipe.build(params, steps=1000)
    batch = jax.device_put(batches(vocab, rows, length))
    graphdef, state = init_state(model, tx, key=jax.random.key(0))
    ours = jax.jit(make_step(graphdef, tx, next_token_loss, metrics=recipe.metrics), donate_argnums=0)

    shape = plain_jax.Shape(
        layers,
        width,
        heads,
        kv_heads,
        config.head_width,
        config.mlp_width,
        vocab,
        config.rope.theta,
        config.arch.norm.eps,
    )
    forms: dict[str, list[Any]] = {}
    for label, remat in (("by hand", False), ("by hand, remat", True)):
        weights = plain_jax.from_styrax(params, layers)
        step = plain_jax.make_step(
            shape, plain_jax.Hyper(1e-3, 10, 1000), plain_jax.decays(weights), plain_jax.fence, remat
        )
        forms[label] = [step, weights, plain_jax.adam_init(weights), []]
    times: list[float] = []
    report, loss = {"loss": jax.numpy.nan}, jax.numpy.nan
    for _ in range(rounds + 2):  # the first two compile and warm up
        begin = time.perf_counter()
        state, report = ours(state, batch)
        report["loss"].block_until_ready()
        times.append(time.perf_counter() - begin)
        for form in forms.values():
            begin = time.perf_counter()
            form[1], form[2], loss, _ = form[0](form[1], form[2], batch)
            loss.block_until_ready()
            form[3].append(time.perf_counter() - begin)
    np.testing.assert_allclose(report["loss"], loss, rtol=1e-3)  # the same maths
    print(f"\n{name}: {layers} layers, width {width}, {rows} x {length} tokens, vocabulary {vocab}")
    print(f"  ours            {1e3 * statistics.median(times[2:]):8.1f} ms a step, median")
    for label, form in forms.items():
        ratios = [a / b for a, b in zip(times[2:], form[3][2:])]
        middle, low, high = statistics.median(ratios), *np.quantile(ratios, [0.25, 0.75])
        print(f"  {label:<15} {1e3 * statistics.median(form[3][2:]):8.1f} ms; ours / {label}: "
              f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})")  # fmt: skip


class Clock(Hook):
    """Notes when the first and the last step's metrics arrive."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None

    def on_step(self, step: int, metrics: Any) -> None:
        """Keep the time."""
        self.last = (step, time.perf_counter())
        self.first = self.first or self.last


class Null:
    """A tracker that drops everything."""

    def log(self, step: int, metrics: Any) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to do."""


def host_time(steps: int) -> None:
    """Print the time a step of the loop around a step that computes next to nothing."""
    config = DecoderConfig(num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=8, remat="none")
    model = config.build(vocab_size=8, rngs=nnx.Rngs(0), policy=Policy.parse("f32"))
    recipe = AdamW()
    params = split_model(model)[1]
    tx = recipe.build(params, steps=steps)
    batch = batches(8, 1, 4)
    graphdef, state = init_state(model, tx, key=jax.random.key(0))
    raw = jax.jit(make_step(graphdef, tx, next_token_loss, metrics=recipe.metrics), donate_argnums=0)
    state, report = raw(state, batch)
    bare = []
    for _ in range(steps):
        begin = time.perf_counter()
        state, report = raw(state, batch)
        report["loss"].block_until_ready()
        bare.append(time.perf_counter() - begin)
    clock = Clock()
    fit(model, tx, itertools.repeat(batch), steps=steps, metrics=recipe.metrics, tracker=Null(), hooks=[clock])
    assert clock.first is not None
    assert clock.last is not None
    loop = (clock.last[1] - clock.first[1]) / (clock.last[0] - clock.first[0])
    print(
        f"\nloop on a tiny model: {1e3 * loop:.3f} ms a step in all; "
        f"the bare jitted step {1e3 * statistics.median(bare):.3f} ms"
    )
    print(f"  host time a step outside XLA is below {1e3 * loop:.3f} ms")


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--host-steps", type=int, default=2000)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "styrax-train")}
    print(f"python {platform.python_version()}, {versions}, {jax.devices()[0].device_kind} x {len(jax.devices())}")
    for name in args.shape or SHAPES:
        compare(name, args.rounds)
    host_time(args.host_steps)


if __name__ == "__main__":
    main()
