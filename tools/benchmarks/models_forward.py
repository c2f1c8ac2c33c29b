"""A decoder's forward pass and training step: ours, written by hand in plain JAX, and transformers with torch.

python tools/benchmarks/models_forward.py [--rounds 5] [--quick]

The same Llama in all three, with the same parameters and tokens, in turn in one process. Forward gives all logits; a
training step is loss and gradients (no optimizer). Ours and the one by hand are compared for the same result first.
Printed are medians of seconds, and medians of the ratios within a round. Then the loss of a large vocabulary: all
logits at once, and piece by piece as `Decoder.losses` does, with the temporary memory of the compiled programs.

torch and transformers are not part of the workspace; put them on PYTHONPATH, else they are n/a.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

os.environ.setdefault("XLA_FLAGS", "")
import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
from flax import nnx

from styrax.core import Policy, tree
from styrax.models import DecoderConfig
from styrax.models.losses import MOST_LOGITS, next_token

SIZES = {"num_layers": 6, "embed_dim": 384, "num_heads": 6, "num_kv_heads": 2, "mlp_dim": 1024, "scan": "off"}
QUICK = {**SIZES, "num_layers": 2, "embed_dim": 64, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 128}


def turns(rounds: int, works: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of each, in turn; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            jax.block_until_ready(work())
            if number:
                found[name].append(time.perf_counter() - begin)
    return found


def report(title: str, found: dict[str, list[float]]) -> None:
    """Print medians, and the ratio of the first to each other."""
    first, *others = found
    print(f"{title}: {first} {statistics.median(found[first]):.4f} s")
    for other in others:
        ratio = statistics.median(ours / theirs for ours, theirs in zip(found[first], found[other]))
        print(f"  {first} / {other}: {ratio:.3f}")


def by_hand(model: Any, config: DecoderConfig) -> Any:
    """The same parameters as the plain program keeps them."""
    flat = tree.flatten(model)
    names = {f"{kind}_norm": f"{kind}_norm/scale" for kind in ("attn", "mlp")}
    names |= {name: f"attn/{name}/kernel" for name in "qkvo"}
    names |= {name: f"mlp/{name}/kernel" for name in ("gate", "up", "down")}
    layers = [
        {name: flat[f"layers/{path}"][layer] for name, path in names.items()} for layer in range(config.num_layers)
    ]
    return {"embed": flat["embed/embedding"], "norm": flat["final_norm/scale"], "layers": layers}


def torch_works(model: Any, config: DecoderConfig, vocab: int, batch: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Forward and step of transformers, if it is there."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return {}
    import tempfile

    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    from styrax.models import save_pretrained

    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder + "/model")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder + "/model", attn_implementation="sdpa")
    tokens, targets = (torch.as_tensor(np.asarray(batch[name])).long() for name in ("tokens", "targets"))

    def forward() -> Any:
        with torch.no_grad():
            return theirs(tokens).logits.float()

    def step() -> Any:
        theirs.zero_grad(set_to_none=True)
        logits = theirs(tokens).logits.float()
        torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1)).backward()

    return {"forward": forward, "step": step}


def compare(dtype: str, rounds: int, quick: bool) -> None:
    """One dtype: parameters and computation."""
    config = DecoderConfig(**(QUICK if quick else SIZES))
    rows, length, vocab = (2, 32, 256) if quick else (8, 256, 4096)
    model = config.build(vocab_size=vocab, rngs=nnx.Rngs(0), policy=Policy(dtype, dtype, "f32"))
    ids = np.random.default_rng(0).integers(1, vocab, (rows, length + 1)).astype(np.int32)
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_mask": np.ones((rows, length), np.float32),
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
    }
    batch = jax.device_put(batch)
    graph, params = nnx.split(model)
    given = {name: batch[name] for name in ("positions", "segment_ids")}

    def ours_loss(params: Any, batch: Any) -> Any:
        term = nnx.merge(graph, params).losses(batch["tokens"], batch["targets"], batch["loss_mask"], **given)["loss"]
        return term.total / term.weight

    shape = plain_jax.Shape(
        config.num_layers,
        config.embed_dim,
        config.num_heads,
        config.kv_heads,
        config.head_width,
        config.mlp_width,
        vocab,
    )
    hand = by_hand(model, config)
    ours_forward = jax.jit(lambda params: nnx.merge(graph, params)(batch["tokens"], **given))
    hand_forward = jax.jit(lambda params: plain_jax.forward(params, batch, shape))
    ours_step = jax.jit(jax.value_and_grad(ours_loss))
    hand_step = jax.jit(jax.value_and_grad(lambda params, batch: plain_jax.loss(params, batch, shape)))
    got, expected = ours_forward(params).reshape(-1, vocab), hand_forward(hand).astype("float32")
    error = float(jnp.abs(got - expected).max() / jnp.abs(expected).max())
    assert error < (1e-4 if dtype == "f32" else 0.1), error
    theirs = torch_works(model, config, vocab, batch)
    for title, one, other in (
        ("forward", lambda: ours_forward(params), lambda: hand_forward(hand)),
        ("step", lambda: ours_step(params, batch), lambda: hand_step(hand, batch)),
    ):
        works = {"ours": one, "by hand": other}
        works |= {"transformers": theirs[title]} if theirs else {}
        report(f"{dtype} {title}", turns(rounds, works))
    if not theirs:
        print("transformers: n/a")


def large_vocabulary(rounds: int, quick: bool) -> None:
    """Loss and gradients of the head alone."""
    rows, length, width, vocab = (1, 64, 16, 4096) if quick else (1, 2048, 256, 131072)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, length, width)), "float32")
    kernel = jnp.asarray(0.02 * rng.normal(size=(width, vocab)), "float32")
    targets, mask = jnp.asarray(rng.integers(0, vocab, (rows, length))), jnp.ones((rows, length))

    def make(most: int) -> Any:
        def loss(kernel: Any, x: Any) -> Any:
            head = {"kernel": kernel}
            term = next_token(
                lambda params, x: x @ params["kernel"], head, x, targets, mask, vocab_size=vocab, most_logits=most
            )["loss"]
            return term.total / term.weight

        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(kernel, x).compile()

    pieces, whole = make(vocab * length // 16 if quick else MOST_LOGITS), make(2**40)
    memory = [program.memory_analysis().temp_size_in_bytes for program in (pieces, whole)]
    found = turns(rounds, {"in pieces": lambda: pieces(kernel, x), "at once": lambda: whole(kernel, x)})
    report(f"loss of {vocab:,} tokens", found)
    print(f"  temporary memory: {memory[0] / memory[1]:.3f} ({memory[0] / 2**20:.0f} and {memory[1] / 2**20:.0f} MiB)")


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes: only whether the program runs")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, flax {version('flax')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for dtype in ("f32", "bf16"):
        compare(dtype, args.rounds, args.quick)
    large_vocabulary(args.rounds, args.quick)


if __name__ == "__main__":
    main()
