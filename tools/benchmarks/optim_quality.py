"""Steps that each optimizer needs to reach AdamW's final loss, every one with its learning rate tuned over one grid.

python tools/benchmarks/optim_quality.py [--steps 300] [--rates 5e-4 1e-3 2e-3 4e-3] [--optimizers NAME ...]
    [--out FILE]

A decoder of 3.3 million parameters is trained on the corpus of the quickstart (the source of Python's standard library,
byte-level BPE of 512 entries), on the same batches from the same weights whatever the optimizer; what is compared is
the loss on held-out text. Each rate is a run over the whole schedule. The target is the last loss of AdamW's best run;
the table says when the best run of each optimizer is below it for the first time ("n/a": not in this many steps).
A rate at the edge of the grid is marked: a wider grid might be better for it.

Each finished run is appended to FILE, so that an interrupted program goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from styrax.core import Policy
from styrax.core.config import find_schema, read_config
from styrax.models import DecoderConfig
from styrax.optim import Cosine, adamw, describe, guard, muon, schedule_free, soap, specs
from styrax.train import next_token_loss
from styrax.train.compose import make_dataset
from styrax.train.step import split_model

MODEL = DecoderConfig(num_layers=4, embed_dim=256, num_heads=4)
EVERY = 10
"""Steps between two looks at the held-out text."""


def optimizers(params: Any, steps: int) -> dict[str, Callable[[], Any]]:
    """Name -> how to make it, for these parameters; the rate is given to `update`."""
    axes = specs(params)
    decay = {row.path: row.decay for row in describe(params)}
    cosine = Cosine().build(steps=steps)

    def warm(t: Any) -> Any:
        return jnp.minimum(1.0, (t + 1) / (0.05 * steps))

    matrix: dict[str, Any] = {"specs": axes, "schedule": cosine, "weight_decay": decay, "adam": {"b2": 0.99}}
    return {
        "AdamW": lambda: adamw(1.0, schedule=cosine, b2=0.99, weight_decay=decay),
        "Muon": lambda: muon(1.0, scale="rms", **matrix),
        "NorMuon": lambda: muon(1.0, scale="rms", normalize=True, **matrix),
        "SOAP": lambda: soap(1.0, **matrix),
        "Schedule-Free": lambda: schedule_free(1.0, schedule=warm, b2=0.99, weight_decay=decay),
    }


def evaluator(graphdef: Any) -> Callable[[Any, Any], Any]:
    """Give the compiled sum and count of a batch's loss."""

    def total(params: Any, batch: Any) -> Any:
        term = next_token_loss(nnx.merge(graphdef, params, {}), batch, None)["loss"]
        return term.total, term.weight

    return jax.jit(total)


def stepper(graphdef: Any, tx: Any) -> Callable[..., Any]:
    """Give the compiled step, whose learning rate is an argument."""

    def loss(params: Any, batch: Any) -> Any:
        term = next_token_loss(nnx.merge(graphdef, params, {}), batch, None)["loss"]
        return term.total / term.weight

    def step(params: Any, state: Any, batch: Any, rate: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params, learning_rate=rate)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def train(step: Any, tx: Any, total: Any, start: Any, data: Any, held: Sequence[Any], rate: float, steps: int) -> list:
    """Train once; give (step, held-out loss in nats a token)."""
    from styrax.optim import eval_params

    params = jax.tree.map(jnp.copy, start)
    state = tx.init(params)
    curve = []
    for number in range(steps):
        params, state = step(params, state, data.batch(number), jnp.float32(rate))
        if (number + 1) % EVERY == 0:
            weights = eval_params(state, params)
            sums = np.array([jax.device_get(total(weights, batch)) for batch in held], np.float64).sum(axis=0)
            curve.append((number + 1, float(sums[0] / sums[1])))
            if not np.isfinite(curve[-1][1]):
                break
    return curve


def report(runs: list[dict[str, Any]], steps: int, rates: list[float]) -> None:
    """Print the table."""
    best = {}
    for run in runs:
        last = run["curve"][-1][1]
        if np.isfinite(last) and (run["optimizer"] not in best or last < best[run["optimizer"]]["curve"][-1][1]):
            best[run["optimizer"]] = run
    target = best["AdamW"]["curve"][-1][1]
    table = Table(title=f"{steps} steps of 1,024 tokens; target: AdamW's last held-out loss, {target:.4f} nats a token")
    for name in ("optimizer", "best rate", "last loss", "steps to the target", "of AdamW's", "loss at each rate"):
        table.add_column(name)
    for name, run in best.items():
        reached = next((at for at, loss in run["curve"] if loss <= target), None)
        edge = "" if min(rates) < run["rate"] < max(rates) else " (edge)"
        every = ", ".join(f"{r['rate']:g}: {r['curve'][-1][1]:.3f}" for r in runs if r["optimizer"] == name)
        table.add_row(
            name,
            f"{run['rate']:g}{edge}",
            f"{run['curve'][-1][1]:.4f}",
            str(reached or "n/a"),
            f"{reached / steps:.2f}" if reached else "n/a",
            every,
        )
    Console(width=140).print(table)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3])
    parser.add_argument("--optimizers", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("optim_quality.jsonl"))
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "styrax-optim")}
    print(f"python {platform.python_version()}, {versions}, {jax.devices()[0].device_kind}")

    data = make_dataset(read_config(find_schema("train"), "quickstart", ["data.max_held_out_batches=8"]))
    model = MODEL.build(vocab_size=data.vocab_size, rngs=nnx.Rngs(0), policy=Policy.parse("f32"))
    graphdef, start, _ = split_model(model)
    print(f"{sum(x.size for x in jax.tree.leaves(start)):,} parameters")
    total, held = evaluator(graphdef), list(data.held_out())

    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = [run for run in done if run["steps"] == args.steps]
    for name, make in optimizers(start, args.steps).items():
        if args.optimizers and name not in args.optimizers:
            continue
        tx = guard(make(), clip_norm=1.0)
        step = stepper(graphdef, tx)
        for rate in args.rates:
            if any(run["optimizer"] == name and run["rate"] == rate for run in done):
                continue
            begin = time.perf_counter()
            curve = train(step, tx, total, start, data, held, rate, args.steps)
            done.append({"optimizer": name, "rate": rate, "steps": args.steps, "curve": curve})
            with args.out.open("a") as out:
                out.write(json.dumps(done[-1]) + "\n")
            print(f"{name} {rate:g}: {curve[-1][1]:.4f} nats, {time.perf_counter() - begin:.0f} s", flush=True)
    report(done, args.steps, args.rates)


if __name__ == "__main__":
    main()
