"""Layers on many devices, one run of them after another: microbatches go round a ring of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from styrax.core import UserError
from styrax.models.layers.fence import rows
from styrax.models.layers.meshes import Here
from styrax.models.stack import Step, Turn, recomputed

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.config import Runtime
    from styrax.models.layout import Segment

AXIS = "stage"


class Schedule(NamedTuple):
    """How a pipeline is filled.

    Attributes:
        stages: Devices along the mesh axis `stage`.
        microbatches: Parts that the rows of a batch are cut into.
        repeats: Runs of layers that each stage holds.
    """

    stages: int
    microbatches: int
    repeats: int

    @property
    def ticks(self) -> int:
        """Steps of all stages at once: in each, a stage sends one microbatch through one of its runs."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The part of the time in which a stage waits.

        >>> Schedule(stages=4, microbatches=8, repeats=1).bubble
        0.2727272727272727
        """
        return (self.stages - 1) / self.ticks


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
    stages, problems = here.free[AXIS], []
    cycles = segments[0].repeats
    if len(segments) > 1 or cycles % (stages * runtime.repeats):
        runs = ", ".join(f"{segment.repeats} x {len(segment.stacks)}" for segment in segments)
        problems.append(
            f"layers: expected one cycle of layers, repeated a multiple of stages * repeats = {stages} * "
            f"{runtime.repeats} times, got {runs} layers"
        )
    ways = here.ways(tuple(axis for axis in here.axes("batch", batch) if axis != AXIS))
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
    return Schedule(stages, count, runtime.repeats)


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
) -> tuple[Float[Array, "batch seq embed"], tuple[Any, ...]]:
    r"""Send a batch through layers that are split over the mesh axis `stage`.

    Layers are cut into `stages * repeats` runs, of which stage $s$ holds the runs $s, s + S, \ldots$ At tick $t$ it
    sends microbatch $(t - s) \bmod M$ through its run number $\lfloor (t - s) / M \rfloor$, and hands the result to
    the next stage. The backward pass goes the same way back. With one repeat this is GPipe; more of them interleave
    the runs of layers, so that stages wait less. Stored in order, layers are brought to their stages once a step.

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

    Returns:
        The residual stream after all layers, and for each stack its reports, stacked.
    """
    stages, count, repeats = plan
    each = segment.repeats // (stages * repeats)
    cycle = len(segment.stacks)
    parts = [
        jax.tree.map(lambda leaf: leaf.reshape(repeats, stages, each, *leaf.shape[1:]), blocks[number])
        for number in segment.stacks
    ]
    whole = x.shape[0] // count
    scattered = AXIS in here.axes("batch", x.shape[0]) and whole % stages == 0

    def local(parts: Any, x: Array, given: Any, stage: Array) -> tuple[Array, Any]:
        parts, stage = jax.tree.map(lambda leaf: leaf[:, 0], parts), stage[0]

        def run(at: Array, number: Array, x: Array) -> tuple[Array, Any]:
            step = recomputed(make_step(jax.tree.map(lambda leaf: leaf[number], given)), remat, prevent_cse=False)

            def body(flat: Array, over: Any) -> tuple[Array, Any]:
                held, index = over
                found = []
                for place, block in enumerate(held):
                    repeat = (at * stages + stage) * each + index
                    turn = Turn(segment.first + repeat * cycle + place, repeat, None, {})
                    flat, _, report, _ = step(block, turn, flat, None)
                    found.append(report)
                return flat, tuple(found)

            held = jax.tree.map(lambda leaf: leaf[at], parts)
            flat, found = jax.lax.scan(body, rows(x), (held, jnp.arange(each)))
            return flat.reshape(x.shape), found

        def tick(state: Any, time: Array) -> tuple[Any, Any]:
            arrived, waiting = state
            item = time - stage
            at, number = jnp.clip(item // count, 0, repeats - 1), item % count
            if repeats > 1:  # what comes back to the first stage waits for its turn there
                waiting = waiting.at[(time - stages) % count].set(arrived)
            first = jnp.where(at == 0, x[number], waiting[number]) if repeats > 1 else x[number]
            out, found = run(at, number, jnp.where(stage == 0, first, arrived))
            ring = [(source, (source + 1) % stages) for source in range(stages)]
            return (jax.lax.ppermute(out, AXIS, ring), waiting), (out, found)

        start = jnp.zeros_like(x[0]), jnp.zeros_like(x) if repeats > 1 else None
        _, (out, found) = jax.lax.scan(tick, start, jnp.arange(plan.ticks))
        out = jnp.where(stage == stages - 1, out[-count:], 0)
        if scattered:
            out = jax.lax.psum_scatter(out, AXIS, scatter_dimension=1, tiled=True)
        else:
            out = jax.lax.psum(out, AXIS)
        return out, jax.tree.map(lambda leaf: _of_items(leaf, stage, plan), found)

    run = jax.shard_map(
        local,
        mesh=here.mesh,
        in_specs=(PartitionSpec(None, AXIS), PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=(PartitionSpec(None, AXIS if scattered else None), PartitionSpec(None, AXIS)),
        axis_names={AXIS},
        check_vma=False,
    )
    given = jax.tree.map(lambda leaf: _cut(leaf, count), given)
    out, found = run(parts, _cut(x, count), given, jnp.arange(stages))
    reports = jax.tree.map(lambda leaf: _joined(leaf, segment.repeats, whole), found)
    return jnp.swapaxes(out, 0, 1).reshape(x.shape), reports


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
