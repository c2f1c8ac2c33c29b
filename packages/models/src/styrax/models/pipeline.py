"""Layers on many devices, one run of them after another: microbatches go round a ring of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from styrax.core import UserError
from styrax.models import pipeline_1f1b
from styrax.models.layers.fence import rows
from styrax.models.layers.meshes import Here
from styrax.models.stack import Step, Turn, recomputed

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.config import Runtime
    from styrax.models.layout import Segment
    from styrax.models.pipeline_1f1b import Layers

_ENTERS = "enters a layer"


class Schedule(NamedTuple):
    """How a pipeline is filled.

    Attributes:
        stages: Devices along the mesh axes that split layers, such as `stage`.
        microbatches: Parts that the rows of a batch are cut into.
        repeats: Runs of layers that each stage holds.
        kind: "gpipe", which with several repeats is interleaved, or "1f1b".
    """

    stages: int
    microbatches: int
    repeats: int
    kind: str = "gpipe"

    @property
    def ticks(self) -> int:
        """Steps of all stages at once: in each, a stage sends one microbatch through one of its runs."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The part of the time in which a stage waits; the same in all passes, forward and backward.

        >>> Schedule(stages=4, microbatches=8, repeats=1).bubble
        0.2727272727272727
        """
        return (self.stages - 1) / self.ticks

    @property
    def in_flight(self) -> int:
        """Turns of microbatches of which a stage holds activations when it holds the most.

        >>> Schedule(4, 16, 1).in_flight, Schedule(4, 16, 1, "1f1b").in_flight
        (19, 7)
        """
        return self.ticks if self.kind == "gpipe" else 2 * self.stages - 1

    def __str__(self) -> str:
        """Say it in a line.

        >>> print(Schedule(4, 16, 1, "1f1b"))
        1f1b, 4 stages, 16 microbatches: a stage waits 15.8 % of the time, and holds 7 of them at once
        >>> print(Schedule(4, 8, 2))
        gpipe, 4 stages, 2 times round, 8 microbatches: a stage waits 15.8 % of the time, and holds 19 of them at once
        """
        turns = f", {self.repeats} times round" if self.repeats > 1 else ""
        return (
            f"{self.kind}, {self.stages} stages{turns}, {self.microbatches} microbatches: a stage waits "
            f"{100 * self.bubble:.1f} % of the time, and holds {self.in_flight} of them at once"
        )


def stages_of(here: Here) -> tuple[str, ...]:
    """Name the mesh axes whose devices are stages: those of several devices that the rules in force give for `layers`.

    Args:
        here: The mesh.

    Example:
        >>> from styrax.core import DEFAULT_RULES, MeshConfig, use_rules
        >>> mesh = MeshConfig(axes={"stage": 2, "data": 4}).abstract(8)
        >>> stages_of(Here(mesh, dict(mesh.shape)))
        ('stage',)
        >>> with use_rules({**DEFAULT_RULES, "layers": ()}):
        ...     stages_of(Here(mesh, dict(mesh.shape)))
        ()
    """
    return here.named("layers")[0]


def schedule(runtime: Runtime, segments: Sequence[Segment], batch: int, here: Here) -> Schedule:
    """Work out how a pipeline is filled, and whether it can be.

    Args:
        runtime: Of the config.
        segments: The model's runs of layers.
        batch: Rows.
        here: The mesh.

    Raises:
        UserError: Layers or rows do not divide; all problems are listed.
    """
    over = stages_of(here)
    stages, problems = here.ways(over), []
    cycles = segments[0].repeats
    if len(segments) > 1 or cycles % (stages * runtime.repeats):
        runs = ", ".join(f"{segment.repeats} x {len(segment.stacks)}" for segment in segments)
        problems.append(
            f"layers: expected one cycle of layers, repeated a multiple of stages * repeats = {stages} * "
            f"{runtime.repeats} times, got {runs} layers"
        )
    ways = here.ways(tuple(axis for axis in here.axes("batch", batch) if axis not in over))
    most = batch // (ways * stages) if batch % (ways * stages) == 0 else batch // ways
    count = runtime.microbatches
    if count == 0:
        count = max(number for number in range(1, min(most, 4 * stages) + 1) if most % number == 0)
    elif (batch // ways) % count:
        problems.append(f"runtime.microbatches: expected a divisor of {batch // ways} rows on each device, got {count}")
    if runtime.repeats > 1 and count < stages:
        problems.append(
            f"runtime.repeats: going round {runtime.repeats} times needs at least as many microbatches as stages, "
            f"{stages}, got {count}"
        )
    if problems:
        raise UserError(f"pipeline over {stages} stages:\n  " + "\n  ".join(problems))
    return Schedule(stages, count, runtime.repeats, runtime.schedule)


def run_pipelined(
    make_step: Callable[[Any], Step],
    segment: Segment,
    blocks: Sequence[Any],
    x: Float[Array, "batch seq embed"],
    given: Any,
    *,
    plan: Schedule,
    here: Here,
    remat: Any,
    recompute_stages: bool = False,
) -> tuple[Float[Array, "batch seq embed"], tuple[Any, ...]]:
    r"""Send a batch through layers that are split over the mesh axes of `stages_of`.

    Layers are cut into `stages * repeats` runs, of which stage $s$ holds the runs $s, s + S, \ldots$ At tick $t$ it
    sends microbatch $(t - s) \bmod M$ through its run number $\lfloor (t - s) / M \rfloor$, and hands the result to
    the next stage. The backward pass goes the same way back. With one repeat this is GPipe; more of them interleave
    the runs of layers, so that stages wait less. Stored in order, layers are brought to their stages once a step.
    The schedule "1f1b" is that of `styrax.models.pipeline_1f1b`.

    Source: Huang et al., "GPipe" (2019), section 2.3; Narayanan et al., "Efficient Large-Scale Language Model
    Training" (2021), section 2.2, for interleaved runs.

    Args:
        make_step: Makes the step of `run_scanned` from what one microbatch was given.
        segment: The only run of layers.
        blocks: One stacked block for each place in its cycle.
        x: The residual stream.
        given: Pytree of what else comes with each row, `[batch, ...]`.
        plan: From `schedule`.
        here: The mesh.
        remat: As for `run_scanned`.
        recompute_stages: Keep of each microbatch only what enters a stage, and compute the stage once more.

    Returns:
        The residual stream after all layers, and for each stack its reports, stacked.
    """
    (stages, count, repeats, kind), over = plan, stages_of(here)
    batch = here.axes("batch", x.shape[0])
    each = segment.repeats // (stages * repeats)
    parts = [
        jax.tree.map(lambda leaf: leaf.reshape(repeats, stages, each, *leaf.shape[1:]), blocks[number])
        for number in segment.stacks
    ]
    whole = x.shape[0] // count
    ways = here.ways(tuple(axis for axis in batch if axis not in over))
    ways = ways if set(over) <= set(batch) and whole % (ways * stages) == 0 else 0
    layers = _layers(make_step, segment, each, remat)
    given = jax.tree.map(lambda leaf: _cut(leaf, count), given)
    if kind == "1f1b":
        out, found = pipeline_1f1b.run(layers, parts, x, given, plan=plan, mesh=here.mesh, over=over, ways=ways)
        return out, jax.tree.map(lambda leaf: _joined(leaf, segment.repeats, whole), found)

    def chosen(parts: Any, given: Any, at: Array, number: Array, stage: Array, x: Array) -> tuple[Array, Any]:
        # A place that the compiler knows makes layers the same in all ticks: the backward pass keeps no copy of each.
        held = jax.tree.map(lambda leaf: leaf[at if repeats > 1 else 0], parts)
        return layers(held, jax.tree.map(lambda leaf: leaf[number], given), at * stages + stage, x)

    if recompute_stages:
        chosen = jax.checkpoint(chosen, prevent_cse=False)
    elif repeats > 1 and remat is not None and remat is not False:
        # Layers of several runs do differ from tick to tick. What enters a layer is kept, and they are not; with
        # nothing recomputed they are.
        keep = jax.checkpoint_policies.save_only_these_names(_ENTERS)
        keep = keep if remat is True else jax.checkpoint_policies.save_from_both_policies(keep, remat)
        chosen = jax.checkpoint(chosen, prevent_cse=False, policy=keep)

    dtype, wide = x.dtype, pipeline_1f1b.sum_dtype(x)
    rows_of = pipeline_1f1b.Rows(count, stages, over, ways, x.shape)

    def local(parts: Any, x: Array, given: Any, stage: Array) -> tuple[Array, Any]:
        parts, stage, x = jax.tree.map(lambda leaf: leaf[:, 0], parts), stage[0], x.astype(dtype)

        def tick(state: Any, time: Array) -> tuple[Any, Any]:
            arrived, waiting = state
            item = time - stage
            at, number = jnp.clip(item // count, 0, repeats - 1), item % count
            if repeats > 1:  # what comes back to the first stage waits for its turn there
                waiting = waiting.at[(time - stages) % count].set(arrived)
            first = jnp.where(at == 0, x[number], waiting[number]) if repeats > 1 else x[number]
            out, found = chosen(parts, given, at, number, stage, jnp.where(stage == 0, first, arrived))
            ring = [(source, (source + 1) % stages) for source in range(stages)]
            return (jax.lax.ppermute(out, over, ring), waiting), (out, found)

        start = jnp.zeros_like(x[0]), jnp.zeros_like(x) if repeats > 1 else None
        _, (out, found) = jax.lax.scan(tick, start, jnp.arange(plan.ticks))
        out = jnp.where(stage == stages - 1, out[-count:], 0).astype(wide)
        if ways:
            out = out.reshape(count, *rows_of.apart)
            out = jax.lax.psum_scatter(out, over, scatter_dimension=2, tiled=True)
        else:
            out = jax.lax.psum(out, over)
        return out, jax.tree.map(lambda leaf: _of_items(leaf, stage, plan), found)

    run = jax.shard_map(
        local,
        mesh=here.mesh,
        in_specs=(PartitionSpec(None, over), PartitionSpec(), PartitionSpec(), PartitionSpec(over)),
        out_specs=(rows_of.spec, PartitionSpec(None, over)),
        axis_names=set(over),
        check_vma=False,
    )
    out, found = run(parts, _cut(x, count).astype(wide), given, jnp.arange(stages))
    reports = jax.tree.map(lambda leaf: _joined(leaf, segment.repeats, whole), found)
    return rows_of.joined(out).astype(dtype), reports


def _layers(make_step: Callable[[Any], Step], segment: Segment, each: int, remat: Any) -> Layers:
    """Make what sends one microbatch through one run of `each` cycles of layers."""
    cycle = len(segment.stacks)

    def layers(held: Any, given: Any, run: Array, x: Array) -> tuple[Array, Any]:
        step = recomputed(make_step(given), remat, prevent_cse=False)

        def body(flat: Array, over: Any) -> tuple[Array, Any]:
            held, index = over
            found = []
            for place, block in enumerate(held):
                repeat = run * each + index
                turn = Turn(segment.first + repeat * cycle + place, repeat, None, {})
                flat, _, report, _ = step(block, turn, checkpoint_name(flat, _ENTERS), None)
                found.append(report)
            return flat, tuple(found)

        flat, found = jax.lax.scan(body, rows(x), (held, jnp.arange(each)))
        return flat.reshape(x.shape), found

    return layers


def _cut(x: Array, count: int) -> Array:
    """`[batch, ...] -> [count, batch / count, ...]` by strides, so that rows stay on the devices that hold them."""
    return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)


def _of_items(leaf: Array, stage: Array, plan: Schedule) -> Array:
    """Take the ticks in which a stage had work: `[ticks, each, ...] -> [repeats, 1, each, count, ...]`."""
    kept = jax.lax.dynamic_slice_in_dim(leaf, stage, plan.repeats * plan.microbatches)
    return jnp.moveaxis(kept.reshape(plan.repeats, plan.microbatches, *leaf.shape[1:]), 1, 2)[:, None]


def _joined(leaf: Array, repeats: int, whole: int) -> Array:
    """Put layers in order, and rows; of what has no rows, microbatches are added up."""
    leaf = leaf.reshape(repeats, *leaf.shape[3:])
    if leaf.ndim == 2:
        return leaf.sum(1)
    assert leaf.shape[2] == whole, "reports are of rows, or of all"
    return jnp.swapaxes(leaf, 1, 2).reshape(repeats, math.prod(leaf.shape[1:3]), *leaf.shape[3:])
