"""``styrax train``: start a run, or go on with the one that the folder holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from styrax.core import UsageError, UserError
from styrax.core.config import Resolved, find_schema, read_config
from styrax.train.rundir import RunDir

HELP = "train a model, or resume the run that the folder holds"

FREE = (
    "train.steps",
    "train.log_every",
    "train.eval_every",
    "train.trackers",
    "train.sample_",
    "train.baselines",
    "checkpoint.",
    "mesh.",
    "data.prefetch",
    "data.allow_changes",
)
"""Keys that may change when a run is resumed: none of them changes what an update does to the parameters,
except train.steps, which stretches the schedule and is the way to ask for more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "config", nargs="?", metavar="NAME|FILE.toml", help="a recipe or a TOML file; default: what DIR holds"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides; values are TOML")
    parser.add_argument("--run", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Train; returns 0 when done, 130 when interrupted after saving."""
    name, overrides, where = args.config, list(args.overrides), args.run
    if name is not None and "=" in name and not name.endswith(".toml"):
        name, overrides = None, [name, *overrides]
    if name is None and where is None:
        raise UsageError("say what to train: a recipe such as quickstart, a FILE.toml, or --run DIR of a run to resume")
    if name is None and not RunDir(where).exists:
        raise UsageError(f"{where} holds no run to resume; name what to train too, such as: styrax train quickstart")
    folder = RunDir(where if where is not None else Path("runs") / Path(str(name)).stem)
    schema = find_schema("train")
    resolved = read_config(schema, str(folder.config) if name is None else name, overrides)
    if folder.exists:
        check_same(read_config(schema, str(folder.config)), resolved, folder)
    folder.create()

    from styrax.train.session import train  # the first import of jax, after every cheap mistake was answered

    outcome = train(resolved, folder, quiet=args.json)
    if args.json:
        print(json.dumps(outcome.summary))
    return 130 if outcome.interrupted else 0


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


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys.

    >>> flat({"a": {"b": 1}})
    {'a.b': 1}
    """
    if not isinstance(tree, dict):
        return {prefix: tree}
    parts = (flat(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items())
    return {k: v for part in parts for k, v in part.items()}
