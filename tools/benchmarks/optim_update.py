"""The time and the memory of an update: ours against Optax's, states in fewer bytes, separate layers, 16-bit weights.

python tools/benchmarks/optim_update.py [--size 50e6] [--leaves 7|73] [--rounds 15] [--part f32|state|low|matrices]

An update is `tx.update` and `optax.apply_updates`, compiled with parameters and state donated and the gradient not, on
the parameters of a decoder of 12 layers, stacked (7 arrays) or separate (73). The contestants of a part are compiled in
this process and run in turn, every other round in reverse, so that whatever else the machine does hits all; printed are
the median time and the median of the ratios of neighbours with its quartiles, the bytes that the compiled update
allocates besides what it was given, and the load of the machine (`os.getloadavg`). The goals are those of the project.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from styrax.optim import adam_mini, adamw, eight_bit_adamw, guard, memory_table, muon, precision, soap, specs

LAYERS = 12
ADAM: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
console = Console(width=120, highlight=False)


def width_of(size: float) -> int:
    """Give the width, a multiple of 16, with which `tree` has about so many elements."""
    return 16 * max(1, round(math.sqrt(size / (48 + 12 * LAYERS)) / 16))


def tree(width: int, leaves: int, dtype: Any, scale: float, *, seed: int) -> Any:
    """Random numbers in the shapes of a decoder: a table of `48 width` tokens and `LAYERS` layers, stacked or not."""
    kernels = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = {name: {"kernel": shape} for name, shape in kernels.items()}
    layers |= {f"norm_{i}": {"scale": (width,)} for i in (1, 2)}
    draw = drawer(scale, dtype, seed)
    table = {"embedding": draw((48 * width, width))}
    return {"embed": table, "layers": in_layers(layers, draw, stacked=leaves == 7)}


def drawer(scale: float, dtype: Any, seed: int) -> Callable[[tuple[int, ...]], Any]:
    """Give a function from shape to random numbers."""
    rng = np.random.default_rng(seed)
    return lambda shape: jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)


def in_layers(shapes: Any, draw: Callable[[tuple[int, ...]], Any], *, stacked: bool) -> Any:
    """Draw the arrays of `LAYERS` layers from the shapes of one."""

    def layer(*front: int) -> Any:
        return jax.tree.map(lambda shape: draw((*front, *shape)), shapes, is_leaf=lambda node: isinstance(node, tuple))

    return layer(LAYERS) if stacked else [layer() for _ in range(LAYERS)]


class Update:
    """One contestant: a compiled update, and the times that it took.

    Attributes:
        lines: Of the program before compilation.
        temporary: Bytes that the compiled update allocates besides arguments and results.
        held: Bytes of parameters and state.
        times: Seconds of each round.
    """

    def __init__(self, tx: Any, params: Any, grads: Any) -> None:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._compile(step, jax.tree.map(jnp.copy, params), jax.jit(tx.init)(params), grads)

    def _compile(self, step: Callable[..., Any], params: Any, state: Any, grads: Any) -> None:
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads)
        self.lines = lowered.as_text().count("\n")
        self.compiled = lowered.compile()
        self.temporary = int(getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", 0))
        self.held = sum(x.nbytes for x in jax.tree.leaves((params, state)))
        self.given = (params, state)
        self.grads = grads
        self.times: list[float] = []

    def run(self) -> None:
        """Update once more and note the time."""
        begin = time.perf_counter()
        self.given = jax.block_until_ready(self.compiled(*self.given, self.grads))
        self.times.append(time.perf_counter() - begin)


class Copy(Update):
    """The yardstick of memory: every parameter is read, multiplied and written in its place."""

    def __init__(self, params: Any) -> None:
        self._compile(
            lambda params, state, grads: (jax.tree.map(lambda w: w * 0.999, params), state),
            jax.tree.map(jnp.copy, params), (), (),
        )  # fmt: skip


def race(contestants: Iterable[Update], rounds: int) -> None:
    """Run all in turn; two rounds more, that are not counted, come first."""
    line = list(contestants)
    for number in range(rounds + 2):
        for each in line if number % 2 else line[::-1]:
            each.run()
    for each in line:
        del each.times[:2]


def ratio(a: Update, b: Update) -> tuple[float, float, float]:
    """Give the median of the ratios of two contestants' times, and the quartiles."""
    low, middle, high = np.quantile([x / y for x, y in zip(a.times, b.times, strict=True)], [0.25, 0.5, 0.75])
    return float(middle), float(low), float(high)


def show(found: dict[str, Update], base: str, title: str, extra: dict[str, Callable[[Update], str]]) -> None:
    """Print a table: time, ratio to one of them, temporaries, and more columns."""
    table = Table(title=title, title_justify="left")
    for name in ("", "ms", f"x {base} (quartiles)", "temporary MiB", *extra):
        table.add_column(name, justify="right" if name else "left")
    for name, each in found.items():
        middle, low, high = ratio(each, found[base])
        table.add_row(
            name, f"{1e3 * statistics.median(each.times):.1f}", f"{middle:.3f} ({low:.3f} to {high:.3f})",
            f"{each.temporary / 2**20:.2f}", *(column(each) for column in extra.values()),
        )  # fmt: skip
    console.print(table)


def goal(what: str, value: float, limit: float) -> None:
    """Say whether a goal was reached."""
    console.print(f"{what}: {value:.3f}, goal at most {limit}: {'reached' if value <= limit else 'MISSED'}")


def f32(width: int, leaves: int, rounds: int) -> None:
    """Ours and Optax's, in float32."""
    params, grads = (tree(width, leaves, jnp.float32, scale, seed=i) for i, scale in enumerate((0.02, 1e-3)))
    plain = optax.adamw(1e-3, **ADAM)
    chain = optax.chain(optax.clip_by_global_norm(1.0), plain)
    names = {
        "optax.adamw": plain,
        "optax.adamw, once more": plain,
        "adamw": adamw(1e-3, **ADAM),
        "optax clip + adamw": chain,
        "optax apply_if_finite(clip + adamw)": optax.apply_if_finite(chain, 5),
        "guard(adamw)": guard(adamw(1e-3, **ADAM)),
    }
    found = {name: Update(tx, params, grads) for name, tx in names.items()}
    copy = Copy(params)
    race([*found.values(), copy], rounds)
    number = sum(x.size for x in jax.tree.leaves(params))
    speed = 8 * number / statistics.median(copy.times)

    def against_limit(each: Update) -> str:
        return f"{statistics.median(t / (c * 28 / 8) for t, c in zip(each.times, copy.times)):.2f}"

    title = f"{number:,} float32 parameters in {len(jax.tree.leaves(params))} arrays, {rounds} rounds"
    show(found, "optax.adamw", title, {"x limit": against_limit})
    console.print(
        f"limit: AdamW must move 28 bytes a parameter (read gradient, both moments and weight, write the last three); "
        f"a multiplication in place moves 8, here {speed / 1e9:.2f} GB/s"
    )
    goal("adamw / optax.adamw", ratio(found["adamw"], found["optax.adamw"])[0], 1.05)
    goal("guard(adamw) / optax clip + adamw", ratio(found["guard(adamw)"], found["optax clip + adamw"])[0], 0.75)
    alike = ratio(found["guard(adamw)"], found["optax apply_if_finite(clip + adamw)"])
    console.print(f"guard(adamw) / optax apply_if_finite(clip + adamw), which does the same: {alike[0]:.3f}")


def state(width: int, leaves: int, rounds: int) -> None:
    """States in fewer bytes."""
    params, grads = (tree(width, leaves, jnp.float32, scale, seed=i) for i, scale in enumerate((0.02, 1e-3)))
    described = specs(params)
    names = {
        "adamw": adamw(1e-3, **ADAM),
        "eight_bit_adamw": eight_bit_adamw(1e-3, specs=described, **ADAM),
        "adam_mini": adam_mini(1e-3, specs=described, **ADAM),
    }
    found = {name: Update(tx, params, grads) for name, tx in names.items()}
    race(found.values(), rounds)
    show(found, "adamw", "States in fewer bytes, float32 parameters", {})
    names["eight_bit_adamw, embedding too"] = eight_bit_adamw(1e-3, specs=described, keep=(), **ADAM)
    held = {name: memory_table(tx, params).bytes for name, tx in names.items()}
    console.print(f"bytes of state of adamw: {held.pop('adamw'):,}; as a share of these:")
    whole = memory_table(names["adamw"], params).bytes
    for name, size in held.items():
        goal(f"  {name}", size / whole, 0.55 if name == "adam_mini" else 0.27)


def low(width: int, leaves: int, rounds: int) -> None:
    """Weights in 16 bits, gradients too."""
    params, grads = (tree(width, leaves, jnp.bfloat16, scale, seed=i) for i, scale in enumerate((0.02, 1e-3)))
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in (params, grads)]
    modes = ("master", "split", "stochastic", "kahan")
    found = {
        "adamw": Update(adamw(1e-3, **ADAM), params, grads),
        "optax.adamw, moments in bfloat16": Update(optax.adamw(1e-3, **ADAM), params, grads),
        **{mode: Update(precision(adamw(1e-3, **ADAM), mode), params, grads) for mode in modes},
        "guard(adamw)": Update(guard(adamw(1e-3, **ADAM)), params, grads),
        "guard(split)": Update(guard(precision(adamw(1e-3, **ADAM), "split")), params, grads),
        "adamw, all in float32": Update(adamw(1e-3, **ADAM), *wide),
    }
    race(found.values(), rounds)
    number = sum(x.size for x in jax.tree.leaves(params))
    columns = {"bytes a parameter": lambda each: f"{each.held / number:.2f}"}
    show(found, "adamw", "bfloat16 parameters and gradients; bytes are of parameters and state", columns)


def matrices(width: int, leaves: int, rounds: int) -> None:
    """Twelve layers with four kernels each: 48 arrays against 4 stacked ones."""
    del leaves
    d = 8 * max(1, width * 3 // 32)
    shapes = {"q": (d, d), "k": (d, d), "up": (d, 2 * d), "down": (2 * d, d)}
    for name, algorithm in (("muon", muon), ("soap", soap)):
        found = {}
        for form in ("stacked", "separate"):
            params, grads = (
                {"layers": in_layers(shapes, drawer(scale, jnp.float32, 0), stacked=form == "stacked")}
                for scale in (0.02, 1e-3)
            )
            found[form] = Update(algorithm(1e-3, specs=specs(params)), params, grads)
        race(found.values(), rounds)
        title = f"{name}: {LAYERS} layers of 4 kernels, {d} x {d} and {d} x {2 * d}"
        show(found, "stacked", title, {"lines": lambda each: f"{each.lines:,}"})
        goal(f"{name}, time", ratio(found["separate"], found["stacked"])[0], 1.6)
        goal(f"{name}, lines of the program", found["separate"].lines / found["stacked"].lines, 2)


PARTS = {"f32": f32, "state": state, "low": low, "matrices": matrices}


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=50e6, help="parameters, about")
    parser.add_argument("--leaves", type=int, choices=(7, 73), default=7)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", choices=PARTS, action="append")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "optax", "styrax-optim")}
    console.print(
        f"python {platform.python_version()}, {versions}, {jax.devices()[0].device_kind} x {jax.device_count()}"
    )
    for name in args.part or PARTS:
        console.print(f"\n{name}: load {', '.join(f'{x:.1f}' for x in os.getloadavg())} on {os.cpu_count()} cores")
        PARTS[name](width_of(args.size), args.leaves, args.rounds)


if __name__ == "__main__":
    main()
