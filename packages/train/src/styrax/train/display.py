"""What a person sees while a run goes on, and what events.jsonl keeps of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from styrax.train.evaluate import HeldOut
from styrax.train.hooks import Hook
from styrax.train.rundir import RunDir


class Pace:
    """Tokens a second and time left, from the last steps that were not interrupted by anything."""

    def __init__(self, window: int = 50) -> None:
        self._gaps: deque[tuple[float, float]] = deque(maxlen=window)
        self._last: float | None = None

    def pause(self) -> None:
        """Do not count the time until the next step."""
        self._last = None

    def step(self, tokens: float, now: float) -> None:
        """Note that a step of so many tokens ended at ``now`` (seconds)."""
        if self._last is not None:
            self._gaps.append((now - self._last, tokens))
        self._last = now

    @property
    def tokens_per_second(self) -> float | None:
        """Over the window; None before two steps are known."""
        seconds = sum(gap for gap, _ in self._gaps)
        return sum(tokens for _, tokens in self._gaps) / seconds if seconds > 0 else None

    @property
    def seconds_per_step(self) -> float | None:
        """The median of the window; None before two steps are known."""
        gaps = sorted(gap for gap, _ in self._gaps)
        return gaps[len(gaps) // 2] if gaps else None


class EventLog(Hook):
    """Keeps wall times in events.jsonl, apart from the metrics, which must not depend on them."""

    def __init__(self, run: RunDir, every: float = 5.0) -> None:
        self._run, self._every = run, every
        self._pace, self._noted = Pace(), time.monotonic()

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        self._run.add_event("start", step=step, steps=steps, resumed=resumed)

    def on_compile(self, seconds: float | None) -> None:
        if seconds is not None:
            self._run.add_event("compile", seconds=round(seconds, 3))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._pace.step(metrics["tokens"], now)
        rate = self._pace.tokens_per_second
        if now - self._noted >= self._every and rate is not None:
            self._noted = now
            self._run.add_event("throughput", step=step, tokens_per_second=round(rate, 1))

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> None:
        self._pace.pause()
        self._run.add_event("evaluate", step=step, seconds=round(seconds, 3))

    def on_save(self, step: int, seconds: float) -> None:
        self._run.add_event("save", step=step, blocked_seconds=round(seconds, 4))

    def on_interrupt(self, name: str) -> None:
        self._run.add_event("interrupt", signal=name)

    def on_end(self, step: int) -> None:
        rate = self._pace.tokens_per_second
        self._run.add_event("end", step=step, tokens_per_second=None if rate is None else round(rate, 1))


class Display(Hook):
    """A bar with the numbers that matter on a terminal; a line now and then elsewhere.

    It draws from the training thread, at most four times a second, so that no thread competes with the step.
    """

    def __init__(self, console: Console, *, every: float | None = None) -> None:
        self._console = console
        self._live = console.is_terminal
        self._every = every if every is not None else (0.25 if self._live else 5.0)
        self._pace, self._drawn, self._held_out = Pace(), 0.0, ""
        self._steps = 0
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            disable=not self._live,
        )
        self._task = self._progress.add_task("", total=None)

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        self._steps = steps
        if resumed:
            self._console.print(f"resuming at step {step:,}")
        self._progress.start()
        self._progress.update(self._task, total=steps, completed=step)

    def on_compile(self, seconds: float | None) -> None:
        if seconds is None:
            self._draw("compiling the step ...")
        else:
            self._console.print(f"compiled the step in {seconds:.1f} s")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._pace.step(metrics["tokens"], now)
        if now - self._drawn < self._every and step < self._steps:
            return
        self._drawn = now
        rate, pace = self._pace.tokens_per_second, self._pace.seconds_per_step
        parts = [f"step {step:,}/{self._steps:,}", f"loss {metrics['loss']:.3f}"]
        parts += [self._held_out] if self._held_out else []
        parts += [f"{rate:,.0f} tokens/s"] if rate is not None else []
        parts += [f"{clock(pace * (self._steps - step))} left"] if pace is not None else []
        if metrics.get("skipped"):
            parts.append(f"{metrics['skipped']:.0f} skipped")
        self._draw("  ".join(parts), completed=step)

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> None:
        self._pace.pause()
        per_byte = result.bits_per_byte
        self._held_out = f"held-out {result.loss:.3f}" if per_byte is None else f"held-out {per_byte:.3f} bits/byte"
        if not self._live:
            self._console.print(f"step {step:,}/{self._steps:,}  {self._held_out}")

    def on_save(self, step: int, seconds: float) -> None:
        if self._live:
            self._console.print(f"checkpoint at step {step:,}", style="dim")

    def on_interrupt(self, name: str) -> None:
        self._console.print(f"{name}: saving after this step")

    def on_end(self, step: int) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""
        self._progress.stop()

    def _draw(self, text: str, completed: int | None = None) -> None:
        if self._live:
            self._progress.update(self._task, description=text, completed=completed, refresh=True)
        else:
            self._console.print(text, highlight=False)


def clock(seconds: float) -> str:
    """A duration for people.

    >>> clock(5), clock(75), clock(7300)
    ('5s', '1m15s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
