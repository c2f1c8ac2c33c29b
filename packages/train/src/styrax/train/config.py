"""The keys of ``[train]``, and the sections of a run's configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from styrax.core import UserError, registry
from styrax.core.config import Choice, NonNegative, NonNegativeFloat, Positive, Schema, Seed, check
from styrax.core.mesh import MeshConfig, idle_axes
from styrax.core.precision import Policy

Steps = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""A number of steps; the step is counted in 32 bits."""


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
        sample_prompt: Text that the sample at the end continues; empty takes no sample.
        sample_tokens: Length of that sample.
        sample_temperature: Temperature of that sample; 0 is greedy.
        baselines: Compare with gzip and a bigram model in the report.
    """

    steps: Steps = 1000
    seed: Seed = 0
    accumulate: Positive = 1
    precision: str = "f32"
    log_every: Positive = 1
    eval_every: NonNegative = 0
    trackers: tuple[str, ...] = ()
    sample_prompt: str = ""
    sample_tokens: Positive = 200
    sample_temperature: NonNegativeFloat = 0.8
    baselines: bool = True

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
                registry.find("styrax.trackers", name)
            except UserError as error:
                problems.append(f"train.trackers: {error}")
    problems += [f"mesh.axes.{line}" for line in idle_axes(sections["mesh"].axes)]
    return problems + batch_misfits(sections)


SCHEMA = Schema(
    misfits=misfits,
    sections={
        "train": TrainConfig,
        "model": Choice(group="styrax.models", default="decoder"),
        "data": Choice(group="styrax.data", default="tokens"),
        "optim": Choice(group="styrax.optim", default="adamw"),
        "checkpoint": Choice(group="styrax.checkpoint", default="orbax"),
        "mesh": MeshConfig,
    },
)
"""What ``styrax train`` reads; ``styrax config`` and ``styrax explain`` find it by its entry point."""
