"""Plain Orbax behind the interface of a `Checkpointer`, at its defaults: what its documentation shows, no more.

Run with the name of a class, this prints that one's report as JSON.
"""

import json
import os
import sys

import orbax.checkpoint as v0
from orbax.checkpoint import v1

from styrax.checkpoint.snapshot import is_json
from styrax.core.testing import report_checkpointer


class Manager:
    """`orbax.checkpoint.CheckpointManager`: `StandardSave` for trees, `JsonSave` for plain JSON."""

    def __init__(self, directory):
        self._manager = v0.CheckpointManager(directory)

    def save(self, step, items):
        args = {name: (v0.args.JsonSave if is_json(v) else v0.args.StandardSave)(v) for name, v in items.items()}
        self._manager.save(step, args=v0.args.Composite(**args))

    def restore(self, step, like):
        # Which of the two an item was saved with, only its folder tells before it is restored.
        folder = self._manager.directory / str(step)
        args = {
            name: v0.args.JsonRestore() if (folder / name / "metadata").exists() else v0.args.StandardRestore(value)
            for name, value in like.items()
        }
        return dict(self._manager.restore(step, args=v0.args.Composite(**args)))

    def steps(self):
        return list(self._manager.all_steps())

    def wait(self):
        self._manager.wait_until_finished()

    def close(self):
        self._manager.close()


class Checkpointer:
    """`orbax.checkpoint.v1.training.Checkpointer`: every item a checkpointable."""

    def __init__(self, directory):
        self._checkpointer = v1.training.Checkpointer(directory)

    def save(self, step, items):
        self._checkpointer.save_checkpointables_async(step, dict(items))

    def restore(self, step, like):
        return self._checkpointer.load_checkpointables(step, dict(like))

    def steps(self):
        return [found.step for found in self._checkpointer.checkpoints]

    def wait(self):
        self._checkpointer.wait()

    def close(self):
        self._checkpointer.close()


if __name__ == "__main__":
    outcomes = report_checkpointer({"Manager": Manager, "Checkpointer": Checkpointer}[sys.argv[1]])
    print(json.dumps([[outcome.name, outcome.passed, outcome.detail] for outcome in outcomes]), flush=True)
    os._exit(0)  # saves that failed leave threads behind, which would wait for five minutes
