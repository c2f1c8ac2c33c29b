"""What `export` and `import` have in common: which arrays, cast to what, and how far along."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from styrax.checkpoint.commands.arguments import add_json, refuse_unused
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.core import tree

if TYPE_CHECKING:
    from styrax.checkpoint.formats.base import Array

_TERMINAL, _LOG = 0.5, 30.0  # seconds between two lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that both have."""
    pattern = "only arrays whose path fits, as in layers/*/kernel or **/bias; may be given again"
    parser.add_argument("--include", metavar="GLOB", action="append", default=[], help=pattern)
    parser.add_argument("--exclude", metavar="GLOB", action="append", default=[], help="leave these out; likewise")
    parser.add_argument(
        "--cast", metavar="DTYPE", help="round floating-point arrays to bf16, f16, f32 or another dtype"
    )
    parser.add_argument(
        "--separator", metavar="CHAR", help="between keys in the names of the file; default: / for npz, . for others"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    add_json(parser)


def select(
    arrays: Mapping[str, Array], skipped: Mapping[str, str], args: argparse.Namespace, where: object
) -> dict[str, Array]:
    """Choose arrays by path and cast them.

    Args:
        arrays: Path -> array.
        skipped: Path -> why something cannot be given.
        args: With `include`, `exclude` and `cast`.
        where: The source, for the error text.

    Raises:
        CheckpointError: A pattern fits nothing, nothing is left, or something that was chosen cannot be given; all
            is listed.
    """
    from styrax.checkpoint.formats.casting import cast, target

    paths = [*arrays, *skipped]
    refuse_unused([*args.include, *args.exclude], paths, where)
    chosen = [path for path in paths if _fits(path, args.include, args.exclude)]
    lost = [f"{path!r}: {skipped[path]}" for path in chosen if path in skipped and path not in arrays]
    if lost:
        more = [f"... and {len(lost) - 20} more"] if len(lost) > 20 else []
        raise CheckpointError(
            "\n  ".join([f"{where}: these are no arrays that could be copied:", *lost[:20], *more])
            + "\nNothing is left out without a word: name them with --exclude"
        )
    if not chosen:
        raise CheckpointError(f"{where}: no array is left of {len(arrays)}; check --include and --exclude")
    found = {path: arrays[path] for path in chosen}
    if args.cast is not None:
        dtype = target(args.cast)
        found = {path: cast(path, array, dtype) for path, array in found.items()}
    return found


def _fits(path: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    included = not include or any(tree.match(pattern, path) for pattern in include)
    return included and not any(tree.match(pattern, path) for pattern in exclude)


class Progress:
    """Says on stderr how far long work is: a line that renews itself on a terminal, one each half minute elsewhere.

    Args:
        count: Things to do; `None` if that is not known.
        nbytes: Their bytes; likewise.
        what: What is being done.
        things: What they are called.
    """

    def __init__(self, count: int | None, nbytes: int | None, what: str, things: str = "arrays") -> None:
        self._count, self._nbytes, self._what, self._things = count, nbytes, what, things
        self._done = self._bytes = 0
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._begin = self._last = time.monotonic()
        self._shown = False

    def __call__(self, path: str, nbytes: int) -> None:
        """Count one."""
        self._done += 1
        self._bytes += nbytes
        now = time.monotonic()
        if now - self._last < (_TERMINAL if self._terminal else _LOG):
            return
        self._last = now
        if self._count is None or self._nbytes is None:
            text = f"{self._what}: {self._done} {self._things}, {sized(self._bytes)}"
        else:
            rate = self._bytes / (now - self._begin)
            left = f", {(self._nbytes - self._bytes) / rate:.0f} s left" if rate else ""
            count = f"{self._done} of {self._count} {self._things}"
            text = f"{self._what}: {count}, {sized(self._bytes)} of {sized(self._nbytes)}{left}"
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()
        self._shown = True

    def close(self) -> None:
        """End the line."""
        if self._shown and self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
