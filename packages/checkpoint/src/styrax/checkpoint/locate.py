"""From what people write for a checkpoint to its folder: a run, the folder of its checkpoints or of one, `@STEP`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import FILE, list_incomplete, list_steps, step_name
from styrax.core import UsageError, nearest

LATEST = "latest"
_FEW = 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """What was named.

    Attributes:
        directory: The folder that holds the checkpoints.
        chosen: The folders of the checkpoints that were named; empty if none was.
    """

    directory: Path
    chosen: tuple[Path, ...] = ()


def find(given: str | Path, steps: Iterable[str | int] = ()) -> Place:
    """Find the folder of the checkpoints, and those that were named in it.

    Args:
        given: The folder of a run, of its checkpoints, or of one checkpoint; a step may follow after `@`.
        steps: More steps: a number, or `latest` for the newest that is complete.

    Raises:
        CheckpointError: There is no such folder or step; the text says what there is.
        UsageError: What should be a step is none.
    """
    folder, step = _split(given)
    wanted = [*([] if step is None else [step]), *steps]
    if folder.name != (whole := Path(os.path.abspath(folder))).name:  # noqa: PTH100 - links are left as they are
        folder = whole  # `.` and `..` have no name to tell a step by
    if _is_checkpoint(folder):
        if wanted:
            raise UsageError(f"{folder} is the folder of one checkpoint already, so no step can be chosen in it")
        return Place(directory=folder.parent, chosen=(folder,))
    inside = folder / "checkpoints"
    if inside.is_dir() and not list_steps(folder) and not list_incomplete(folder):
        folder = inside
    chosen = dict.fromkeys(_choose(folder, step) for step in wanted)
    return Place(directory=folder, chosen=tuple(chosen))


def find_one(given: str | Path, step: str | int | None = None) -> Path:
    """Find the folder of one checkpoint, by default the newest that is complete.

    Args:
        given: As of `find`.
        step: Which, if `given` does not say.

    Raises:
        CheckpointError: There is none; the text says which there are.
        UsageError: Two steps are named, or what should be a step is none.
    """
    place = find(given, () if step is None else (step,))
    if len(place.chosen) > 1:
        names = " and ".join(path.name for path in place.chosen)
        raise UsageError(f"one checkpoint is wanted, and {names} are named; leave one out")
    return place.chosen[0] if place.chosen else _choose(place.directory, LATEST)


def find_several(given: str | Path, steps: Iterable[str | int] = ()) -> tuple[Path, ...]:
    """Find the folders of checkpoints, by default of all, complete or not, in order."""
    place = find(given, steps)
    return place.chosen or tuple(place.directory / step_name(step) for step in all_steps(place.directory))


def all_steps(directory: Path) -> list[int]:
    """List the steps with a folder that is not empty, complete or not, in order."""
    return sorted([*list_steps(directory), *list_incomplete(directory)])


def parse_step(text: str | int) -> int | str:
    """Read a step.

    Example:
        >>> parse_step("00001200"), parse_step("latest")
        (1200, 'latest')
    """
    if isinstance(text, int) or text == LATEST:
        return text
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"no step {text!r}{nearest(text, [LATEST])}; a step is a number, or {LATEST!r}")
    return int(text)


def listed(steps: list[int], near: int | None = None) -> str:
    """Say which steps there are.

    Example:
        >>> listed([5, 10]), listed([]), listed(list(range(0, 1000, 10)), near=512)
        ('there are 5, 10', 'there are none', 'there are 100, from 0 to 990, the nearest 510')
    """
    if not steps:
        return "there are none"
    if len(steps) <= _FEW:
        return f"there are {', '.join(map(str, steps))}"
    close = "" if near is None else f", the nearest {min(steps, key=lambda step: abs(step - near))}"
    return f"there are {len(steps)}, from {steps[0]} to {steps[-1]}{close}"


def _split(given: str | Path) -> tuple[Path, str | None]:
    path = Path(given)
    if path.is_dir():
        return path, None
    head, at, step = str(given).rpartition("@")
    if at and Path(head).is_dir():
        return Path(head), step
    path = Path(head) if at else path
    near = ""
    if path.parent.is_dir():
        near = nearest(path.name, (entry.name for entry in path.parent.iterdir() if entry.is_dir()))
    raise CheckpointError(
        f"{path} is not a folder{near}; give that of a run, the one that holds its checkpoints, or one of them"
    )


def _is_checkpoint(folder: Path) -> bool:
    name = folder.name
    return (folder / FILE).is_file() or (name.isdecimal() and step_name(int(name)) == name)


def _choose(directory: Path, step: str | int) -> Path:
    step, complete, everything = parse_step(step), list_steps(directory), all_steps(directory)
    if isinstance(step, int):
        if step not in everything:
            raise CheckpointError(f"no checkpoint of step {step} in {directory}: {listed(everything, step)}")
        return directory / step_name(step)
    if not complete:
        incomplete = f" that is complete; incomplete: {', '.join(map(str, everything))}" if everything else ""
        raise CheckpointError(f"no checkpoint in {directory}{incomplete}")
    return directory / step_name(complete[-1])
