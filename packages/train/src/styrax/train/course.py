"""Where a run is: its state and step, and how it gets to a checkpoint and back to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from styrax.train.snapshot import newest, restore, save
from styrax.train.spikes import SpikeWatch
from styrax.train.step import TrainState

if TYPE_CHECKING:
    from styrax.core.protocols import Checkpointer


class Course:
    """The state and the step that a run has reached, and the data that it has left out.

    Going back leaves the data where they are, so what was drawn since the checkpoint is skipped. If the run is stopped
    before its next checkpoint, it resumes from the same one with the data of then, meets the same spike, and goes back
    just so: the run is the one that was not stopped.

    Args:
        make: Makes the first state.
        abstract: Shapes, dtypes and shardings of the state.
        checkpointer: None if the run is not saved; going back then means to begin anew.
        watch: Judges losses, and has a history to keep with each checkpoint; None if nothing judges.

    Attributes:
        state: Of the run.
        step: Updates done.
        skipped: Ranges of batches, in the order in which the data gave them, that are no part of the state.
    """

    def __init__(
        self,
        make: Callable[[], TrainState],
        abstract: TrainState,
        checkpointer: Checkpointer | None,
        watch: SpikeWatch | None,
    ) -> None:
        self.state: Any = None
        self.step = 0
        self.skipped: list[tuple[int, int]] = []
        self._make, self._abstract, self._checkpointer, self._watch = make, abstract, checkpointer, watch

    def resume(self, step: int | None, data: Any) -> None:
        """Go to a checkpoint, the data too, or begin anew if there is none."""
        if step is None or self._checkpointer is None:
            self.state, self.step = self._make(), 0
            return
        self.state, self.step, loop = restore(self._checkpointer, step, self._abstract, data)
        self.skipped = [(first, last) for first, last in loop.get("skipped", ())]
        self._remember(loop)

    def save(self, data: Any, run_info: Mapping[str, Any] | None, **options: Any) -> None:
        """Make a checkpoint; ``options`` are those of :func:`styrax.train.snapshot.save`."""
        assert self._checkpointer is not None
        loop: dict[str, Any] = {"skipped": [list(each) for each in self.skipped]} if self.skipped else {}
        if self._watch is not None:
            loop["watch"] = self._watch.get_state()
            self._watch.saved()
        save(self._checkpointer, self.step, self.state, data, run_info, loop=loop, **options)

    def rewind(self, spike: int, loss: float) -> None:
        """Go back to the newest checkpoint, or to the start, and leave the data where they are.

        Args:
            spike: The step whose loss was a spike.
            loss: That loss.

        Raises:
            UserError: It was gone back there too often.
        """
        assert self._watch is not None
        latest = None
        if self._checkpointer is not None:
            self._checkpointer.wait()
            latest = newest(self._checkpointer)
        self._watch.count(spike, loss, latest or 0)
        drawn = self.step + sum(last - first for first, last in self.skipped)
        undone = self.step - (latest or 0)
        self.state = None  # before there is another: memory may not hold two
        if self._checkpointer is None or latest is None:
            self.state, self.step, loop = self._make(), 0, {}
        else:
            self.state, self.step, loop = restore(self._checkpointer, latest, self._abstract)
        self._remember(loop)
        self.skipped.append((drawn - undone, drawn))

    def _remember(self, loop: Mapping[str, Any]) -> None:
        if self._watch is not None:
            self._watch.set_state(loop.get("watch", {}))
