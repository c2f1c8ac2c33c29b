"""Whether a run may go on with what was asked for, and how far."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from styrax.core import UsageError, UserError
from styrax.core.config import Resolved
from styrax.core.config.toml import override
from styrax.train.rundir import RunDir

FREE = (
    "train.steps",
    "train.log_every",
    "train.eval_every",
    "train.trackers",
    "train.sample_",
    "train.baselines",
    "train.spike.",
    "train.watch.",
    "train.watchdog.",
    "checkpoint.",
    "mesh.",
    "data.prefetch",
    "data.allow_changes",
)
"""Keys that may change when a run is resumed: none of them changes what an update does to the parameters,
except train.steps, which stretches the schedule and is the way to ask for more. A policy for spikes is wanted once
there was one; it changes only what follows a spike."""


def source(name: str, folder: RunDir) -> str:
    """What a run was read from: a recipe, or a file by its path from the run's folder, so that both may move together.

    >>> source("quickstart", RunDir("runs/quickstart")), source("a/my.toml", RunDir("runs/my"))
    ('recipe quickstart', '../../a/my.toml')
    """
    if not name.endswith(".toml"):
        return f"recipe {name}"
    try:
        return Path(os.path.relpath(name, folder.path)).as_posix()
    except ValueError:  # on another drive
        return Path(name).absolute().as_posix()


def said(source: str, folder: RunDir) -> str:
    """A source for people here: a file by its path from the current folder.

    >>> said("../../a/my.toml", RunDir("runs/my")), said("recipe quickstart", RunDir("runs/quickstart"))
    ('a/my.toml', 'recipe quickstart')
    """
    return os.path.relpath(folder.path / source) if source.endswith(".toml") else source


def check_source(asked: str, old: Resolved, new: Resolved, folder: RunDir) -> None:
    """Refuse to go on with a run that only shares its name with the file that was asked for.

    For a folder that follows from the name alone: two files ``a/my.toml`` and ``b/my.toml`` both mean ``runs/my``.

    Raises:
        UsageError: The run was last started from something else, of which the configuration differs.
    """
    started = folder.last_start().get("configuration")
    if isinstance(started, str) and started != asked and old.to_dict() != new.to_dict():
        raise UsageError(
            f"{folder.path} is a run of {said(started, folder)}, not of {said(asked, folder)}. "
            f"Name another folder with --run DIR, or go on with that run by --run {folder.path}"
        )


def check_same(old: Resolved, new: Resolved, folder: RunDir) -> None:
    """Refuse to resume with a configuration under which the run would have gone another way."""
    # What the data allow by name they check themselves, against the step that the run has reached.
    free = (*FREE, "data.") if getattr(new.sections["data"], "allow_changes", ()) else FREE
    before, after = flat(old.to_dict()), flat(new.to_dict())
    changed = sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
        and not any(key == f or (f[-1] in "._" and key.startswith(f)) for f in free)
    )
    if changed:
        rows = [f"  {k}: the run has {before.get(k)!r}, asked for {after.get(k)!r}" for k in changed]
        raise UserError(
            "\n".join([f"{folder.path} holds a run of another configuration:", *rows])
            + "\nGo on with the run's own (leave these out), or start a new run with another --run"
        )


def check_sets(folder: RunDir, held_out: Mapping[str, str]) -> None:
    """Refuse to go on with held-out sets of the same name and other text: their losses would not be comparable.

    Args:
        folder: The run.
        held_out: Name -> fingerprint of each.
    """
    starts = [event for event in folder.read_events() if event["event"] == "start"] if folder.has_checkpoint else []
    before = starts[-1].get("held_out", {}) if starts else {}
    if changed := [name for name, mark in held_out.items() if before.get(name, mark) != mark]:
        rows = [f"  evaluate.{k}: the run has the fingerprint {before[k]}, now it is {held_out[k]}" for k in changed]
        raise UserError(
            "\n".join([f"the held-out text is not that with which the run in {folder.path} was started:", *rows])
            + "\nPut the text back as it was, or start a new run with another --run"
        )


def settle_steps(old: Resolved, new: Resolved, overrides: Sequence[str], folder: RunDir) -> tuple[Resolved, str | None]:
    """Keep a run from being cut short by a configuration that does not know how far it was meant to go.

    A run that was asked for more than the recipe or file says goes on to that; only an override ``train.steps=``
    asks for fewer, and never for fewer than are done.

    Args:
        old: The run's configuration.
        new: What was asked for.
        overrides: Those of the command line.
        folder: The run.

    Returns:
        The configuration to go on with, and what to tell about it.

    Raises:
        UserError: An unfinished run has done more steps than are asked for.
    """
    before, asked = old.sections["train"].steps, new.sections["train"].steps
    if asked >= before:
        return new, None
    if "steps" not in override({}, overrides).get("train", {}):
        return with_steps(new, before), (
            f"{folder.path} was asked for {before:,} steps before, so it goes on to those; train.steps={asked} asks "
            "for fewer"
        )
    done = steps_done(new, folder)
    if asked >= done:
        return new, None
    if done < before:
        raise UserError(
            f"{folder.path} has done {done:,} of {before:,} steps, more than the train.steps={asked} asked for. "
            "Leave train.steps out to go on, ask for at least what is done, or start a new run with another --run"
        )
    return with_steps(new, before), (
        f"{folder.path} has done {done:,} steps, more than the train.steps={asked} asked for, and is left as it is"
    )


def steps_done(resolved: Resolved, folder: RunDir) -> int:
    """The newest step that was saved; 0 if none was."""
    if not folder.has_checkpoint:
        return 0
    with resolved.sections["checkpoint"].build(folder.checkpoints, read_only=True) as checkpointer:
        return max(checkpointer.steps(), default=0)


def with_steps(resolved: Resolved, steps: int) -> Resolved:
    """The same configuration with another number of steps."""
    section = dataclasses.replace(resolved.sections["train"], steps=steps)
    return dataclasses.replace(resolved, sections={**resolved.sections, "train": section})


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys.

    >>> flat({"a": {"b": 1}})
    {'a.b': 1}
    """
    if not isinstance(tree, dict):
        return {prefix: tree}
    parts = (flat(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items())
    return {k: v for part in parts for k, v in part.items()}
