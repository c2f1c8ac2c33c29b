"""Finding the folder of checkpoints, and a step in it, from what was typed."""

from __future__ import annotations

from pathlib import Path

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import list_incomplete, list_steps, step_name


def find_folder(given: Path) -> Path:
    """Give the folder of the checkpoints, where that of their run may have been given.

    Raises:
        CheckpointError: It is no folder.
    """
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give that of a run, or the one that holds the checkpoints")
    inside = given / "checkpoints"
    return inside if inside.is_dir() and not list_steps(given) and not list_incomplete(given) else given


def all_steps(directory: Path) -> list[int]:
    """List the steps with a folder that is not empty, whole or not, in order."""
    return sorted([*list_steps(directory), *list_incomplete(directory)])


def find_checkpoint(directory: Path, step: int | None) -> Path:
    """Give the folder of one checkpoint.

    Args:
        directory: Of the checkpoints.
        step: Which; the newest that is complete if `None`.

    Raises:
        CheckpointError: There is none; the text says which there are.
    """
    steps, everything = list_steps(directory), all_steps(directory)
    if step is not None and step not in everything:
        there = f"there are {', '.join(map(str, everything))}" if everything else "there are none"
        raise CheckpointError(f"no checkpoint of step {step} in {directory}: {there}")
    if step is None and not steps:
        incomplete = f" that is complete; incomplete: {', '.join(map(str, everything))}" if everything else ""
        raise CheckpointError(f"no checkpoint in {directory}{incomplete}")
    return directory / step_name(steps[-1] if step is None else step)
