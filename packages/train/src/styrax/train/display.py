"""What a person sees while a run goes on, and what events.jsonl keeps of it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from styrax.train.evaluate import HeldOut
from styrax.train.goodput import Goodput
from styrax.train.hooks import Hook
from styrax.train.rundir import RunDir
from styrax.train.throughput import Pace, memory, speeds


class EventLog(Hook):
    """Keeps wall times in events.jsonl, apart from the metrics, which must not depend on them.

    Args:
        run: Whose events they are.
        goodput: Account of the time; it is noted with each checkpoint, at the end, and now and then.
        facts: What is known of devices and model, see :func:`styrax.train.throughput.speeds`.
        every: Seconds between lines of throughput; the account of the time is noted a sixth as often.
    """

    def __init__(
        self, run: RunDir, goodput: Goodput, facts: Mapping[str, Any] | None = None, every: float = 5.0
    ) -> None:
        self._run, self._goodput, self._facts, self._every = run, goodput, dict(facts or {}), every
        self._pace, self._noted, self._accounted = Pace(), time.monotonic(), time.monotonic()
        self._step = 0

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        self._step = step
        self._run.add_event("start", step=step, steps=steps, resumed=resumed, **self._facts)

    def on_compile(self, seconds: float | None) -> None:
        self._pace.pause()
        if seconds is not None:
            self._run.add_event("compile", seconds=round(seconds, 3))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, now = step, time.monotonic()
        self._pace.step(metrics["tokens"], now)
        if now - self._noted >= self._every and self._pace.tokens_per_second is not None:
            self._noted = now
            self._run.add_event("throughput", step=step, **speeds(self._pace, self._facts))
            if now - self._accounted >= 6 * self._every:
                self.account()

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> None:
        self._pace.pause()
        name = {"name": result.name} if result.name else {}
        self._run.add_event("evaluate", step=step, seconds=round(seconds, 3), **name)

    def on_sample(self, step: int, seconds: float) -> None:
        self._pace.pause()
        self._run.add_event("sample", step=step, seconds=round(seconds, 3))

    def on_save(self, step: int, seconds: float) -> None:
        self._pace.pause()
        self._run.add_event("save", step=step, blocked_seconds=round(seconds, 4))
        self.account()

    def on_rollback(self, step: int, to: int, loss: float) -> None:
        self._pace.pause()
        told = loss if math.isfinite(loss) else str(loss)
        self._run.add_event("rollback", step=step, to=to, loss=told)

    def on_interrupt(self, name: str) -> None:
        self._run.add_event("interrupt", signal=name)

    def on_end(self, step: int) -> None:
        known = {name: size for name, size in memory().items() if size is not None}
        self._run.add_event("end", step=step, **speeds(self._pace, self._facts), **known)
        self.account()

    def during(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Charge the time within to a part of the account."""
        return self._goodput.during(part)

    def account(self) -> None:
        """Note where the time of this start went so far."""
        self._accounted = time.monotonic()
        self._run.add_event("goodput", step=self._step, nanoseconds=self._goodput.spent())


class Display(Hook):
    """A bar with the numbers that matter on a terminal; a line now and then elsewhere.

    It draws from the training thread, at most four times a second, so that no thread competes with the step.
    """

    def __init__(self, console: Console, *, every: float | None = None, facts: Mapping[str, Any] | None = None) -> None:
        self._console, self._facts = console, dict(facts or {})
        self._live = console.is_terminal
        self._every = every if every is not None else (0.25 if self._live else 5.0)
        self._pace, self._drawn = Pace(), 0.0
        self._held_out: dict[str, str] = {}
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
        parts += [f"held-out {', '.join(self._held_out.values())}"] if self._held_out else []
        parts += [f"{rate:,.0f} tokens/s"] if rate is not None else []
        used = speeds(self._pace, self._facts).get("mfu_causal")
        parts += [f"MFU {used:.1%}"] if used is not None else []
        parts += [f"{clock(pace * (self._steps - step))} left"] if pace is not None else []
        if metrics.get("skipped"):
            parts.append(f"{metrics['skipped']:.0f} skipped")
        self._draw("  ".join(parts), completed=step)

    def on_evaluate(self, step: int, result: HeldOut, seconds: float) -> None:
        self._pace.pause()
        per_byte, name = result.bits_per_byte, f"{result.name} " if result.name else ""
        said = f"{name}{result.loss:.3f}" if per_byte is None else f"{name}{per_byte:.3f} bits/byte"
        self._held_out[result.name] = said
        if not self._live:
            self._console.print(f"step {step:,}/{self._steps:,}  held-out {said}", markup=False)

    def on_sample(self, step: int, seconds: float) -> None:
        self._pace.pause()

    def on_save(self, step: int, seconds: float) -> None:
        if self._live:
            self._console.print(f"checkpoint at step {step:,}", style="dim")

    def on_rollback(self, step: int, to: int, loss: float) -> None:
        self._pace.pause()
        self._console.print(
            f"the loss of step {step:,} is a spike ({loss:.3f}): back to step {to:,}, over the data that come next"
        )

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
