"""`styrax checkpoint diff`: how two checkpoints differ, from their manifests."""

from __future__ import annotations

import argparse
from collections import Counter

from styrax.checkpoint.commands.arguments import PLACE, add_json, add_only, print_json, stay_off_devices
from styrax.checkpoint.commands.selection import Progress
from styrax.checkpoint.diff import Change, Difference, diff
from styrax.checkpoint.errors import CheckpointError

HELP = "say how two checkpoints differ; exit code 0 if in nothing, 1 if they do, 2 if that cannot be told"

_TROUBLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("a", metavar="A[@STEP]", help=f"{PLACE}; default: the newest step")
    parser.add_argument("b", metavar="B[@STEP]", help="another one")
    parser.add_argument(
        "--stats", action="store_true", help="read the arrays that differ, and say how far they are apart"
    )
    add_only(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare them."""
    stay_off_devices()
    progress = Progress(None, None, "diff")
    try:
        found = diff(args.a, args.b, stats=args.stats, only=args.only, progress=progress)
    except CheckpointError as error:
        error.exit_code = _TROUBLE  # 1 means that they differ
        raise
    finally:
        progress.close()
    if args.json:
        changes = [vars(change) for change in found.changes]
        print_json({"a": found.a, "b": found.b, "same": found.same, "equal": len(found.equal), "changes": changes})
    else:
        _print(found)
    return 0 if found.same else 1


def _print(found: Difference) -> None:
    width = max((len(change.path) for change in found.changes), default=0)
    for change in found.changes:
        print(f"{change.what:<9}  {change.path:<{width}}  {_values(change)}")
    counts = Counter(change.what for change in found.changes)
    texts = [f"{count} {what if what.startswith('only') else f'differ in {what}'}" for what, count in counts.items()]
    print(f"{len(found.equal)} equal" + "".join(f", {text}" for text in texts))


def _values(change: Change) -> str:
    if change.a is None or change.b is None:
        return change.a or change.b or ""
    text = change.a if change.a == change.b else f"{change.a} -> {change.b}"
    apart = change.distance
    if apart is None:
        return text
    parts = [f"{apart.fraction:.3%} differ"]
    if apart.max_abs is not None and apart.relative is not None:
        parts += [f"max |a - b| {apart.max_abs:.4g}", f"|a - b| / |a| {apart.relative:.4g}"]
    parts += [f"{name} {a} and {b}" for name, (a, b) in (("NaN", apart.nans), ("infinite", apart.infs)) if a or b]
    return f"{text}  {', '.join(parts)}"
