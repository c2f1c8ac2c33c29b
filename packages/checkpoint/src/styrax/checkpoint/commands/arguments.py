"""What the actions have in common: how a checkpoint is named, which leaves are meant, and JSON for any program."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from styrax.checkpoint.errors import CheckpointError
from styrax.core import nearest, tree

PLACE = "a run, the folder of its checkpoints, or that of one"


def add_place(parser: argparse.ArgumentParser, *, steps: str | None, default: str) -> None:
    """Declare `DIR[@STEP]`, and perhaps `STEP` after it.

    Args:
        parser: Of the action.
        steps: How many may follow, in argparse's words.
        default: What is taken if no step is named.
    """
    parser.add_argument("directory", metavar="DIR[@STEP]", help=f"{PLACE}; default: {default}")
    if steps is not None:
        name = "step" if steps == "?" else "steps"
        parser.add_argument(name, metavar="STEP", nargs=steps, help="the same as @STEP: a number, or latest")


def add_only(parser: argparse.ArgumentParser) -> None:
    """Declare `--only`."""
    parser.add_argument(
        "--only",
        metavar="GLOB",
        action="append",
        default=[],
        help="only what fits, as in 'params/**' or '**/bias'; may be given again",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def choose(patterns: Iterable[str], paths: Iterable[str], where: object) -> list[str]:
    """Give the paths that fit one of some patterns; all if there are none.

    Raises:
        CheckpointError: A pattern fits nothing; all such are listed.
    """
    patterns, paths = list(patterns), list(paths)
    refuse_unused(patterns, paths, where)
    return [path for path in paths if not patterns or any(tree.match(pattern, path) for pattern in patterns)]


def refuse_unused(patterns: Iterable[str], paths: list[str], where: object) -> None:
    """Raise if a pattern fits none of the paths."""
    unused = [pattern for pattern in patterns if not any(tree.match(pattern, path) for path in paths)]
    if unused:
        lines = [f"{pattern!r} fits nothing{nearest(pattern, paths)}" for pattern in unused]
        raise CheckpointError("\n  ".join([f"{where}, {len(paths)} paths:", *lines]))


def stay_off_devices() -> None:
    """Have jax start on the CPU, should Orbax need it: a run may hold the accelerators, or there are none."""
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"


def print_json(value: Any) -> None:
    """Print a value as JSON; what JSON has no number for is text, such as `"nan"`."""
    print(json.dumps(plain(value)))


def plain(value: Any) -> Any:
    """Turn dataclasses, tuples, paths and infinite numbers into what JSON has.

    Example:
        >>> plain({"a": (1, float("inf")), 2: Path("b")})
        {'a': [1, 'inf'], '2': 'b'}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return str(value) if isinstance(value, Path) else value
