"""``styrax verify-resume``: prove that a configuration resumes exactly, before a long run rests on it."""

from __future__ import annotations

import argparse
import json

from styrax.core.config import find_schema, read_config

HELP = "prove on a configuration that stopping and resuming changes no bit of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", metavar="NAME|FILE.toml", help="a recipe or a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides; values are TOML")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps in all (default: 8)")
    parser.add_argument("--at", type=int, metavar="K", help="steps before the signal (default: half of them)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Train three times in temporary folders; returns 0 when all is the same, 1 when something differs."""
    resolved = read_config(find_schema("train"), args.config, args.overrides).check()
    at = args.steps // 2 if args.at is None else args.at

    from styrax.train.machine import caching, use_compilation_cache
    from styrax.train.verify import SHOWN, verify_resume

    use_compilation_cache()
    with caching():
        verdict = verify_resume(resolved, steps=args.steps, at=at)
    if args.json:
        print(json.dumps(verdict._asdict()))
        return 1 if verdict.differences else 0
    what = f"{verdict.steps} steps, and {verdict.at} steps, a stop, and {verdict.steps - verdict.at} more"
    if not verdict.differences:
        print(
            f"the same, bit for bit: {what} ({verdict.arrays} arrays of {verdict.numbers:,} numbers, "
            f"{verdict.lines} lines of metrics, and the position of the data were compared)"
        )
        return 0
    print(f"not the same: {what}")
    for line in verdict.differences[:SHOWN]:
        print(f"  {line}")
    if len(verdict.differences) > SHOWN:
        print(f"  and {len(verdict.differences) - SHOWN} more")
    return 1
