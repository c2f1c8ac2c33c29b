"""``styrax train``: start a run, or go on with the one that the folder holds."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from styrax.core import UsageError
from styrax.core.config import Resolved, find_schema, read_config
from styrax.train.interrupts import UNBEGUN, Interrupts
from styrax.train.processes import together
from styrax.train.resume import check_same, check_source, settle_steps, source
from styrax.train.rundir import RunDir

HELP = "train a model, or resume the run that the folder holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "config", nargs="?", metavar="NAME|FILE.toml", help="a recipe or a TOML file; default: what DIR holds"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides; values are TOML")
    parser.add_argument("--run", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Train; returns 0 when done, 130 when interrupted."""
    begun = time.monotonic_ns()
    # Before anything slow, so that a signal during the import of jax is not lost in there.
    with Interrupts(command=True) as interrupts:
        with interrupts.stopping(UNBEGUN):
            resolved, folder, asked, notes = plan(args)
            folder.create()
        with together() as lead:
            with interrupts.stopping(UNBEGUN):
                from styrax.train.session import train  # the first import of jax, after every cheap mistake

            if lead and not args.json:
                for note in notes:
                    print(note)
            outcome = train(resolved, folder, quiet=args.json, source=asked, interrupts=interrupts, begun=begun)
            if lead and args.json:
                print(json.dumps(outcome.summary, allow_nan=False))
            return 130 if outcome.interrupted else 0


def plan(args: argparse.Namespace) -> tuple[Resolved, RunDir, str | None, list[str]]:
    """Find out what is to run where, and whether it may.

    Returns:
        ``(configuration, folder, source of the configuration if one was named, notes for the user)``.

    Raises:
        UsageError: It is not said what to run, or the configuration is wrong.
        UserError: The folder holds another run.
    """
    name, overrides, where = args.config, list(args.overrides), args.run
    if name is not None and "=" in name and not Path(name).exists():
        name, overrides = None, [name, *overrides]
    if name is None and where is None:
        raise UsageError("say what to train: a recipe such as quickstart, a FILE.toml, or --run DIR of a run to resume")
    if name is None and not RunDir(where).exists:
        if RunDir(where).has_checkpoint:
            RunDir(where).require()
        raise UsageError(f"{where} holds no run to resume; name what to train too, such as: styrax train quickstart")
    folder = RunDir(where if where is not None else Path("runs") / Path(str(name)).stem)
    schema = find_schema("train")
    resolved = read_config(schema, str(folder.config) if name is None else name, overrides).check()
    asked, notes = None if name is None else source(name, folder), []
    if folder.exists and not folder.has_checkpoint:
        # Nothing to lose: what was wrong with the first try may be put right in the same folder.
        notes.append(f"{folder.path} has no checkpoint, so it starts anew")
    elif folder.exists:
        old = read_config(schema, str(folder.config))
        if asked is not None and where is None:
            check_source(asked, old, resolved, folder)
        check_same(old, resolved, folder)
        resolved, note = settle_steps(old, resolved, overrides, folder)
        notes += [note] if note else []
    return resolved, folder, asked, notes
