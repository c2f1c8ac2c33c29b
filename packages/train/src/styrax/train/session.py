"""One start of a run: compose the parts, train, sample, compare, report."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from styrax.core import UserError, registry
from styrax.core.config import Resolved
from styrax.core.trackers import Jsonl
from styrax.train.baselines import Bigram, counted_pairs, gzip_bits_per_byte
from styrax.train.checks import check_batch
from styrax.train.compose import Parts, compose, make_dataset, make_mesh, prompt_ids
from styrax.train.display import Display, EventLog
from styrax.train.hooks import Hook
from styrax.train.interrupts import ENDED, UNBEGUN, Interrupts
from styrax.train.loop import FitResult, count_parameters, fit
from styrax.train.machine import caching, keep_freed_memory, use_compilation_cache
from styrax.train.report import rows, write_report
from styrax.train.resume import said
from styrax.train.rundir import RunDir, versions, write_atomic
from styrax.train.shardings import batch_sharding, batch_shards


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
) -> Outcome:
    """Train as configured in ``folder``, from its newest checkpoint if it has one.

    Args:
        resolved: The configuration.
        folder: The run; its config.toml is written here, after everything that a wrong configuration makes fail.
        quiet: Print nothing.
        source: What the configuration was read from; None for the run's own.
        interrupts: Signals that were noted since before this was imported.

    Raises:
        KeyboardInterrupt: A signal came before the first step or after the last; nothing is lost.
    """
    console = Console(quiet=quiet)
    config = resolved.sections["train"]
    interrupts = interrupts if interrupts is not None else Interrupts()
    with folder.writing():
        with interrupts.stopping(UNBEGUN):
            use_compilation_cache()
            keep_freed_memory()
            make_mesh(resolved)  # a mesh that does not fit is told before the data are built
            with progress_bar(console) as progress:
                dataset = build_data(resolved, folder, progress, interrupts)
            parts = compose(resolved, dataset)
            shards = 1 if parts.mesh is None else batch_shards(parts.mesh)
            for batch in announced(dataset):
                check_batch(batch, config.accumulate, shards)
        with resolved.sections["checkpoint"].build(folder.checkpoints) as checkpointer:
            introduce(console, folder, parts, resolved, source)
            sharding = batch_sharding(parts.mesh) if parts.mesh is not None else None
            loader = dataset.loader(sharding=sharding)
            tracker = Trackers([Jsonl(folder.metrics), *(make_tracker(n, folder) for n in config.trackers)])
            display = Display(console)
            try:
                result = fit(
                    parts.make_model,
                    parts.tx,
                    loader,
                    steps=config.steps,
                    seed=config.seed,
                    accumulate=config.accumulate,
                    metrics=parts.metrics,
                    eval_params=parts.eval_params,
                    mesh=parts.mesh,
                    logical_axes=parts.logical_axes,
                    checkpointer=checkpointer,
                    save_every=resolved.sections["checkpoint"].every,
                    run_info={"config": resolved.to_dict(), "versions": versions()},
                    tracker=tracker,
                    log_every=config.log_every,
                    held_out=dataset.held_out(),
                    token_bytes=dataset.token_bytes,
                    eval_every=config.eval_every or None,
                    hooks=(Begin(folder, resolved, dataset.tokenizer, source), EventLog(folder), display),
                )
            finally:
                display.close()
                loader.close()
                tracker.close()
        if result.interrupted is not None:
            console.print(stopped(result))
            return Outcome(
                {"run": str(folder.path), "step": result.step, "interrupted": result.interrupted},
                result.interrupted,
            )
        with interrupts.stopping(ENDED):
            summary = finish(console, folder, resolved, dataset, result, interrupts)
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

    def __init__(self, folder: RunDir, resolved: Resolved, tokenizer: Any, source: str | None) -> None:
        self._folder, self._resolved, self._tokenizer, self._source = folder, resolved, tokenizer, source

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        """Write it."""
        self._folder.begin(self._resolved.to_toml(), self._source)
        self._folder.save_tokenizer(self._tokenizer)


def build_data(
    resolved: Resolved, folder: RunDir, progress: Callable[[str, int, int | None], None], interrupts: Interrupts
) -> Any:
    """Build (or reuse) the data, stopping between two pieces of it when a signal came."""

    def watched(label: str, done: int, total: int | None) -> None:
        interrupts.check(UNBEGUN)
        progress(label, done, total)

    try:
        with caching():
            return make_dataset(resolved, progress=watched)
    except UserError as error:
        before, here = folder.last_start().get("folder"), str(Path.cwd())
        if not folder.exists or before in (None, here):
            raise
        error.args = (
            f"{error}\nThe run was started in {before}, and relative paths in its configuration (sources, stores, "
            f"tokenizers) are relative to that folder; this is {here}. Start it from there",
        )
        raise


def announced(dataset: Any) -> list[Mapping[str, Any]]:
    """Every shape of batch that the data will give: as they say, or else the first batch's."""
    specs = getattr(dataset, "specs", None)
    if specs is None:
        return [dataset.batch(0)]
    return [{name: jax.ShapeDtypeStruct(*spec) for name, spec in each.items()} for each in specs]


def finish(
    console: Console, folder: RunDir, resolved: Resolved, dataset: Any, result: FitResult, interrupts: Interrupts
) -> dict[str, Any]:
    """Take the sample, compare with the baselines, write the report, and say what to try next."""
    config = resolved.sections["train"]
    summary: dict[str, Any] = {"parameters": count_parameters(result.state.params)}
    if config.baselines:
        summary |= baselines(dataset, result.step, interrupts)
    write_atomic(folder.summary, json.dumps(summary, indent=1, allow_nan=False))
    if config.sample_prompt:
        console.rule("sample")
        text = take_sample(result.model, dataset.tokenizer, config, console, interrupts)
        folder.samples.mkdir(exist_ok=True)
        write_atomic(folder.samples / f"{result.step:08d}.txt", text)
    commands = [
        shlex.join(["styrax", "generate", str(folder.path), "--prompt", "class "]),
        shlex.join(["styrax", "train", "--run", str(folder.path), f"train.steps={2 * config.steps}"]),
        "styrax explain train",
    ]
    summary = write_report(folder, changed=resolved.to_toml(all=False), next_commands=commands)
    console.rule("result")
    for label, value in rows(summary):
        console.print(f"{label:<50}{value}", highlight=False, markup=False)
    console.print(f"{'report':<50}{folder.report}", highlight=False, markup=False, soft_wrap=True)
    console.rule("try next")
    for command in commands:
        console.print(command, highlight=False, markup=False, soft_wrap=True)
    return summary


def check_ending(summary: Mapping[str, Any]) -> None:
    """Refuse to call a run a success whose last loss is not a finite number.

    Raises:
        UserError: It is not; the summary is that of a report.
    """
    if summary["step"] and summary["loss"] is None:
        raise UserError(
            f"the run has done its {summary['step']:,} steps, but the last loss is not finite; metrics.jsonl tells "
            "since when. Lower the learning rate, lengthen the warm-up or clip harder, in a new run with another --run"
        )


def baselines(dataset: Any, steps: int, interrupts: Interrupts) -> dict[str, Any]:
    """Bits per byte of gzip -9, and of a bigram model of just the tokens that the run has seen."""
    bigram, seen = Bigram(dataset.vocab_size), 0
    for step in range(steps):
        interrupts.check(ENDED)
        tokens, targets = counted_pairs(dataset.batch(step))
        bigram.update(tokens, targets)
        seen += len(tokens)
    return {
        "tokens_seen": seen,
        "gzip_bits_per_byte": gzip_bits_per_byte(dataset.held_out_text()),
        "bigram_bits_per_byte": bigram.bits_per_byte(dataset.held_out(), dataset.token_bytes),
    }


def take_sample(model: Any, tokenizer: Any, config: Any, echo: Console, interrupts: Interrupts) -> str:
    """Continue the prompt, printing as it comes."""
    ids = model.generate(
        prompt_ids(tokenizer, config.sample_prompt),
        max_tokens=config.sample_tokens,
        temperature=config.sample_temperature,
        seed=config.seed,
        stop_ids=(tokenizer.eos_id,),
    )
    pieces = []
    for piece in itertools.chain([config.sample_prompt], tokenizer.decode_stream(ids)):
        interrupts.check(ENDED)
        pieces.append(piece)
        echo.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    echo.print()
    return "".join(pieces)


def introduce(console: Console, folder: RunDir, parts: Parts, resolved: Resolved, source: str | None) -> None:
    """Say in four lines what is about to run."""
    device = jax.devices()[0]
    data = parts.dataset
    console.print(f"run       {folder.path}", highlight=False, markup=False, soft_wrap=True)
    config = said(source or folder.config.name, folder)
    console.print(f"config    {config}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"data      {data.num_tokens:,} tokens, vocabulary {data.vocab_size:,}", highlight=False)
    kind = f"{len(jax.devices())} x {device.device_kind} ({device.platform})"
    console.print(f"device    {kind}", highlight=False, markup=False)


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
