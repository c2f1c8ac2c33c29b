"""A step of a run that is over: made again from the nearest checkpoint and the data, compared, and looked into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from styrax.core import UserError
from styrax.core.config import Resolved, find_schema, read_config
from styrax.train.checks import check_arrays
from styrax.train.compiled import CompiledStep
from styrax.train.compose import Parts, compose, make_dataset, make_initial
from styrax.train.loss import next_token_loss
from styrax.train.probe import Prober
from styrax.train.rundir import RunDir, versions
from styrax.train.shardings import batch_sharding, batch_shards, lay_out
from styrax.train.snapshot import newest, restore
from styrax.train.step import TrainState, make_step
from styrax.train.throughput import machine


class Rebuilt(NamedTuple):
    """A run's parts, as they were when it took a step.

    Attributes:
        folder: The run.
        resolved: Its configuration then.
        parts: Model, optimizer, data.
        graphdef: Static part of the model.
        abstract: Shapes, dtypes and shardings of the state.
        make: Makes the first state.
        start: The checkpoint to begin from; None for the run's beginning.
        skipped: Ranges of batches that rollbacks have left out.
    """

    folder: RunDir
    resolved: Resolved
    parts: Parts
    graphdef: Any
    abstract: TrainState
    make: Any
    start: int | None
    skipped: tuple[tuple[int, int], ...]


class Taken(NamedTuple):
    """One step, just taken again.

    Attributes:
        step: Its number.
        batch_index: Place of its batch in the data.
        batch: What it was trained on.
        before: The state that it began with; None if it was not kept.
        metrics: What it reported.
    """

    step: int
    batch_index: int
    batch: Any
    before: Any
    metrics: dict[str, float]


@dataclass(kw_only=True)
class Replay:
    """What :func:`replay` found.

    Attributes:
        step: The step.
        start: The step of the checkpoint that it was made from; 0 for the run's beginning.
        metrics: What the step reports now.
        recorded: What metrics.jsonl has of it; None if it was not logged.
        differences: Metrics that differ from the recorded ones, a line each: ``step 7, loss: 2.0 and 2.1``.
        compared: How many steps, from the checkpoint on, were compared.
        elsewhere: What is not as it was when the run was last started: versions, machine, devices.
        documents: One dict for each stretch of a document in the batch, the highest loss first.
        unaccounted: How far the documents' losses together are from the step's first term; None without documents.
        norms: By path of a parameter, see :class:`styrax.train.probe.Probed`.
        term_gradients: By term of the loss, see :meth:`styrax.train.probe.Prober.term_gradients`.
        activations: By path of a part of the model, see :meth:`styrax.train.probe.Prober.activations`.
        no_activations: Why there are none; None if there are.
        not_finite: Tensors with numbers that are not finite, in the order in which the step makes them.
        first_nan: The operation that makes the first NaN, if it was asked for.
    """

    step: int
    start: int
    metrics: dict[str, float]
    recorded: dict[str, float] | None
    differences: list[str]
    compared: int
    elsewhere: list[str]
    documents: list[dict[str, Any]] = field(default_factory=list)
    unaccounted: float | None = None
    norms: dict[str, Any] = field(default_factory=dict)
    term_gradients: dict[str, dict[str, float]] = field(default_factory=dict)
    activations: dict[str, dict[str, Any]] = field(default_factory=dict)
    no_activations: str | None = None
    not_finite: dict[str, int] = field(default_factory=dict)
    first_nan: str | None = None


def rebuild(folder: RunDir, step: int, overrides: Sequence[str] = ()) -> Rebuilt:
    """Compose a run as it was configured when it took a step.

    A checkpoint has the configuration of the start that saved it; after the last one, ``config.toml`` has it.

    Args:
        folder: The run.
        step: The step to take again, from 1.
        overrides: ``a.b=value``, such as a mesh for the devices that there are here.

    Raises:
        UserError: There is no such run or step.
    """
    folder.require()
    schema = find_schema("train")
    resolved = read_config(schema, str(folder.config))
    start, skipped = None, ()
    if folder.has_checkpoint:
        with resolved.sections["checkpoint"].build(folder.checkpoints, read_only=True) as checkpointer:
            saved = checkpointer.steps()
            start = max((each for each in saved if each < step), default=None)
            after = min((each for each in saved if each >= step), default=None)
            if after is not None:
                config = checkpointer.restore(after, {"run": None})["run"].get("config")
                resolved = schema.resolve(config) if config else resolved
            if (last := newest(checkpointer)) is not None:
                loop = checkpointer.restore(last, {"run": None})["run"].get("loop", {})
                skipped = tuple((int(a), int(b)) for a, b in loop.get("skipped", ()))
    if overrides:
        resolved = schema.resolve(resolved.to_dict(), overrides)
    if not 1 <= step <= resolved.sections["train"].steps:
        raise UserError(f"--step {step}: expected 1 to {resolved.sections['train'].steps}, the steps of {folder.path}")
    parts = compose(resolved, make_dataset(resolved))
    graphdef, abstract, make = lay_out(
        parts.make_model, parts.tx,
        seed=resolved.sections["train"].seed, mesh=parts.mesh, logical_axes=parts.logical_axes,
        initial=make_initial(resolved),
    )  # fmt: skip
    return Rebuilt(folder, resolved, parts, graphdef, abstract, make, start, skipped)


def retake(run: Rebuilt, step: int, *, watched: int | None = None) -> Iterator[Taken]:
    """Take the steps after the nearest checkpoint again, up to one, by the run's own program.

    Args:
        run: From :func:`rebuild`.
        step: The last one.
        watched: The step whose state before is to be kept; by default the last one. 0 keeps that of each.
    """
    config, parts = run.resolved.sections["train"], run.parts
    watched = step if watched is None else watched
    sharding = batch_sharding(parts.mesh) if parts.mesh is not None else None
    loader = parts.dataset.loader(sharding=sharding, prefetch=0)
    try:
        if run.start is None:
            state, done = run.make(), 0
        else:
            section = run.resolved.sections["checkpoint"]
            with section.build(run.folder.checkpoints, read_only=True) as checkpointer:
                state, done, _ = restore(checkpointer, run.start, run.abstract, loader)
        left_out = {batch for first, last in run.skipped for batch in range(first, last)}
        # The data stand where the checkpoint has them: after its own batches and what was left out before it.
        place = _drawn(done, left_out)
        program = CompiledStep(
            make_step(run.graphdef, parts.tx, next_token_loss, accumulate=config.accumulate, metrics=parts.metrics),
            accumulate=config.accumulate,
            mesh=parts.mesh,
            shards=batch_shards(parts.mesh) if parts.mesh is not None else 1,
            announced=getattr(loader, "specs", ()),
            hooks=(),
        )
        for number in range(done + 1, step + 1):
            batch = next(loader)
            while place in left_out:
                place, batch = place + 1, next(loader)
            batch = check_arrays(batch)
            before = jax.tree.map(jnp.copy, state) if watched in (0, number) else None
            state, report = program(state, batch, number - 1)
            metrics = {name: float(value) for name, value in jax.device_get(dict(report)).items()}
            yield Taken(number, place, batch, before, metrics)
            place += 1
    finally:
        loader.close()


def _drawn(steps: int, left_out: set[int]) -> int:
    """How many batches the data have given when a run has done so many steps, those left out included.

    >>> _drawn(2, {1, 2}), _drawn(1, {1, 2}), _drawn(0, set())
    (4, 1, 0)
    """
    place = 0
    for _ in range(steps):
        while place in left_out:
            place += 1
        place += 1
    return place


def prober(run: Rebuilt) -> Prober:
    """What takes a run's steps apart."""
    parts = run.parts
    return Prober(
        run.graphdef, parts.tx,
        accumulate=run.resolved.sections["train"].accumulate, metrics=parts.metrics, mesh=parts.mesh,
        logical_axes=parts.logical_axes,
    )  # fmt: skip


def replay(folder: RunDir, step: int, *, checks: bool = False, overrides: Sequence[str] = ()) -> Replay:
    """Take a step of a run again, compare it with what was recorded, and look into it.

    Every step since the nearest checkpoint is compared with metrics.jsonl bit for bit. With the same versions, devices
    and number of them they are equal; where they are not, ``elsewhere`` tells what has changed.

    Args:
        folder: The run; nothing in it is changed.
        step: Which, from 1.
        checks: Look for the operation that makes the first NaN even if the step has none at its end.
        overrides: ``a.b=value``, such as a mesh for the devices that there are here.

    Raises:
        UserError: There is no such run or step, or its data or checkpoints are gone.
    """
    run = rebuild(folder, step, overrides)
    lines = {line["step"]: line for line in folder.read_metrics()}
    differing, compared, taken = [], 0, None
    for taken in retake(run, step):
        recorded = lines.get(taken.step)
        compared += recorded is not None
        differing += [f"step {taken.step}, {text}" for text in unlike(recorded or {}, taken.metrics)]
    assert taken is not None
    probe = prober(run)
    probed = probe(taken.before, taken.batch)
    found = Replay(
        step=step, start=run.start or 0, metrics=taken.metrics, recorded=lines.get(step), differences=differing,
        compared=compared, elsewhere=elsewhere(folder), norms=probed.norms, not_finite=probed.not_finite,
    )  # fmt: skip
    found.term_gradients = probe.term_gradients(taken.before, taken.batch)
    found.activations, found.no_activations = probe.activations(taken.before, taken.batch)
    if {"tokens", "targets", "loss_mask"} <= set(taken.batch):
        losses = probe.token_losses(taken.before, taken.batch)
        found.documents = documents(run.parts.dataset, taken, losses)
        weight = max(taken.metrics["tokens"], 1.0)
        first = taken.metrics.get("loss_term", taken.metrics["loss"])
        found.unaccounted = float((losses * np.asarray(mask_of(taken.batch))).sum(dtype=np.float64)) / weight - first
    if probed.not_finite or checks:
        found.first_nan = probe.first_nan(taken.before, taken.batch)
    return found


def unlike(recorded: dict[str, Any], now: dict[str, float]) -> list[str]:
    """Metrics that are not equal bit for bit, as far as both have them.

    >>> unlike({"step": 3, "loss": 2.0, "held_out_loss": 1.0}, {"loss": 2.5})
    ['loss: 2.0 recorded, 2.5 now']
    """
    both = [name for name in now if name in recorded]
    return [
        f"{name}: {recorded[name]} recorded, {now[name]} now"
        for name in both
        if recorded[name] != now[name] and not (math.isnan(recorded[name]) and math.isnan(now[name]))
    ]


def elsewhere(folder: RunDir) -> list[str]:
    """What is not as it was when a run was last started."""
    then, now = folder.last_start(), versions()
    keys = (then.keys() | now.keys()) - {"configuration", "folder"}
    pairs = [(key, then.get(key), now.get(key)) for key in sorted(keys)]
    lines = [f"{key}: {old} then, {new} now" for key, old, new in pairs if old != new]
    started = next((event for event in reversed(folder.read_events()) if event["event"] == "start"), {})
    here = machine()
    return lines + [
        f"{key}: {started[key]} then, {here[key]} now"
        for key in ("device_kind", "platform", "devices")
        if key in started and started[key] != here[key]
    ]


def mask_of(batch: Any) -> np.ndarray:
    """Which targets count, on this host."""
    return np.asarray(batch["loss_mask"], np.float32)


def documents(dataset: Any, taken: Taken, losses: np.ndarray) -> list[dict[str, Any]]:
    """The loss of each stretch of a document in a batch, with where it is from, the highest first.

    Args:
        dataset: Tells by ``provenance(step, row)`` where the rows are from; without that, segments stand alone.
        taken: The step.
        losses: Of each target, ``[rows, columns]``.

    Returns:
        Dicts with ``source``, ``document``, ``offset`` (in tokens of the document), ``row``, ``column``, ``length``,
        ``tokens`` (targets that count) and ``loss`` (their mean; NaN if none counts).
    """
    mask, found = mask_of(taken.batch), []
    for row in range(losses.shape[0]):
        for span in spans(dataset, taken, row):
            here = slice(span["column"], span["column"] + span["length"])
            weight = float(mask[row, here].sum())
            total = float((losses[row, here] * mask[row, here]).sum(dtype=np.float64))
            found.append({**span, "tokens": int(weight), "loss": total / weight if weight else float("nan")})

    def rank(each: dict[str, Any]) -> float:
        if not each["tokens"]:
            return -math.inf
        return math.inf if not math.isfinite(each["loss"]) else each["loss"]

    return sorted(found, key=rank, reverse=True)


def spans(dataset: Any, taken: Taken, row: int) -> list[dict[str, Any]]:
    """The stretches of documents in a row, by column."""
    if hasattr(dataset, "provenance"):
        return [
            {
                "source": span.source, "document": span.document, "offset": span.start,
                "row": row, "column": span.column, "length": span.length,
            }
            for span in dataset.provenance(taken.batch_index, row)
        ]  # fmt: skip
    shape = np.asarray(taken.batch["tokens"]).shape
    segments = np.asarray(taken.batch["segment_ids"])[row] if "segment_ids" in taken.batch else np.ones(shape[1])
    edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    return [
        {"source": "", "document": f"row {row}, segment {int(segments[a])}", "offset": 0, "row": row, "column": a,
         "length": b - a}
        for a, b in itertools.pairwise(edges)
        if segments[a]
    ]  # fmt: skip
