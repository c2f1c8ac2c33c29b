"""A whole training step: ours, written by hand in plain JAX, and a nanoGPT-style loop in torch, eager and compiled.

python tools/benchmarks/train_step.py [--size recipe|10m|50m] [--dtype f32|bf16] [--rounds 10] [--learn 300] [--quick]

All have the same decoder (RMSNorm, rotary positions, SwiGLU, tied head), the same first parameters, batches and AdamW
(clipping, decay of matrices, warm-up and cosine), and run in turn in one process on all cores. The text is the source
of Python's standard library, one token per byte. `recipe` has the sizes of nanoGPT's recipe for a CPU. bf16 computes in
bfloat16 with float32 parameters: torch by autocast, as nanoGPT does. Printed are medians of tokens per second, medians
of the ratios within a round, and after `--learn` steps the loss on text that was held out.

torch is not part of the workspace; put it on PYTHONPATH, else it is n/a.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plain_jax
from flax import nnx

from styrax.core import Policy, tree
from styrax.models import DecoderConfig
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
Turn = Callable[[dict[str, np.ndarray]], float]


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


def torch_loop(ours: Ours, config: DecoderConfig, dtype: str, steps: int, *, compiled: bool) -> Any:
    """The same model and loop in torch."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    heads, width, eps = config.num_heads, config.head_width, config.arch.norm.eps
    flat = {path: torch.tensor(np.asarray(leaf)) for path, leaf in tree.flatten(ours.first).items()}

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    class Block(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            for name in "qkvo":
                setattr(self, name, nn.Parameter(flat[f"layers/attn/{name}/kernel"][layer].T.contiguous()))
            for name in ("gate", "up", "down"):
                setattr(self, name, nn.Parameter(flat[f"layers/mlp/{name}/kernel"][layer].T.contiguous()))
            for name in ("attn_norm", "mlp_norm"):
                setattr(self, name, nn.Parameter(flat[f"layers/{name}/scale"][layer].clone()))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            rows, length, dim = x.shape
            h = functional.rms_norm(x, (dim,), self.attn_norm, eps)
            q, k, v = (
                functional.linear(h, kernel).view(rows, length, heads, width).transpose(1, 2)
                for kernel in (self.q, self.k, self.v)
            )
            q, k = rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + functional.linear(y.transpose(1, 2).reshape(rows, length, dim), self.o)
            h = functional.rms_norm(x, (dim,), self.mlp_norm, eps)
            a = functional.silu(functional.linear(h, self.gate)) * functional.linear(h, self.up)
            return x + functional.linear(a, self.down)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Parameter(flat["embed/embedding"].clone())
            self.blocks = nn.ModuleList(Block(layer) for layer in range(config.num_layers))
            self.norm = nn.Parameter(flat["final_norm/scale"].clone())

        def forward(self, tokens: Any, targets: Any) -> Any:
            place = torch.arange(tokens.shape[1])
            angle = place[:, None] * config.rope.theta ** (-torch.arange(width // 2) * 2 / width)
            x, cos, sin = functional.embedding(tokens, self.embed), angle.cos(), angle.sin()
            for block in self.blocks:
                x = block(x, cos, sin)
            logits = functional.linear(functional.rms_norm(x, (x.shape[-1],), self.norm, eps), self.embed)
            return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))

    class Loop:
        def __init__(self) -> None:
            self.model = Model()
            run = torch.compile(self.model) if compiled else self.model
            matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and name != "embed"]
            others = [p for name, p in self.model.named_parameters() if p.ndim < 2 or name == "embed"]
            groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
            self.adam = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, B2), eps=1e-8, fused=True)
            self.hyper, self.count = plain_jax.Hyper(PEAK, WARMUP, steps), 0
            self.run = run

        def _loss(self, batch: dict[str, np.ndarray]) -> Any:
            tokens, targets = (torch.as_tensor(batch[name]).long() for name in ("tokens", "targets"))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                return self.run(tokens, targets)

        def __call__(self, batch: dict[str, np.ndarray]) -> float:
            rise = (self.count + 1) / WARMUP
            part = min(max((self.count - WARMUP) / max(steps - WARMUP, 1), 0), 1)
            fall = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * part))
            for group in self.adam.param_groups:
                group["lr"] = PEAK * (rise if self.count < WARMUP else fall)
            loss = self._loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.adam.step()
            self.adam.zero_grad(set_to_none=True)
            self.count += 1
            return loss.item()

        def held_out(self, batches: list[dict[str, np.ndarray]]) -> float:
            with torch.no_grad():
                return statistics.fmean(self._loss(batch).item() for batch in batches)

    return Loop()


def compare(name: str, dtype: str, rounds: int, learn: int, ids: np.ndarray) -> None:
    """One size and dtype."""
    layers, width, heads, mlp, length, rows, vocab = SIZES[name]
    config = DecoderConfig(num_layers=layers, embed_dim=width, num_heads=heads, mlp_dim=mlp, remat="none")
    steps = max(learn, rounds + 2)
    ours = Ours(config, vocab, dtype, steps)
    works: dict[str, Any] = {"ours": ours}
    if dtype == "f32":
        for label, remat in (("by hand", False), ("by hand, recomputed", True)):
            works[label] = ByHand(ours, config, vocab, steps, remat=remat)
    if importlib.util.find_spec("torch"):
        works["torch eager"] = torch_loop(ours, config, dtype, steps, compiled=False)
        works["torch compiled"] = torch_loop(ours, config, dtype, steps, compiled=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(ours.first))
    print(f"\n{name}, {dtype}: {count / 1e6:.1f} million parameters, {rows} x {length} tokens")
    split, rng = len(ids) * 9 // 10, np.random.default_rng(0)
    took: dict[str, list[float]] = {label: [] for label in works}
    losses = {}
    for number in range(rounds + 2):  # the first two compile and warm up
        batch = batch_of(ids[:split], rows, length, rng)
        for label, work in works.items():
            begin = time.perf_counter()
            losses[label] = work(batch)
            took[label].append(time.perf_counter() - begin)
        if number == 0:
            spread = max(losses.values()) - min(losses.values())
            print(f"  loss of the first step {losses['ours']:.4f}; largest difference {spread:.1e}")
    for label, seconds in took.items():
        middle = statistics.median(seconds[2:])
        line = f"  {label:<20} {rows * length / middle:9.0f} tokens/s, {1e3 * middle:8.1f} ms a step"
        if label != "ours":
            ratios = [theirs / own for own, theirs in zip(took["ours"][2:], seconds[2:])]
            low, high = np.quantile(ratios, [0.25, 0.75])
            line += f"; ours is {statistics.median(ratios):.2f} times as fast ({low:.2f} to {high:.2f})"
        print(line, flush=True)
    if learn:
        held_rng = np.random.default_rng(1)
        held = [batch_of(ids[split:], rows, length, held_rng) for _ in range(20)]
        learners = {label: work for label, work in works.items() if label in ("ours", "torch eager")}
        for _ in range(steps - rounds - 2):
            batch = batch_of(ids[:split], rows, length, rng)
            for work in learners.values():
                work(batch)
        found = ", ".join(f"{label} {work.held_out(held):.4f}" for label, work in learners.items())
        print(f"  held-out loss after {steps} steps: {found} nats per byte")


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[name for name in SIZES if name != "quick"], action="append")
    parser.add_argument("--dtype", choices=("f32", "bf16"), action="append")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--learn", type=int, default=0, help="steps before the loss on held-out text is compared")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all of this runs")
    args = parser.parse_args()
    keep_freed_memory()
    names = [
        name
        for name in ("jax", "flax", "optax", "torch", "styrax-train")
        if importlib.util.find_spec("torch") or name != "torch"
    ]
    print(f"python {platform.python_version()}, { {name: version(name) for name in names} }, {os.cpu_count()} cores")
    print(f"load {os.getloadavg()[0]:.1f}")
    ids = text()
    for name in ["quick"] if args.quick else args.size or ["recipe", "10m", "50m"]:
        for dtype in args.dtype or ["f32", "bf16"]:
            compare(name, dtype, 2 if args.quick else args.rounds, 5 if args.quick else args.learn, ids)


if __name__ == "__main__":
    main()
