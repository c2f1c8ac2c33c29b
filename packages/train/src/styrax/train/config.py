"""The keys of ``[train]``, and the sections of a run's configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from styrax.core import UserError, registry
from styrax.core.config import (
    Choice,
    Named,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Schema,
    Seed,
    check,
)
from styrax.core.mesh import MeshConfig, idle_axes
from styrax.core.precision import Policy

Steps = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""A number of steps; the step is counted in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """What to do when the loss is suddenly far above what it was.

    To skip the update of such a step instead, set ``optim.extras.spikes``: the optimizer then judges the norm of the
    gradient within the step. Both can be had.

    Attributes:
        action: "none", or "rollback": go back to the newest checkpoint, and on from there over the data that come
            next, so that the data since that checkpoint are left out.
        window: How many losses before it a loss is compared with; half of them must be there.
        sigmas: How many standard deviations above their median is far; both are robust to outliers.
        limit: Rollbacks to one and the same checkpoint before the run stops.
    """

    action: Literal["none", "rollback"] = "none"
    window: Annotated[int, msgspec.Meta(ge=4, le=100_000)] = 128
    sigmas: PositiveFloat = 10.0
    limit: Positive = 3

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What to do when a run stands still: see `styrax.train.watchdog.Watchdog`.

    Attributes:
        seconds: After so long without the end of a step, evaluation, sample or save, the stacks of all threads are
            written to `stacks-PROCESS.txt` in the run's folder; 0 never does. Compiling does not count.
        end: End the process then, with status 74, so that whoever started it can start it again.
    """

    seconds: NonNegativeFloat = 0.0
    end: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Statistics for the metrics, measured by a program of its own: see `styrax.train.watch.Watch`.

    Attributes:
        parameters: Patterns of parameters' paths, such as "layers/attn/**" or "**/kernel": the norms of these, of their
            gradients and of their updates are logged.
        activations: Log the activations of each layer too.
        every: Steps between watched steps, each of which costs about as much as two.
    """

    parameters: tuple[str, ...] = ()
    activations: bool = False
    every: Positive = 100

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, and what to record.

    Attributes:
        steps: Optimizer updates in all. Ask for more to continue a finished run.
        seed: Root of initialisation, dropout and data order; 32 bits.
        accumulate: Micro-batches a step; must divide data.batch_size.
        precision: "f32", "bf16" (float32 parameters, bfloat16 arithmetic) or "params=...,compute=...,output=...".
        log_every: Steps between lines of metrics.jsonl.
        eval_every: Steps between held-out evaluations; 0 evaluates at the end only.
        trackers: Further trackers by name, beside metrics.jsonl, which is always written.
        sample_prompt: Text that samples continue, of which one is taken at the end; empty takes none.
        sample_every: Steps between samples on the way; 0 takes that at the end only.
        sample_tokens: Length of a sample.
        sample_temperature: Temperature of samples; 0 is greedy.
        baselines: Compare with gzip and a bigram model in the report.
        spike: What to do when the loss is suddenly far above what it was.
        watchdog: What to do when the run stands still.
        watch: Statistics of parameters and activations for the metrics.
    """

    steps: Steps = 1000
    seed: Seed = 0
    accumulate: Positive = 1
    precision: str = "f32"
    log_every: Positive = 1
    eval_every: NonNegative = 0
    trackers: tuple[str, ...] = ()
    sample_prompt: str = ""
    sample_every: NonNegative = 0
    sample_tokens: Positive = 200
    sample_temperature: NonNegativeFloat = 0.8
    baselines: bool = True
    spike: Spike = field(default_factory=Spike)
    watchdog: Watch = field(default_factory=Watch)
    watch: Watched = field(default_factory=Watched)

    def __post_init__(self) -> None:
        """Refuse values out of range, and a precision that cannot be read."""
        check(self)
        Policy.parse(self.precision)


def rows_misfit(rows: int, accumulate: int, shards: int = 1) -> str | None:
    """Tell why a batch of so many rows cannot be cut into micro-batches and over the mesh."""
    if rows % accumulate:
        return f"train.accumulate={accumulate} does not divide the batch of {rows} rows"
    if (rows // accumulate) % shards:
        return (
            f"a micro-batch of {rows // accumulate} rows ({rows} rows / accumulate {accumulate}) does not divide over "
            f"the {shards} devices of the mesh's batch axes; make data.batch_size a multiple of {accumulate * shards}"
        )
    return None


def batch_misfits(sections: Mapping[str, Any], shards: int = 1) -> list[str]:
    """The batch sizes that the configuration names and that cannot be cut as it says, a line each."""
    size = getattr(sections["data"], "batch_size", None)
    sizes = [size] if isinstance(size, int) else [rows for _, rows in size] if isinstance(size, tuple) else []
    found = (rows_misfit(rows, sections["train"].accumulate, shards) for rows in dict.fromkeys(sizes))
    return [problem for problem in found if problem]


def misfits(sections: Mapping[str, Any]) -> list[str]:
    """What a run could not start with, as far as the configuration alone tells.

    Args:
        sections: Section -> its configuration.

    Returns:
        A line each.
    """
    problems = []
    for name, times in Counter(sections["train"].trackers).items():
        if name == "jsonl":
            problems.append("train.trackers: leave 'jsonl' out: metrics.jsonl is always written")
        elif times > 1:
            problems.append(f"train.trackers: {name!r} is there {times} times; name it once")
        else:
            try:
                missing = getattr(registry.resolve("styrax.trackers", name), "missing", lambda: None)()
            except UserError as error:
                missing = str(error)
            problems += [f"train.trackers: {missing}"] if missing else []
    problems += [f"mesh.axes.{line}" for line in idle_axes(sections["mesh"].axes)]
    return problems + batch_misfits(sections) + held_out_misfits(sections)


def held_out_misfits(sections: Mapping[str, Any]) -> list[str]:
    """The held-out sets that are not read as the run's data are, a line for each difference.

    >>> from types import SimpleNamespace as Section
    >>> sets = {"code": Section(seq_len=512, tokenizer="byte")}
    >>> held_out_misfits({"data": Section(seq_len=((0, 128), (9, 256)), tokenizer="byte"), "evaluate": sets})
    ['evaluate.code.seq_len: 512, and data.seq_len is 256; leave it out, and a set has the rows of the run']
    """
    data, problems = sections["data"], []
    if getattr(data, "held_out", 0) == 1:
        problems.append("data.held_out = 1 leaves nothing to train on; expected less than 1")
    for name, config in sections.get("evaluate", {}).items():
        rows, ours = longest(getattr(config, "seq_len", None)), longest(getattr(data, "seq_len", None))
        if None not in (rows, ours) and rows != ours:
            what = f"{rows}, and data.seq_len is {ours}; leave it out, and a set has the rows of the run"
            problems.append(f"evaluate.{name}.seq_len: {what}")
        reader, own = getattr(config, "tokenizer", None), getattr(data, "tokenizer", None)
        if None not in (reader, own) and reader != own:
            what = f"{reader!r}, and data.tokenizer is {own!r}; leave it out: a set is read with the run's tokenizer"
            problems.append(f"evaluate.{name}.tokenizer: {what}")
    return problems


def longest(seq_len: Any) -> int | None:
    """The longest rows of a number or of a schedule; None for anything else."""
    pairs = seq_len if isinstance(seq_len, tuple) else ((0, seq_len),)
    return max((length for _, length in pairs if isinstance(length, int)), default=None)


SCHEMA = Schema(
    misfits=misfits,
    sections={
        "train": TrainConfig,
        "model": Choice(group="styrax.models", default="decoder", implied={"from": "pretrained"}),
        "data": Choice(group="styrax.data", default="tokens"),
        "evaluate": Named(
            group="styrax.data",
            default="tokens",
            like="data",
            keys=("tokenizer", "seq_len", "batch_size", "pack", "max_held_out_batches"),
            defaults={"held_out": 1.0},
        ),
        "optim": Choice(group="styrax.optim", default="adamw"),
        "checkpoint": Choice(group="styrax.checkpoint", default="orbax"),
        "mesh": MeshConfig,
    },
)
"""What ``styrax train`` reads; ``styrax config`` and ``styrax explain`` find it by its entry point."""
