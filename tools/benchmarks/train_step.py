"""A whole training step: ours, written by hand in plain JAX, and a nanoGPT-style loop in torch, eager and compiled.

python tools/benchmarks/train_step.py [--arch llama|gpt] [--size recipe|10m|50m] [--dtype f32|bf16] [--rounds 10]
    [--learn 300] [--quick] [--torch-python PYTHON]

All have the same decoder with a tied head (llama: RMSNorm, rotary positions, SwiGLU; gpt, which is nanoGPT's: LayerNorm
without bias, learned positions, GELU, and no step by hand), the same first parameters, batches and AdamW (clipping,
decay of matrices, warm-up and cosine). They run in turn on all cores, torch in its own process. A turn is a few steps
in a row, after one that does not count. The text is the source of Python's standard library, one token per byte.
`recipe` has the sizes of nanoGPT's recipe for a CPU. bf16 computes in bfloat16 with float32 parameters: torch by
autocast, as nanoGPT does. Printed are medians of tokens per second, medians of the ratios within a round, and after
`--learn` steps the loss on text that was held out.

torch is not part of the workspace: put it on PYTHONPATH or name an interpreter that has it, else it is n/a.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plain_jax
from flax import nnx

from styrax.core import Policy, tree
from styrax.models import MLP, Arch, DecoderConfig, Norm, Rope
from styrax.optim import AdamW
from styrax.optim.schedules import Cosine
from styrax.train import init_state, make_step, next_token_loss
from styrax.train.machine import keep_freed_memory
from styrax.train.step import split_model

SIZES = {  # layers, width, heads, MLP, tokens in a row, rows, vocabulary
    "recipe": (4, 128, 4, 512, 64, 12, 256),
    "10m": (6, 384, 6, 1024, 256, 8, 256),
    "50m": (8, 704, 11, 1920, 256, 4, 256),
    "quick": (2, 32, 2, 64, 16, 2, 256),
}
PEAK, WARMUP, DECAY, B2 = 1e-3, 20, 0.1, 0.99
PAUSE = 0.2
"""Seconds between turns: threads of the one before may still wait in a spin."""
IN_A_ROW = {"recipe": 8, "10m": 2, "50m": 1, "quick": 2}
"""Steps of a turn that count, after one that does not: training does not pause, and after a pause steps are slow."""
Turn = Callable[[dict[str, np.ndarray]], tuple[float, float]]
"""From a batch, one step's loss and its seconds."""


def text() -> np.ndarray:
    """Bytes of the standard library, files in order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch_of(ids: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows from random places."""
    starts = rng.integers(0, len(ids) - length - 1, rows)
    cut = np.stack([ids[start : start + length + 1] for start in starts]).astype(np.int32)
    return {"tokens": cut[:, :-1], "targets": cut[:, 1:], "loss_mask": np.ones((rows, length), np.float32)}


class Ours:
    """The step of `styrax train`."""

    def __init__(self, config: DecoderConfig, vocab: int, dtype: str, steps: int) -> None:
        model = config.build(vocab_size=vocab, rngs=nnx.Rngs(0), policy=Policy("f32", dtype, "f32"))
        self.first = split_model(model)[1]
        recipe = AdamW(learning_rate=PEAK, b2=B2, weight_decay=DECAY, clip_norm=1.0, schedule=Cosine(warmup=WARMUP))
        tx = recipe.build(self.first, steps=steps)
        self.graph, self.state = init_state(model, tx, key=jax.random.key(0))
        self.step = jax.jit(make_step(self.graph, tx, next_token_loss, metrics=recipe.metrics), donate_argnums=0)
        self.loss = jax.jit(lambda params, batch: next_token_loss(nnx.merge(self.graph, params, {}), batch)["loss"])

    def __call__(self, batch: dict[str, np.ndarray]) -> float:
        """One step, its loss."""
        self.state, report = self.step(self.state, batch)
        return float(report["loss"])

    def held_out(self, batches: list[dict[str, np.ndarray]]) -> float:
        """Mean loss."""
        terms = [self.loss(self.state.params, batch) for batch in batches]
        return sum(float(term.total) for term in terms) / sum(float(term.weight) for term in terms)


class ByHand:
    """The yardstick of `train_overhead.py`, in the better of its two forms."""

    def __init__(self, ours: Ours, config: DecoderConfig, vocab: int, steps: int, *, remat: bool) -> None:
        sizes = (config.num_layers, config.embed_dim, config.num_heads, config.kv_heads, config.head_width)
        self.shape = plain_jax.Shape(*sizes, config.mlp_width, vocab, config.rope.theta, config.arch.norm.eps)
        self.params = plain_jax.from_styrax(ours.first, config.num_layers)
        self.adam = plain_jax.adam_init(self.params)
        hyper = plain_jax.Hyper(PEAK, WARMUP, steps, b2=B2, decay=DECAY)
        self.step = plain_jax.make_step(self.shape, hyper, plain_jax.decays(self.params), plain_jax.fence, remat)

    def __call__(self, batch: dict[str, np.ndarray]) -> float:
        """One step, its loss."""
        rows, length = batch["tokens"].shape
        places = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        whole = {**batch, "positions": places, "segment_ids": np.ones((rows, length), np.int32)}
        self.params, self.adam, loss, _ = self.step(self.params, self.adam, whole)
        return float(loss)


class InTorch:
    """The same model and loop in torch, in a process that takes turns with ours; see `torch_step.py`."""

    def __init__(self, python: str) -> None:
        command = [python, str(Path(__file__).with_name("torch_step.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **asked: Any) -> Any:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(asked, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def begin(self, ours: Ours, config: DecoderConfig, dtype: str, steps: int) -> dict[str, Turn]:
        """Give it the model; what to call for a step, by name."""
        sizes = {
            "heads": config.num_heads,
            "width": config.head_width,
            "layers": config.num_layers,
            "theta": config.rope.theta,
            "eps": config.arch.norm.eps,
            "arch": "gpt" if config.arch.learned_positions else "llama",
        }
        params = {path: np.asarray(leaf) for path, leaf in tree.flatten(ours.first).items()}
        hyper = plain_jax.Hyper(PEAK, WARMUP, steps, b2=B2, decay=DECAY)._asdict()
        labels = ("torch eager", "torch compiled")
        self.ask(params=params, sizes=sizes, dtype=dtype, hyper=hyper, labels=labels)
        return {label: partial(self._step, label) for label in labels}

    def _step(self, label: str, batch: dict[str, np.ndarray]) -> tuple[float, float]:
        return self.ask(label=label, batch=batch)

    def held_out(self, label: str, batches: list[dict[str, np.ndarray]]) -> float:
        """Mean loss."""
        return self.ask(label=label, held_out=batches)


def timed(work: Callable[[dict[str, np.ndarray]], float]) -> Turn:
    """A step of this process."""

    def turn(batch: dict[str, np.ndarray]) -> tuple[float, float]:
        begin = time.perf_counter()
        loss = work(batch)
        return loss, time.perf_counter() - begin

    return turn


def torch_version(python: str) -> str | None:
    """What an interpreter has of torch."""
    code = "from importlib.metadata import version; import torch; print(version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def decoder(name: str, arch: str) -> DecoderConfig:
    """A size of an architecture."""
    layers, width, heads, mlp, length, _, _ = SIZES[name]
    sizes: dict[str, Any] = {"num_layers": layers, "embed_dim": width, "num_heads": heads, "remat": "none"}
    if arch == "llama":
        return DecoderConfig(mlp_dim=mlp, **sizes)
    parts = Arch(norm=Norm(kind="layer"), mlp=MLP(activation="gelu", gated=False), learned_positions=True)
    return DecoderConfig(mlp_dim=4 * width, max_len=length, rope=Rope(kind="none"), arch=parts, **sizes)


def compare(name: str, arch: str, dtype: str, rounds: int, learn: int, ids: np.ndarray, torch: InTorch | None) -> None:
    """One size and dtype."""
    *_, length, rows, vocab = SIZES[name]
    config = decoder(name, arch)
    row = IN_A_ROW[name]
    done = (rounds + 1) * (row + 1)
    steps = max(learn, done)
    ours = Ours(config, vocab, dtype, steps)
    works: dict[str, Turn] = {"ours": timed(ours)}
    if dtype == "f32" and arch == "llama":
        for label, remat in (("by hand", False), ("by hand, recomputed", True)):
            works[label] = timed(ByHand(ours, config, vocab, steps, remat=remat))
    if torch is not None:
        works |= torch.begin(ours, config, dtype, steps)
    count = sum(leaf.size for leaf in jax.tree.leaves(ours.first))
    print(f"\n{name}, {arch}, {dtype}: {count / 1e6:.1f} million parameters, {rows} x {length} tokens")
    split, rng = len(ids) * 9 // 10, np.random.default_rng(0)
    took: dict[str, list[float]] = {label: [] for label in works}
    losses = {}
    for number in range(rounds + 1):  # the first compiles and warms up
        batches = [batch_of(ids[:split], rows, length, rng) for _ in range(row + 1)]
        for label, work in works.items():
            time.sleep(PAUSE)
            (losses[label], _), *counted = [work(batch) for batch in batches]
            took[label].append(statistics.fmean(seconds for _, seconds in counted))
        if number == 0:
            spread = max(losses.values()) - min(losses.values())
            print(f"  loss of the first step {losses['ours']:.4f}; largest difference {spread:.1e}")
    for label, seconds in took.items():
        middle = statistics.median(seconds[1:])
        line = f"  {label:<20} {rows * length / middle:9.0f} tokens/s, {1e3 * middle:8.1f} ms a step"
        if label != "ours":
            ratios = [theirs / own for own, theirs in zip(took["ours"][1:], seconds[1:])]
            low, high = np.quantile(ratios, [0.25, 0.75])
            line += f"; ours is {statistics.median(ratios):.2f} times as fast ({low:.2f} to {high:.2f})"
        print(line, flush=True)
    if learn:
        held_rng = np.random.default_rng(1)
        held = [batch_of(ids[split:], rows, length, held_rng) for _ in range(20)]
        for _ in range(steps - done):
            batch = batch_of(ids[:split], rows, length, rng)
            for label in ("ours", "torch eager"):
                if label in works:
                    works[label](batch)
        found = f"ours {ours.held_out(held):.4f}"
        if torch is not None:
            found += f", torch eager {torch.held_out('torch eager', held):.4f}"
        print(f"  held-out loss after {steps} steps: {found} nats per byte")


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("llama", "gpt"), default="llama")
    parser.add_argument("--size", choices=[name for name in SIZES if name != "quick"], action="append")
    parser.add_argument("--dtype", choices=("f32", "bf16"), action="append")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--learn", type=int, default=0, help="steps before the loss on held-out text is compared")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all of this runs")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch; default: this")
    args = parser.parse_args()
    keep_freed_memory()
    found = torch_version(args.torch_python)
    versions = {name: version(name) for name in ("jax", "flax", "optax", "styrax-train")} | {"torch": found or "n/a"}
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores")
    torch = InTorch(args.torch_python) if found else None
    print(f"load {os.getloadavg()[0]:.1f}")
    ids = text()
    rounds, learn = (2, 5) if args.quick else (args.rounds, args.learn)
    for name in ["quick"] if args.quick else args.size or ["recipe", "10m", "50m"]:
        for dtype in args.dtype or ["f32", "bf16"]:
            compare(name, args.arch, dtype, rounds, learn, ids, torch)


if __name__ == "__main__":
    main()
