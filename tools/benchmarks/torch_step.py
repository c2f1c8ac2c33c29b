"""The nanoGPT-style loop in torch that `train_step.py` compares with, in a process of its own.

It reads pickled requests from stdin and answers each on stdout: first the model, then batches. So torch may be of
another Python than ours, and its threads are not in our process. `train_step.py` starts it; nothing else should.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import time
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

EMBEDDINGS = ("embed", "places")
NORMS = {"llama": functional.rms_norm, "gpt": functional.layer_norm}


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, flat: dict[str, Any], layer: int, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.width, self.eps, self.norm = sizes["heads"], sizes["width"], sizes["eps"], NORMS[sizes["arch"]]
        self.gated = "layers/mlp/gate/kernel" in flat
        for name in "qkvo":
            setattr(self, name, nn.Parameter(flat[f"layers/attn/{name}/kernel"][layer].T.contiguous()))
        for name in ("gate", "up", "down") if self.gated else ("up", "down"):
            setattr(self, name, nn.Parameter(flat[f"layers/mlp/{name}/kernel"][layer].T.contiguous()))
        for name in ("attn_norm", "mlp_norm"):
            setattr(self, name, nn.Parameter(flat[f"layers/{name}/scale"][layer].clone()))

    def forward(self, x: Any, turn: tuple[Any, Any] | None) -> Any:
        """`[rows, length, dim]`, the same."""
        rows, length, dim = x.shape
        h = self.norm(x, (dim,), self.attn_norm, eps=self.eps)
        q, k, v = (
            functional.linear(h, kernel).view(rows, length, self.heads, self.width).transpose(1, 2)
            for kernel in (self.q, self.k, self.v)
        )
        if turn is not None:
            q, k = rotated(q, *turn).to(v.dtype), rotated(k, *turn).to(v.dtype)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.linear(y.transpose(1, 2).reshape(rows, length, dim), self.o)
        h = self.norm(x, (dim,), self.mlp_norm, eps=self.eps)
        if self.gated:
            a = functional.silu(functional.linear(h, self.gate)) * functional.linear(h, self.up)
        else:
            a = functional.gelu(functional.linear(h, self.up))
        return x + functional.linear(a, self.down)


class Model(nn.Module):
    """The decoder, to its mean loss."""

    def __init__(self, flat: dict[str, Any], sizes: dict[str, Any]) -> None:
        super().__init__()
        self.width, self.theta, self.eps, self.norm_of = (
            sizes["width"],
            sizes["theta"],
            sizes["eps"],
            NORMS[sizes["arch"]],
        )
        self.embed = nn.Parameter(flat["embed/embedding"].clone())
        self.places = nn.Parameter(flat["positions/embedding"].clone()) if "positions/embedding" in flat else None
        self.blocks = nn.ModuleList(Block(flat, layer, sizes) for layer in range(sizes["layers"]))
        self.norm = nn.Parameter(flat["final_norm/scale"].clone())

    def forward(self, tokens: Any, targets: Any) -> Any:
        """Tokens and the next ones, `[rows, length]`."""
        place, turn = torch.arange(tokens.shape[1]), None
        x = functional.embedding(tokens, self.embed)
        if self.places is None:
            angle = place[:, None] * self.theta ** (-torch.arange(self.width // 2) * 2 / self.width)
            turn = angle.cos(), angle.sin()
        else:
            x = x + functional.embedding(place, self.places)
        for block in self.blocks:
            x = block(x, turn)
        logits = functional.linear(self.norm_of(x, (x.shape[-1],), self.norm, eps=self.eps), self.embed)
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


class Loop:
    """Clipping, AdamW, a schedule."""

    def __init__(self, asked: dict[str, Any], *, compiled: bool) -> None:
        self.hyper, self.bf16, self.count = asked["hyper"], asked["dtype"] == "bf16", 0
        self.model = Model({path: torch.tensor(leaf) for path, leaf in asked["params"].items()}, asked["sizes"])
        self.run = torch.compile(self.model) if compiled else self.model
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and name not in EMBEDDINGS]
        others = [p for name, p in self.model.named_parameters() if p.ndim < 2 or name in EMBEDDINGS]
        groups = [{"params": matrices, "weight_decay": self.hyper["decay"]}, {"params": others, "weight_decay": 0.0}]
        betas = (self.hyper["b1"], self.hyper["b2"])
        self.adam = torch.optim.AdamW(groups, lr=self.hyper["peak"], betas=betas, eps=self.hyper["eps"], fused=True)

    def loss(self, batch: dict[str, np.ndarray]) -> Any:
        """Of one batch."""
        tokens, targets = (torch.as_tensor(batch[name]).long() for name in ("tokens", "targets"))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return self.run(tokens, targets)

    def step(self, batch: dict[str, np.ndarray]) -> float:
        """One step, its loss."""
        warmup = self.hyper["warmup"]
        part = min(max((self.count - warmup) / max(self.hyper["steps"] - warmup, 1), 0), 1)
        fall = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part))
        for group in self.adam.param_groups:
            group["lr"] = self.hyper["peak"] * ((self.count + 1) / warmup if self.count < warmup else fall)
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.count += 1
        return loss.item()


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints does not get between the answers
    torch.set_num_threads(os.cpu_count() or 1)
    loops: dict[str, Loop] = {}
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if "params" in asked:
            loops = {label: Loop(asked, compiled=label == "torch compiled") for label in asked["labels"]}
            answer: Any = len(loops)
        elif asked.get("held_out"):
            with torch.no_grad():
                answer = float(np.mean([loops[asked["label"]].loss(batch).item() for batch in asked["held_out"]]))
        else:
            begin = time.perf_counter()
            loss = loops[asked["label"]].step(asked["batch"])
            answer = loss, time.perf_counter() - begin
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
