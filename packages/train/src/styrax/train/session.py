"""One start of a run: compose the parts, train, and end it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from styrax.core import UserError, registry
from styrax.core.config import Resolved
from styrax.core.trackers import Jsonl
from styrax.train.checks import check_batch
from styrax.train.compose import Parts, compose, fit_options, make_dataset, make_held_out, make_hooks, make_mesh
from styrax.train.display import Display, EventLog
from styrax.train.ending import check_ending, finish, sample_on_the_way
from styrax.train.gather import on_one_host
from styrax.train.goodput import Goodput, newest_step
from styrax.train.hooks import Hook, StopFile
from styrax.train.interrupts import ENDED, UNBEGUN, Interrupts
from styrax.train.loop import FitResult, fit
from styrax.train.machine import caching, keep_freed_memory, use_compilation_cache
from styrax.train.plan.runtime import fitting, misfit
from styrax.train.resume import check_sets, said
from styrax.train.rundir import RunDir, versions
from styrax.train.shardings import batch_sharding, batch_shards
from styrax.train.throughput import machine, model_flops
from styrax.train.watchdog import Watchdog

Told = Callable[[str, int, int | None], None]
"""What is told of a piece of work: its name, how much is done, and of how much."""


class Outcome(NamedTuple):
    """How a start of a run ended.

    Attributes:
        summary: Numbers of the run, as in the report.
        interrupted: Name of the signal that ended it, or None.
    """

    summary: dict[str, Any]
    interrupted: str | None


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[Any]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Any) -> None:
        """Pass on the metrics of a step."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def flush(self) -> None:
        """Make what was logged durable, where a tracker can."""
        for tracker in self._trackers:
            getattr(tracker, "flush", lambda: None)()

    def truncate(self, step: int) -> None:
        """Drop what was logged after ``step``, where a tracker can."""
        for tracker in self._trackers:
            getattr(tracker, "truncate", lambda step: None)(step)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Tell the run's configuration, where a tracker keeps it."""
        for tracker in self._trackers:
            getattr(tracker, "configure", lambda config: None)(config)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


def train(
    resolved: Resolved,
    folder: RunDir,
    *,
    quiet: bool = False,
    source: str | None = None,
    interrupts: Interrupts | None = None,
    begun: int | None = None,
) -> Outcome:
    """Train as configured in ``folder``, from its newest checkpoint if it has one.

    Args:
        resolved: The configuration.
        folder: The run; its config.toml is written here, after everything that a wrong configuration makes fail.
        quiet: Print nothing.
        source: What the configuration was read from; None for the run's own.
        interrupts: Signals that were noted since before this was imported.
        begun: What ``time.monotonic_ns`` said when the command began; None for now.

    Raises:
        KeyboardInterrupt: A signal came before the first step or after the last; nothing is lost.
    """
    lead = jax.process_index() == 0  # it alone writes and prints; the others hold their share of arrays and data
    console = Console(quiet=quiet or not lead)
    config = resolved.sections["train"]
    interrupts = interrupts if interrupts is not None else Interrupts()
    goodput = Goodput(begun=begun, done=newest_step(folder.read_metrics(), folder.read_events()))
    with folder.writing():
        with goodput.during("startup"), interrupts.stopping(UNBEGUN):
            use_compilation_cache()
            keep_freed_memory()
            name = said(source, folder) if source is not None else str(folder.config)
            try:
                make_mesh(resolved)  # a mesh that does not fit is told before the data are built
            except UserError as error:
                raise misfit(error, name) from error
            with progress_bar(console) as progress:
                dataset = build_data(resolved, folder, progress, interrupts)
                held_out = build_sets(resolved, dataset, folder, progress, interrupts)
            parts = compose(resolved, dataset)._replace(held_out=held_out)
            check_sets(folder, sets := prints(held_out))
            check_sample(resolved, dataset)
            shards = 1 if parts.mesh is None else batch_shards(parts.mesh)
            for batch in announced(dataset):
                check_batch(batch, config.accumulate, shards)
        with goodput.during("startup"):
            store = resolved.sections["checkpoint"].build(folder.checkpoints)
        with store as checkpointer:
            with goodput.during("startup"):
                introduce(console, folder, parts, resolved, source)
                sharding = batch_sharding(parts.mesh) if parts.mesh is not None else None
                loader = dataset.loader(sharding=sharding)
                tracker = make_trackers(config.trackers, folder) if lead else Trackers([])
                facts = known(resolved, dataset) | ({"held_out": sets} if sets else {})
                log, display = EventLog(folder, goodput, facts), Display(console, facts=facts)
                begin = Begin(folder, resolved, dataset.tokenizer, source, tracker)
                hooks = [begin, log, StopFile(folder.stop), display] if lead else []
                hooks += make_hooks(resolved)
                if config.watchdog.seconds:
                    hooks.append(watchdog(folder, config.watchdog))

                def sample(result: FitResult) -> None:
                    result = on_one_host(result, parts.mesh)
                    if lead:
                        sample_on_the_way(folder, result, dataset.tokenizer, config, interrupts)

            try:
                with fitting(resolved, name):
                    result = fit(
                        parts.make_model,
                        parts.tx,
                        loader,
                        steps=config.steps,
                        checkpointer=checkpointer,
                        run_info={"config": resolved.to_dict(), "versions": versions()},
                        tracker=tracker,
                        sample=sample,
                        sample_every=config.sample_every if config.sample_prompt else None,
                        hooks=hooks,
                        **fit_options(resolved, parts),
                        goodput=goodput,
                    )
            finally:
                close(hooks)
                display.close()
                loader.close()
                tracker.close()
        if result.interrupted is not None:
            console.print(stopped(result))
            return Outcome(
                {"run": str(folder.path), "step": result.step, "interrupted": result.interrupted},
                result.interrupted,
            )
        if config.sample_prompt:
            result = on_one_host(result, parts.mesh)
        if not lead:
            return Outcome({"run": str(folder.path), "step": result.step}, None)
        if result.stopped is not None:
            folder.stop.unlink(missing_ok=True)
            console.print(
                f"stopped at step {result.step:,} of {config.steps:,} ({result.stopped}); the same command goes on",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
        with interrupts.stopping(ENDED):
            summary = finish(console, folder, resolved, dataset, result, interrupts, log)
        log.account()
        check_ending(summary)
        return Outcome(summary, None)


def stopped(result: FitResult) -> str:
    """Where an interrupted run stands.

    >>> stopped(FitResult(state=None, graphdef=None, step=0, interrupted="SIGINT"))
    'SIGINT before training began; the same command starts again'
    """
    if not result.step:
        return f"{result.interrupted} {UNBEGUN}"
    return f"{result.interrupted}: saved at step {result.step:,}; the same command goes on from there"


class Begin(Hook):
    """Write what the folder says of the run, once the newest checkpoint was found to belong to it."""

    def __init__(
        self, folder: RunDir, resolved: Resolved, tokenizer: Any, source: str | None, tracker: Trackers
    ) -> None:
        self._folder, self._resolved, self._tokenizer, self._source = folder, resolved, tokenizer, source
        self._tracker = tracker

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        """Write it."""
        self._folder.begin(self._resolved.to_toml(), self._source)
        if self._tokenizer is not None:
            self._folder.save_tokenizer(self._tokenizer)
        self._tracker.configure(self._resolved.to_dict())


def build_data(resolved: Resolved, folder: RunDir, progress: Told, interrupts: Interrupts) -> Any:
    """Build (or reuse) the data, stopping between two pieces of it when a signal came."""
    return _built(lambda told: make_dataset(resolved, progress=told), folder, progress, interrupts)


def build_sets(resolved: Resolved, dataset: Any, folder: RunDir, progress: Told, interrupts: Interrupts) -> Any:
    """Build (or reuse) the held-out sets, likewise."""
    return _built(lambda told: make_held_out(resolved, dataset, progress=told), folder, progress, interrupts)


def _built(make: Callable[[Told], Any], folder: RunDir, progress: Told, interrupts: Interrupts) -> Any:
    def watched(label: str, done: int, total: int | None) -> None:
        interrupts.check(UNBEGUN)
        progress(label, done, total)

    try:
        with caching():
            return make(watched)
    except UserError as error:
        before, here = folder.last_start().get("folder"), str(Path.cwd())
        if not folder.exists or before in (None, here):
            raise
        error.args = (
            f"{error}\nThe run was started in {before}, and relative paths in its configuration (sources, stores, "
            f"tokenizers) are relative to that folder; this is {here}. Start it from there",
        )
        raise


def prints(held_out: Any) -> dict[str, str]:
    """The fingerprints of held-out sets, by name, of those that have one."""
    sets = held_out.items() if isinstance(held_out, Mapping) else ()
    return {name: each.fingerprint for name, each in sets if name and hasattr(each, "fingerprint")}


def check_sample(resolved: Resolved, dataset: Any) -> None:
    """Refuse a prompt for data whose ids stand for no text."""
    if resolved.sections["train"].sample_prompt and dataset.tokenizer is None:
        raise UserError(
            f"train.sample_prompt: data.kind={resolved.kinds.get('data')!r} has no tokenizer to read it with; "
            'set train.sample_prompt="", or take data of text'
        )


def announced(dataset: Any) -> list[Mapping[str, Any]]:
    """Every shape of batch that the data will give: as they say, or else the first batch's."""
    specs = getattr(dataset, "specs", None)
    if specs is None:
        return [dataset.batch(0)]
    return [{name: jax.ShapeDtypeStruct(*spec) for name, spec in each.items()} for each in specs]


def known(resolved: Resolved, dataset: Any) -> dict[str, Any]:
    """What is known of devices and model; events.jsonl keeps it, and speeds are worked out with it."""
    rows, length = (getattr(resolved.sections["data"], name, None) for name in ("batch_size", "seq_len"))
    flops = model_flops(
        resolved.sections["model"],
        vocab_size=dataset.vocab_size,
        length=length if isinstance(length, int) else None,  # a schedule has several
    )
    return {**machine(), "rows": rows if isinstance(rows, int) else None, "flops_per_token": flops}


def introduce(console: Console, folder: RunDir, parts: Parts, resolved: Resolved, source: str | None) -> None:
    """Say in four lines what is about to run."""
    device = jax.devices()[0]
    data = parts.dataset
    console.print(f"run       {folder.path}", highlight=False, markup=False, soft_wrap=True)
    config = said(source or folder.config.name, folder)
    console.print(f"config    {config}", highlight=False, markup=False, soft_wrap=True)
    size = "random tokens" if data.num_tokens is None else f"{data.num_tokens:,} tokens"
    console.print(f"data      {size}, vocabulary {data.vocab_size:,}", highlight=False)
    kind = f"{len(jax.devices())} x {device.device_kind} ({device.platform})"
    console.print(f"device    {kind}", highlight=False, markup=False)


def watchdog(folder: RunDir, config: Any) -> Watchdog:
    """What notices that this process of the run stands still."""
    number = jax.process_index()
    return Watchdog(folder.path / f"stacks-{number}.txt", config.seconds, end=config.end, process=number)


def close(hooks: list[Hook]) -> None:
    """End the watchdog among some hooks, whatever happened in the loop."""
    for hook in hooks:
        if isinstance(hook, Watchdog):
            hook.close()


def make_trackers(names: Iterable[str], folder: RunDir) -> Trackers:
    """metrics.jsonl, and further trackers by name."""
    return Trackers([Jsonl(folder.metrics), *(make_tracker(name, folder) for name in names)])


def make_tracker(name: str, folder: RunDir) -> Any:
    """A tracker by its entry point, with default settings."""
    return registry.resolve("styrax.trackers", name)().build(folder.path)


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress of building the data, as one bar a label; the terminal is left as it was, whatever happens."""
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def report(label: str, done: int, total: int | None) -> None:
        if label not in tasks:
            progress.start()
            tasks[label] = progress.add_task(label, total=total)
        progress.update(tasks[label], completed=done, total=total)
        if total is not None and done >= total:
            progress.stop()

    try:
        yield report
    finally:
        if progress.live.is_started:
            progress.stop()
