"""``styrax replay``: take a step of a run again, and look into it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from styrax.train.rundir import RunDir

HELP = "take a step of a run again, compare it with what was recorded, and look into it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of a run; it is only read")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides, such as mesh.axes.data=1")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, from 1")
    parser.add_argument("--checks", action="store_true", help="also look for the operation that makes the first NaN")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="rows of each table (default: 10)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the step is as it was recorded, 1 if it is not."""
    folder = RunDir(args.run_dir)
    folder.require()

    from styrax.train.machine import caching, use_compilation_cache
    from styrax.train.replay import replay

    use_compilation_cache()
    with caching():
        found = replay(folder, args.step, checks=args.checks, overrides=args.overrides)
    if args.json:
        print(json.dumps(plain(dataclasses.asdict(found)), allow_nan=False))
    else:
        show(found, args.top)
    return 1 if found.differences else 0


def plain(value: Any) -> Any:
    """Numbers that JSON cannot hold as text.

    >>> plain({"a": [1.0, float("nan")]})
    {'a': [1.0, 'nan']}
    """
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show(found: Any, top: int) -> None:
    """Print for people."""
    where = f"the checkpoint of step {found.start}" if found.start else "the run's beginning"
    print(f"step {found.step}, made again from {where}")
    if found.differences:
        print(f"not as it was recorded ({found.compared} steps compared):")
        for line in found.differences[:top]:
            print(f"  {line}")
        for line in found.elsewhere or ["versions, machine and devices are as they were"]:
            print(f"  {line}")
    elif found.compared:
        print(f"as it was recorded, bit for bit ({found.compared} steps compared)")
    else:
        print("metrics.jsonl has no line to compare with")
    for name, value in found.metrics.items():
        print(f"  {name:<24}{value:.6g}")
    if found.documents:
        print("documents by loss")
        for each in found.documents[:top]:
            print(f"  {each['loss']:>10.4f}  {each['tokens']:>6} tokens  {place(each)}")
        print(f"  (they add up to the step's loss within {abs(found.unaccounted):.1e})")
    tell_terms(found.term_gradients)
    rows = sorted(found.norms.items(), key=lambda item: -largest(item[1]["gradient"]))
    print(f"{'norms by gradient':<48}{'parameter':>12}{'gradient':>12}{'update':>12}")
    for path, norms in rows[:top]:
        print(f"  {path:<46}" + "".join(f"{cell(norms[kind]):>12}" for kind in ("parameter", "gradient", "update")))
    tell_activations(found, top)
    if found.not_finite:
        first, count = next(iter(found.not_finite.items()))
        print(f"not finite: {len(found.not_finite)} tensors; the first is {first} ({count} numbers)")
        for name, count in list(found.not_finite.items())[1:top]:
            print(f"  {name} ({count})")
    if found.first_nan:
        print(f"first NaN: {found.first_nan}")


def tell_terms(terms: dict[str, dict[str, float]]) -> None:
    """Print what each term of the loss has in the step's gradient, in the loss's order.

    >>> tell_terms({"loss": {"norm": 2.0, "share": 1.02, "cosine": 0.999}})  # doctest: +NORMALIZE_WHITESPACE
    gradient by term of the loss    norm   share  cosine
      loss                             2    1.02   0.999
    """
    print(f"{'gradient by term of the loss':<48}" + "".join(f"{kind:>12}" for kind in ("norm", "share", "cosine")))
    for name, of in terms.items():
        print(f"  {name:<46}" + "".join(f"{cell(of[kind]):>12}" for kind in ("norm", "share", "cosine")))


def tell_activations(found: Any, top: int) -> None:
    """Print the activations, those with the largest number first; of several layers the largest, with its number."""
    if found.no_activations:
        print(f"activations: n/a ({found.no_activations})")
        return
    rows = sorted(found.activations.items(), key=lambda item: (-worst(item[1]["not_finite"]), -largest(item[1]["max"])))
    kinds = {"rms": "rms", "max": "max", "zeros": "zeros", "not_finite": "not finite"}
    print(f"{'activations by largest':<48}" + "".join(f"{name:>12}" for name in kinds.values()))
    for path, stats in rows[:top]:
        layers = stats.get("layer")
        print(f"  {path:<46}" + "".join(f"{cell(stats[kind], layers):>12}" for kind in kinds))


def worst(shares: float | list[float]) -> float:
    """Whether any of some shares is above 0, as a number to sort by."""
    return float(largest(shares) > 0)


def place(each: dict[str, Any]) -> str:
    """Where a stretch of a document is from."""
    source = f"{each['source']}: " if each["source"] else ""
    return f"{source}{each['document']} from token {each['offset']}, row {each['row']}, column {each['column']}"


def largest(norm: float | list[float]) -> float:
    """The largest of a path's norms; not finite counts as largest of all."""
    values = norm if isinstance(norm, list) else [norm]
    return max((math.inf if not math.isfinite(value) else value for value in values), default=0.0)


def cell(norm: float | list[float], layers: list[int] | None = None) -> str:
    """One norm, or the largest of the layers' with its number.

    >>> cell(0.5), cell([1.0, 3.0]), cell([1.0, 3.0], [0, 4])
    ('0.5', '3 @1', '3 @4')
    """
    if not isinstance(norm, list):
        return f"{norm:.3g}"
    which = max(range(len(norm)), key=lambda i: largest(norm[i]))
    return f"{norm[which]:.3g} @{layers[which] if layers else which}"
