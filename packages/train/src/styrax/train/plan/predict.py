r"""The bytes of a step, predicted without a compiler.

Parameters, optimizer state, other variables and the batch are exact: the sizes of their shards. The rest is a model of
what XLA does with a decoder, per device, with $T$ tokens of a micro-batch, $c$ bytes of the compute dtype, $d$ the
width of the residual stream, $L$ layers, $V$ logits, and $H$ numbers in the head:

- gradients $G$: as the parameters, and once more where micro-batches are summed;
- activations $A$: what layers keep for the backward pass, $L$ times `styrax.train.plan.blocks.kept_by_layer`; of
  layers in stages, `styrax.train.plan.stages.held_by_stages`;
- temporaries: the rest of the larger of two moments. One is a block on its way back, $A + G + C + B$, where $C$ is a
  copy of the parameters in the compute dtype, if that is another, and $B$ is
  `styrax.train.plan.blocks.block_at_work`; stages hold more. The other is the loss, $A + C + H c + 4 T d c$ and a piece
  of the logits, with the ids of the whole batch, of all devices, by which the embedding is looked up and its gradient
  added up.
  Where a device has one row of the batch, or, with the older compilers, fewer than eight of the head, $H c$ becomes
  $3 H c$.
  Older TPU compilers leave gaps: they take `gaps_of` times what is alive, but for activations of all kinds.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from dataclasses import dataclass
from typing import Any

import jax

from styrax.core import tree
from styrax.train.plan.blocks import block_at_work, kept_by_layer
from styrax.train.plan.collectives import Collective, exchange
from styrax.train.plan.program import Program
from styrax.train.plan.shape import Widths, held
from styrax.train.plan.stages import Stages, held_by_stages, micro_tokens, passes, sent_by_stages
from styrax.train.plan.topology import TPUS


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Bytes and arithmetic of one device; None where nothing is known of a model's inside.

    Attributes:
        params: Parameters.
        optimizer: The optimizer's state.
        variables: All else of the state.
        batch: One whole batch.
        gradients: Of the parameters.
        activations: Kept for the backward pass.
        temporaries: Alive at the worst moment beside these.
        outputs: Metrics: what comes out and takes no argument's place.
        flops: Arithmetic of a step, with what is computed again and what stages compute while they wait.
        bytes_accessed: Read and written at least.
        seconds: The least time of a step; see `styrax.train.plan.estimate.Roofline`.
    """

    params: int
    optimizer: int
    variables: int
    batch: int
    gradients: int
    activations: int | None
    temporaries: int | None
    outputs: int
    flops: float | None
    bytes_accessed: float | None
    seconds: float | None = None

    @property
    def groups(self) -> dict[str, int | None]:
        """The bytes by name."""
        names = ("params", "optimizer", "variables", "batch", "gradients", "activations", "temporaries")
        return {name: getattr(self, name) for name in names}

    @property
    def argument_bytes(self) -> int:
        """What goes into a step."""
        return self.params + self.optimizer + self.variables + self.batch

    @property
    def output_bytes(self) -> int:
        """What comes out."""
        return self.params + self.optimizer + self.variables + self.outputs

    @property
    def temp_bytes(self) -> int | None:
        """What is alive between the two at the worst moment."""
        if self.activations is None or self.temporaries is None:
            return None
        return self.gradients + self.activations + self.temporaries

    @property
    def total_bytes(self) -> int | None:
        """What a device needs."""
        return None if self.temp_bytes is None else self.argument_bytes + self.outputs + self.temp_bytes


METRIC_BYTES = 512
"""Room of one metric: a scalar takes a whole tile."""

MOST_LOGITS = 2**27
"""Logits that a device makes at once in the losses of styrax-models, on accelerators."""

ID_BYTES = 5
"""Of a token's id, and of whether it counts."""

GAPS: tuple[tuple[tuple[int, ...], float], ...] = (
    ((0, 0, 52), 1.0),
    ((0,), 1.42),
)
"""First version of libtpu -> bytes that it takes for temporaries, over those alive at the worst moment.

Measured on the recipes. libtpu 0.0.42.1 leaves gaps: 1.33 (Llama 3 70B on v5p:8x8x8) to 1.51 (Llama 3 8B on
v5p:16x16x16). libtpu 0.0.52 leaves none.
"""


def predict(
    program: Program,
    widths: Widths | None,
    *,
    compute_bytes: int,
    flops_per_token: float | None,
    stages: Stages | None = None,
    gaps: float = 1.0,
    metrics: int = 8,
) -> Predicted:
    """Work it out.

    Args:
        program: Of the step.
        widths: Of the model; None if it is no decoder.
        compute_bytes: Of a number of the compute dtype.
        flops_per_token: Of a training step of the model, without recomputation.
        stages: How a pipeline is filled, from `styrax.train.plan.stages.stages_of`.
        gaps: What the compiler takes over what is alive; see `gaps_of`.
        metrics: How many scalars a step gives.
    """
    state = program.state
    params = held(state.params)
    gradients = params * (2 if program.accumulate > 1 else 1)
    activations = temporaries = None
    if widths is not None:
        tokens = program.tokens / program.shards / program.accumulate
        length, copy = program.tokens // program.rows, cast_copy(state.params, compute_bytes)
        pieces = min(tokens, MOST_LOGITS / vocab_total(widths, program)) * widths.vocab
        mesh = dict(program.mesh.shape)
        ways = math.prod(mesh.get(axis, 1) for axis in program.rules.get("embed", ()))
        few = program.rows // program.accumulate == program.shards or (gaps > 1 and widths.embed < 8 * ways)
        loss = at_loss(widths, tokens, compute_bytes, pieces, few=few and program.shards > 1)
        ids = ID_BYTES * program.tokens // program.accumulate if program.shards > 1 else 0
        if stages is None:
            activations = kept(widths, tokens, compute_bytes, length)
            back = round(block_at_work(widths, tokens, compute_bytes, length))
        else:
            found = held_by_stages(
                widths,
                stages,
                micro_tokens(program, stages),
                compute_bytes,
                gradients=narrowed(layers_of(state.params), 4 if widths.fenced else compute_bytes),
                length=length,
                rows=bool({"positions", "segment_ids"} & set(program.batch)),
                cast=copy > 0,
            )
            activations, back, loss = found.kept, found.back, loss + found.early
        alive = activations + copy + max(gradients + back, loss + ids)
        stacked = 0 if widths.remat == "block" else activations  # by far the largest arrays, and all alike: no gaps
        temporaries = max(0, round(gaps * (alive - stacked)) + stacked - activations - gradients)
    arguments = params + held(state.opt_state) + held(state.variables) + held((state.step, state.key))
    flops = None
    if flops_per_token is not None:
        of_head = 0.0 if widths is None else min(flops_per_token, 6 * widths.embed * vocab_total(widths, program))
        of_layers = (flops_per_token - of_head) * (1.0 if widths is None else passes(stages, widths.remat) / 3)
        if stages is not None:
            of_layers *= stages.stretch  # stages compute while they wait
        flops = (of_layers + of_head) * program.tokens / program.mesh.size
    accessed = None
    if activations is not None and widths is not None:
        numbers, sums = 3.0 * widths.layers * widths.block_numbers, 0.0
        if stages is not None:  # each tick reads the weights of its run, and adds to their gradients
            share = stages.ticks / (stages.count * stages.repeats)
            numbers = (passes(stages, widths.remat) - 1) * widths.layers * widths.block_numbers * share
            sums = 3.0 * held(layers_of(state.params)) * stages.ticks / stages.repeats
        accessed = float(2 * arguments + 2 * gradients + 2 * activations)
        accessed += (2 * numbers * compute_bytes + sums) * program.accumulate
    return Predicted(
        params=params,
        optimizer=held(state.opt_state),
        variables=held(state.variables) + held((state.step, state.key)),
        batch=held(program.batch),
        gradients=gradients,
        activations=activations,
        temporaries=temporaries,
        outputs=metrics * METRIC_BYTES,
        flops=flops,
        bytes_accessed=accessed,
    )


def gaps_of(kind: str, version: str | None) -> float:
    """What the compiler for a kind of chip takes for temporaries, over those alive.

    Args:
        kind: Of the chip; 1 for what is no TPU, where nothing was measured.
        version: Of libtpu; None means the newest that was measured.

    >>> gaps_of("v5p", "0.0.42.1"), gaps_of("v5p", "0.0.52"), gaps_of("cpu", None)
    (1.42, 1.0, 1.0)
    """
    if kind not in TPUS:
        return 1.0
    numbers = tuple(int(part) for part in re.findall(r"\d+", version or "")) or GAPS[0][0]
    return next((times for first, times in GAPS if numbers >= first), GAPS[-1][1])


def libtpu_version() -> str | None:
    """The version of libtpu that is installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def exchanges(
    program: Program, widths: Widths | None, *, compute_bytes: int, stages: Stages | None = None
) -> tuple[Collective, ...] | None:
    """What devices have to send one another by the usual ways to split a decoder; None if it is none.

    Over ``fsdp`` parameters are gathered for each pass (forward, again if it is recomputed, and backward) and gradients
    reduced; over ``data`` gradients are summed; over ``tensor`` the stream is summed twice a block and pass; over
    ``expert`` tokens go to experts and back. In a pipeline each tick does so for the layers of its run; see
    `styrax.train.plan.stages.sent_by_stages` for the rest. The compiler may need more.

    Args:
        program: Of the step.
        widths: Of the model.
        compute_bytes: Of a number of the compute dtype.
        stages: How a pipeline is filled.
    """
    if widths is None:
        return None
    sizes, c, times = dict(program.mesh.shape), compute_bytes, program.accumulate
    fsdp, data, tensor, expert = (sizes.get(name, 1) for name in ("fsdp", "data", "tensor", "expert"))
    turns, layers, tokens = (
        passes(stages, widths.remat) - 1,
        float(widths.layers),
        program.tokens / program.shards / times,
    )
    if stages is not None:  # so many layers go past in all ticks of a pass
        layers = stages.ticks * widths.layers / (stages.count * stages.repeats)
        tokens = micro_tokens(program, stages)
    numbers, stream = layers * widths.block_numbers + widths.head_numbers, tokens * widths.embed * c
    found = [
        exchange("all-gather", "fsdp", fsdp, numbers * c, turns * times),
        exchange("reduce-scatter", "fsdp", fsdp, numbers * c, times),
        exchange("all-reduce", "data", data, numbers / fsdp * c, times),
        exchange("all-reduce", "tensor", tensor, stream, 2 * turns * layers * times),
        exchange("all-to-all", "expert", expert, stream, 2 * turns * layers * times),
    ]
    if stages is not None:
        head = widths.head_numbers / fsdp * c
        found += sent_by_stages(stages, stream, times, head if stages.spread else 0.0)
    return tuple(each for each in found if each.group > 1 and each.bytes)


def layers_of(params: Any) -> list[Any]:
    """The parameters of the layers."""
    return [leaf for path, leaf in tree.flatten(params).items() if f"{path}/".startswith("layers/")]


def narrowed(params: Any, compute_bytes: int) -> int:
    """Bytes of gradients as they are made, in the compute dtype if that is the narrower."""
    leaves = jax.tree.leaves(params)
    return sum(held(leaf) * min(compute_bytes, leaf.dtype.itemsize) // leaf.dtype.itemsize for leaf in leaves)


def cast_copy(params: Any, compute_bytes: int) -> int:
    """Bytes of the copy of the parameters in the compute dtype; 0 where it is their own."""
    wide = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1 and leaf.dtype.itemsize != compute_bytes]
    return sum(held(leaf) * compute_bytes // leaf.dtype.itemsize for leaf in wide)


def kept(widths: Widths, tokens: float, compute_bytes: int, length: int = 0) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    return round(widths.layers * kept_by_layer(widths, tokens, compute_bytes, length))


def at_loss(widths: Widths, tokens: float, compute_bytes: int, logits: float, *, few: bool) -> int:
    """Bytes alive at the loss, beside parameters and activations.

    The head is gathered; where a device has few rows, one of the batch or fewer than eight of the head, the compiler
    keeps what is as large as three of it. On a CPU there are logits, their exponentials and their cotangents at once.
    """
    c = compute_bytes
    head = (3 if few else 1) * widths.head_numbers * c
    return round(head + 4 * tokens * c * widths.embed + logits * (12 if widths.fenced else 4 + c))


def vocab_total(widths: Widths, program: Program) -> float:
    """Logits a token over all devices."""
    return widths.vocab * dict(program.mesh.shape).get("tensor", 1)
