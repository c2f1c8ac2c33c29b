"""What happens around the loop: a hook is told of each event and changes nothing of the run."""

from __future__ import annotations

from collections.abc import Mapping

from styrax.train.evaluate import HeldOut


class Hook:
    """Override what you need; each method is called in the main thread, in order."""

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        """The run begins at ``step`` (0, or where the checkpoint stood) of ``steps``."""

    def on_compile(self, seconds: float | None) -> None:
        """Compiling the step begins (None), or has ended after ``seconds``."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step are known. They arrive while the next step runs."""

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> None:
        """A held-out evaluation ended."""

    def on_save(self, step: int, seconds: float) -> None:
        """A checkpoint was handed to the background after blocking the loop for ``seconds``."""

    def on_interrupt(self, name: str) -> None:
        """A signal was received; the loop stops after the running step and saves."""

    def on_end(self, step: int) -> None:
        """The loop ended, for whatever reason."""
