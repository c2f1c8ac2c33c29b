"""``styrax bisect``: the first bad step of a run, and the document that makes it so."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from styrax.train.rundir import RunDir

HELP = "find the first bad step of a run, and the document in its batch that makes it so"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of a run; it is only read")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides, such as mesh.axes.data=1")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--above", type=float, metavar="X", help="a step is bad if the metric is above X")
    kind.add_argument(
        "--nonfinite", action="store_true", help="a step is bad if its loss or gradient is not finite (the default)"
    )
    parser.add_argument("--metric", default="loss", metavar="NAME", help="what --above looks at (default: loss)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if a bad step was found, 1 if there is none."""
    folder = RunDir(args.run_dir)
    folder.require()

    from styrax.train.bisect import bisect
    from styrax.train.commands.replay import place, plain
    from styrax.train.machine import caching, use_compilation_cache

    use_compilation_cache()
    with caching():
        found = bisect(folder, metric=args.metric, above=args.above, overrides=args.overrides)
    if args.json:
        print(json.dumps(plain(dataclasses.asdict(found)), allow_nan=False))
        return 0 if found.step else 1
    if found.step is None:
        print(f"no step of {folder.path} has {found.why}")
        return 1
    print(f"step {found.step} is the first with {found.why}: loss {found.metrics['loss']:.6g}")
    if found.not_finite:
        first, count = next(iter(found.not_finite.items()))
        print(f"the first tensor that is not finite is {first} ({count} numbers); {len(found.not_finite)} are")
    if found.before:
        print("the state was bad before this step, so no document of this step is the cause; look at earlier steps")
    if found.many:
        print("documents of this step are bad one by one, so the cause is not in the data: look at the state before it")
    for each in found.documents:
        print(f"document  {place(each)}: loss {each['loss']:.6g} over {each['tokens']} tokens")
    if found.without:
        what = "mends the step" if found.mended else "does not mend the step"
        print(f"leaving {'it' if len(found.documents) == 1 else 'these'} out {what}: loss {found.without['loss']:.6g}")
    print(f"look closer: styrax replay {folder.path} --step {found.step} --checks")
    return 0
