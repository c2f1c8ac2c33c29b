"""Conformance of a `Checkpointer`."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from styrax.core.testing.checkpointer_damage import DAMAGE
from styrax.core.testing.checkpointer_refusals import REFUSALS
from styrax.core.testing.checkpointer_saves import SAVES
from styrax.core.testing.checkpointer_trees import TREES
from styrax.core.testing.round_trip import Check, Factory

CHECKS: dict[str, Check] = {**TREES, **SAVES, **REFUSALS, **DAMAGE}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one check found.

    Attributes:
        name: Of the check.
        passed: Whether the checkpointer keeps it.
        detail: What was wrong; empty if nothing was.

    Example:
        >>> print(Outcome(name="dtype bfloat16", passed=False, detail="w: got float32"))
        FELL SHORT  dtype bfloat16: w: got float32
    """

    name: str
    passed: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"passed      {self.name}" if self.passed else f"FELL SHORT  {self.name}: {self.detail}"


def check_checkpointer(factory: Factory) -> None:
    """Check that what was saved comes back bit for bit, and that nothing unfinished or damaged is ever offered.

    - trees of every dtype, typed random keys, numpy and Python scalars, arrays without dimensions or elements,
      hostile dictionary keys and item names, lists, tuples and `None` come back exactly, into a fresh
      checkpointer, as an abstract tree says and, for `None`, as they were saved; plain JSON and `{}` are items too;
    - after `save` returns, the arrays may be changed, deleted or donated without harm;
    - any single item can be restored alone;
    - `steps` lists complete steps in order, from the disk; no save is dropped because another one runs, because
      its step is lower, or because `close` follows;
    - at no moment during a save, or while a step is replaced, would a crash leave a folder that lists a step
      which does not restore, or that has lost one;
    - a save that fails is raised by `save`, `wait` or `close`, is not listed, and harms no other step;
    - an item, step or leaf that is missing, a leaf too many, another shape or dtype, and what cannot be saved
      give an error that names it, and nothing else;
    - a flipped bit, a zeroed page, a shortened or a deleted file, in any file, give an error or the right values.

    Every check runs, on a folder of its own; `report_checkpointer` gives what each of them found.

    Args:
        factory: `factory(directory)` opens a checkpointer on a folder, which may not exist yet. It must keep X

    Raises:
        AssertionError: The checkpointer breaks one of these; every breach is in the text.
    """
    outcomes = report_checkpointer(factory)
    broken = [outcome for outcome in outcomes if not outcome.passed]
    if broken:
        lines = [f"{outcome.name}: {outcome.detail}" for outcome in broken]
        raise AssertionError("\n  ".join([f"{len(broken)} of {len(outcomes)} checks failed:", *lines]))


def report_checkpointer(factory: Factory, names: Iterable[str] | None = None) -> list[Outcome]:
    """Run every check of `check_checkpointer`, and tell what each of them found; never raises.

    Args:
        factory: As for `check_checkpointer`.
        names: Only these checks, see `CHECKS` of this module; all by default.

    Returns:
        One outcome for each check, in the order of the checks; `print(*outcomes, sep="\\n")` shows them.
    """
    wanted = CHECKS if names is None else {name: CHECKS[name] for name in names}
    return [_run(name, check, factory) for name, check in wanted.items()]


def outcome_table(**reports: Iterable[Outcome]) -> str:
    """Write the reports of several checkpointers side by side, as plain text.

    Args:
        reports: Name of a checkpointer -> its outcomes, all of the same checks.

    Example:
        >>> good, bad = Outcome(name="close waits", passed=True), Outcome(name="close waits", passed=False)
        >>> print(outcome_table(ours=[good], plain=[bad]))
                     ours  plain
        close waits  yes   NO
        in all       1/1   0/1
    """
    columns = {name: list(outcomes) for name, outcomes in reports.items()}
    names = [outcome.name for outcome in next(iter(columns.values()), [])]
    rows = [["", *columns]]
    for number, name in enumerate(names):
        rows.append([name, *("yes" if column[number].passed else "NO" for column in columns.values())])
    rows.append(["in all", *(f"{sum(o.passed for o in column)}/{len(column)}" for column in columns.values())])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _run(name: str, check: Check, factory: Factory) -> Outcome:
    # What still writes into the folder when it is deleted has failed a check already, or is about to.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            check(factory, Path(folder) / "checkpoints")
        except AssertionError as error:
            return Outcome(name=name, passed=False, detail=str(error) or "an assertion failed")
        except Exception as error:
            text = textwrap.shorten(f"{type(error).__name__}: {error}", 400)
            return Outcome(name=name, passed=False, detail=text)
    return Outcome(name=name, passed=True)
