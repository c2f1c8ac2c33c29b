"""`styrax checkpoint rm`: delete checkpoints, so that none is ever seen in part."""

from __future__ import annotations

import argparse
from pathlib import Path

from styrax.checkpoint import commit
from styrax.checkpoint.commands.arguments import add_json, add_place, print_json
from styrax.checkpoint.commands.selection import Progress
from styrax.checkpoint.errors import CheckpointError, explain, sized
from styrax.checkpoint.leftovers import size_of
from styrax.checkpoint.locate import all_steps, find, listed, parse_step
from styrax.checkpoint.lock import Lock
from styrax.checkpoint.manifest import list_steps, step_name
from styrax.checkpoint.verify import verify
from styrax.core import UsageError

HELP = "delete checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_place(parser, steps=None, default="none")
    parser.add_argument(
        "steps",
        metavar="STEP",
        nargs="*",
        help="a number, latest, or a range, of which 100:1000 has 100 and not 1000, and one side may be left out",
    )
    parser.add_argument(
        "--keep-last", metavar="N", type=int, help="keep the last N complete ones whatever is named; alone: only these"
    )
    parser.add_argument("--force", action="store_true", help="delete even the last good one")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Delete them."""
    if args.keep_last is not None and args.keep_last < 0:
        raise UsageError(f"--keep-last: expected a number, 0 or more, got {args.keep_last}")
    place = find(args.directory)
    named = [int(path.name) for path in place.chosen if path.name.isdecimal()]
    if not (args.steps or named or args.keep_last is not None):
        raise UsageError("name what to delete: steps, ranges such as 100:1000, or --keep-last N")
    if len(named) != len(place.chosen):
        raise CheckpointError(f"{place.chosen[0]} is not named after its step; delete that folder yourself")
    lock = None if args.dry_run else _lock(place.directory)
    try:
        doomed = _doomed(place.directory, [*named, *args.steps], args.keep_last)
        if doomed and not args.force:
            _refuse_last_good(place.directory, doomed)
        sizes = {step: size_of(place.directory / step_name(step)) for step in doomed}
        if lock is not None:
            try:
                commit.retire(place.directory, doomed)
            except OSError as error:
                raise explain(error, place.directory, "checkpoints cannot be deleted") from error
    finally:
        if lock is not None:
            lock.release()
    total = sum(sizes.values())
    if args.json:
        print_json({"directory": place.directory, "deleted": doomed, "bytes": total, "dry_run": args.dry_run})
        return 0
    verb = "would delete" if args.dry_run else "deleted"
    for step, size in sizes.items():
        print(f"{verb} step {step}, {sized(size)}")
    print(f"{verb} {len(doomed)} checkpoint{'s' * (len(doomed) != 1)}, {sized(total)}")
    return 0


def _lock(directory: Path) -> Lock:
    try:
        return Lock(directory)
    except OSError as error:
        raise explain(error, directory, "checkpoints cannot be deleted") from error


def _doomed(directory: Path, named: list[int | str], keep_last: int | None) -> list[int]:
    there = all_steps(directory)
    complete = list_steps(directory)
    chosen: set[int] = set() if named else set(there)
    for text in named:
        if isinstance(text, str) and ":" in text:
            found = [step for step in there if step in _range(text)]
        elif (step := parse_step(text)) == "latest":
            found = complete[-1:]
        else:
            found = [other for other in there if other == step]
        if not found:
            near = int(text) if str(text).isdecimal() else None
            there = listed(there, near)
            raise CheckpointError(f"no checkpoint of step {text} in {directory}: {there}; nothing was deleted")
        chosen.update(found)
    kept = set(complete[-keep_last:]) if keep_last else set()
    return sorted(chosen - kept)


def _range(text: str) -> range:
    first, _, stop = text.partition(":")
    bounds = [parse_step(part) if part else None for part in (first, stop)]
    if ":" in stop or "latest" in bounds or text == ":":
        raise UsageError(f"no range {text!r}; expected FIRST:STOP, FIRST: or :STOP, each a number")
    return range(int(bounds[0] or 0), 2**62 if bounds[1] is None else int(bounds[1]))


def _refuse_last_good(directory: Path, doomed: list[int]) -> None:
    """Raise if nothing that verifies would be left, and something that does would go."""
    progress = Progress(None, None, "verify what stays", "files")
    try:

        def good(step: int) -> bool:
            return not verify(directory / step_name(step), blame=False, progress=progress)

        complete = list_steps(directory)
        staying = [step for step in reversed(complete) if step not in doomed]
        if any(map(good, staying)):
            return
        last = next((step for step in reversed(complete) if step in doomed and good(step)), None)
    finally:
        progress.close()
    if last is not None:
        left = f"those that stay ({', '.join(map(str, staying))}) are damaged" if staying else "no other stays"
        raise CheckpointError(
            f"step {last} is the last good checkpoint in {directory}: {left}. "
            "Nothing was deleted; --force deletes it all the same"
        )
