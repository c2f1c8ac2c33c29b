"""What happens around the loop: a hook is told of each event and changes nothing of the run but its end.

What it may add are metrics of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from styrax.train.evaluate import HeldOut

if TYPE_CHECKING:
    import jax
    import optax

    from styrax.train.step import Loss, TrainState


class Setup(NamedTuple):
    """What is trained, and how; of ``fit`` and its arguments.

    Attributes:
        graphdef: Static part of the model.
        abstract: The state as ``jax.ShapeDtypeStruct``, with shardings if there is a mesh.
        tx: The optimizer.
        loss: The loss.
        accumulate: Micro-batches a step.
        mesh: Where the state lies; None for one device.
        logical_axes: Pattern of a parameter's path to its axes, or None.
        steps: The last step.
    """

    graphdef: Any
    abstract: TrainState
    tx: optax.GradientTransformation
    loss: Loss
    accumulate: int
    mesh: jax.sharding.Mesh | None
    logical_axes: Mapping[str, tuple[str | None, ...]] | None
    steps: int


class Hook:
    """Override what you need; each method is called in the main thread, in order.

    ``on_step`` and ``on_evaluate`` may return a reason to stop, a string. The run then ends as if it had reached its
    last step: it is evaluated and saved. Asking for more steps goes on from there.

    Attributes:
        every: ``on_step`` is called at steps that this divides, and at the last one.

    >>> class Enough(Hook):
    ...     every = 10
    ...     def on_step(self, step, metrics):
    ...         return "the loss is low enough" if metrics["loss"] < 0.1 else None
    """

    every: int = 1

    def on_setup(self, setup: Setup) -> None:
        """What is trained is known, and nothing is made yet; the place to refuse what does not fit it."""

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        """The run begins at ``step`` (0, or where the checkpoint stood) of ``steps``."""

    def on_compile(self, seconds: float | None) -> None:
        """Compiling the step begins (None), or has ended after ``seconds``."""

    def on_batch(self, step: int, state: TrainState, batch: Any) -> Callable[[], Mapping[str, float]] | None:
        """A step is about to be taken; called at each, whatever ``every`` is.

        ``state`` and ``batch`` are gone when the step begins: hand them to a compiled function now, or leave them. The
        function that you may return is called after the step, and what it gives is logged with the step's metrics, also
        where ``log_every`` has no line. With several processes, what has all devices at work is called on each of them.
        """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The metrics of a step are known. They arrive while the next step runs."""

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> str | None:
        """The evaluation of one held-out set ended; ``result.name`` tells which."""

    def on_sample(self, step: int, seconds: float) -> None:
        """A sample was taken."""

    def on_save(self, step: int, seconds: float) -> None:
        """A checkpoint was handed to the background after blocking the loop for ``seconds``."""

    def on_rollback(self, step: int, to: int, loss: float) -> None:
        """The loss of ``step`` was a spike; the run goes on from step ``to``, over the data that come next."""

    def on_interrupt(self, name: str) -> None:
        """A signal was received; the loop stops after the running step and saves."""

    def on_end(self, step: int) -> None:
        """The loop ended, for whatever reason."""


class StopFile(Hook):
    """Stops the run when a file is there, which anybody may make who may write the folder.

    Args:
        path: The file.
        seconds: How often to look, at most; a folder may be on a slow file system.
        clock: Seconds, never going back.
    """

    def __init__(self, path: Path, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._seconds, self._clock = path, seconds, clock
        self._looked = float("-inf")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Look for the file."""
        now = self._clock()
        if now - self._looked < self._seconds:
            return None
        self._looked = now
        return f"{self._path} was found" if self._path.exists() else None
