"""The keys of ``[train]``, and the sections of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from styrax.core.config import Choice, NonNegative, NonNegativeFloat, Positive, Schema
from styrax.core.mesh import MeshConfig
from styrax.core.precision import Policy


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, and what to record.

    Attributes:
        steps: Optimizer updates in all. Ask for more to continue a finished run.
        seed: Root of initialisation, dropout and data order.
        accumulate: Micro-batches a step; must divide data.batch_size.
        precision: "f32", "bf16" (float32 parameters, bfloat16 arithmetic) or "params=...,compute=...,output=...".
        log_every: Steps between lines of metrics.jsonl.
        eval_every: Steps between held-out evaluations; 0 evaluates at the end only.
        trackers: Further trackers by name, beside metrics.jsonl.
        sample_prompt: Text that the sample at the end continues; empty takes no sample.
        sample_tokens: Length of that sample.
        sample_temperature: Temperature of that sample; 0 is greedy.
        baselines: Compare with gzip and a bigram model in the report.
    """

    steps: Positive = 1000
    seed: NonNegative = 0
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
        """Refuse a precision that cannot be read."""
        Policy.parse(self.precision)


SCHEMA = Schema(
    sections={
        "train": TrainConfig,
        "model": Choice(group="styrax.models", default="decoder"),
        "data": Choice(group="styrax.data", default="tokens"),
        "optim": Choice(group="styrax.optim", default="adamw"),
        "checkpoint": Choice(group="styrax.checkpoint", default="orbax"),
        "mesh": MeshConfig,
    }
)
"""What ``styrax train`` reads; ``styrax config`` and ``styrax explain`` find it by its entry point."""
