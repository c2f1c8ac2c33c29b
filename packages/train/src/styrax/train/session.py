"""One start of a run: compose the parts, train, sample, compare, report."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from styrax.core import registry
from styrax.core.config import Resolved
from styrax.core.trackers import Jsonl
from styrax.train.baselines import Bigram, counted_pairs, gzip_bits_per_byte
from styrax.train.compose import Parts, compose, make_dataset, prompt_ids
from styrax.train.display import Display, EventLog
from styrax.train.hooks import Hook
from styrax.train.loop import FitResult, count_parameters, fit
from styrax.train.report import rows, write_report
from styrax.train.rundir import RunDir, versions, write_atomic
from styrax.train.shardings import batch_sharding, batch_shards
from styrax.train.step import check_batch


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


def train(resolved: Resolved, folder: RunDir, *, quiet: bool = False) -> Outcome:
    """Train as configured in ``folder``, from its newest checkpoint if it has one.

    Args:
        resolved: The configuration.
        folder: The run; its config.toml is written here, after everything that a wrong configuration makes fail.
        quiet: Print nothing.
    """
    console = Console(quiet=quiet)
    config = resolved.sections["train"]
    with folder.writing():
        use_compilation_cache()
        keep_freed_memory()
        dataset = make_dataset(resolved, progress=None if quiet else progress_bar(console))
        parts = compose(resolved, dataset)
        shards = 1 if parts.mesh is None else batch_shards(parts.mesh)
        for batch in announced(dataset):
            check_batch(batch, config.accumulate, shards)
        with resolved.sections["checkpoint"].build(folder.checkpoints) as checkpointer:
            introduce(console, folder, parts, resolved)
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
                    hooks=(Begin(folder, resolved, dataset.tokenizer), EventLog(folder), display),
                )
            finally:
                display.close()
                loader.close()
                tracker.close()
        if result.interrupted is not None:
            console.print(f"{result.interrupted}: saved at step {result.step:,}; the same command goes on from there")
            return Outcome(
                {"run": str(folder.path), "step": result.step, "interrupted": result.interrupted},
                result.interrupted,
            )
        return Outcome(finish(console, folder, resolved, dataset, result), None)


class Begin(Hook):
    """Write what the folder says of the run, once the newest checkpoint was found to belong to it."""

    def __init__(self, folder: RunDir, resolved: Resolved, tokenizer: Any) -> None:
        self._folder, self._resolved, self._tokenizer = folder, resolved, tokenizer

    def on_start(self, step: int, steps: int, resumed: bool) -> None:
        """Write it."""
        write_atomic(self._folder.config, self._resolved.to_toml())
        self._folder.record_versions()
        self._folder.save_tokenizer(self._tokenizer)


def announced(dataset: Any) -> list[Mapping[str, Any]]:
    """Every shape of batch that the data will give: as they say, or else the first batch's."""
    specs = getattr(dataset, "specs", None)
    if specs is None:
        return [dataset.batch(0)]
    return [{name: jax.ShapeDtypeStruct(*spec) for name, spec in each.items()} for each in specs]


def finish(console: Console, folder: RunDir, resolved: Resolved, dataset: Any, result: FitResult) -> dict[str, Any]:
    """Take the sample, compare with the baselines, write the report, and say what to try next."""
    config = resolved.sections["train"]
    summary: dict[str, Any] = {"parameters": count_parameters(result.state.params)}
    if config.baselines:
        summary |= baselines(dataset, result.step)
    write_atomic(folder.path / "summary.json", json.dumps(summary, indent=1))
    if config.sample_prompt:
        console.rule("sample")
        text = take_sample(result.model, dataset.tokenizer, config, echo=console)
        folder.samples.mkdir(exist_ok=True)
        write_atomic(folder.samples / f"{result.step:08d}.txt", text)
    commands = [
        f'styrax generate {folder.path} --prompt "class "',
        f"styrax train --run {folder.path} train.steps={2 * config.steps}",
        "styrax explain train",
    ]
    summary = write_report(folder, changed=resolved.to_toml(all=False), next_commands=commands)
    console.rule("result")
    for label, value in rows(summary):
        console.print(f"{label:<50}{value}", highlight=False)
    console.print(f"{'report':<50}{folder.report}", highlight=False)
    console.rule("try next")
    for command in commands:
        console.print(command, highlight=False, soft_wrap=True)
    return summary


def baselines(dataset: Any, steps: int) -> dict[str, Any]:
    """Bits per byte of gzip -9, and of a bigram model of just the tokens that the run has seen."""
    bigram, seen = Bigram(dataset.vocab_size), 0
    for step in range(steps):
        tokens, targets = counted_pairs(dataset.batch(step))
        bigram.update(tokens, targets)
        seen += len(tokens)
    return {
        "tokens_seen": seen,
        "gzip_bits_per_byte": gzip_bits_per_byte(dataset.held_out_text()),
        "bigram_bits_per_byte": bigram.bits_per_byte(dataset.held_out(), dataset.token_bytes),
    }


def take_sample(model: Any, tokenizer: Any, config: Any, echo: Console) -> str:
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
        pieces.append(piece)
        echo.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    echo.print()
    return "".join(pieces)


def introduce(console: Console, folder: RunDir, parts: Parts, resolved: Resolved) -> None:
    """Say in three lines what is about to run."""
    device = jax.devices()[0]
    data = parts.dataset
    console.print(f"run       {folder.path}", highlight=False)
    console.print(f"data      {data.num_tokens:,} tokens, vocabulary {data.vocab_size:,}", highlight=False)
    console.print(f"device    {len(jax.devices())} x {device.device_kind} ({device.platform})", highlight=False)


def make_tracker(name: str, folder: RunDir) -> Any:
    """A tracker by its entry point, with default settings."""
    return registry.resolve("styrax.trackers", name)().build(folder.path)


def progress_bar(console: Console) -> Callable[[str, int, int | None], None]:
    """Progress of building the data, as one bar a label."""
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    tasks: dict[str, Any] = {}

    def report(label: str, done: int, total: int | None) -> None:
        if label not in tasks:
            progress.start()
            tasks[label] = progress.add_task(label, total=total)
        progress.update(tasks[label], completed=done, total=total)
        if total is not None and done >= total:
            progress.stop()

    return report


def use_compilation_cache() -> None:
    """Let a restart reuse the compiled step, in a folder for this kind of machine, unless the user chose one."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    root = os.environ.get("STYRAX_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "styrax"
    jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jax" / f"{platform.machine()}-{jax.__version__}"))


def keep_freed_memory() -> None:
    """Let glibc keep large blocks for the next step instead of giving them back to the kernel.

    XLA:CPU allocates its temporary buffer anew in every step. Above glibc's limit of 32 MiB each allocation is a
    fresh mapping, whose pages fault one by one; that took a quarter of a small model's step where it was measured.
    Only this command's process is affected; elsewhere than on glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # the names' values in malloc.h
        for option in (mmap_threshold, trim_threshold):
            mallopt(option, 2**31 - 1)
