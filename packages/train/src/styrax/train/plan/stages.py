r"""The bytes and the arithmetic of layers in stages, by how the pipeline of a decoder is filled.

With $S$ stages, $M$ micro-batches and $v$ runs of layers a stage there are $n = vM + S - 1$ ticks. In each, a stage
sends one micro-batch of $t$ tokens through one run of $E$ layers, whether there is one or not. $a = t d c$ are the
bytes of a micro-batch between two layers, $k$ what one layer keeps of it and $N$ its numbers (see
`styrax.train.plan.blocks`), and $r$ what is worked out of its positions and documents once a tick: angles, and on a CPU
a table of pairs.

"gpipe" is a loop over ticks, and what each keeps of its own is there until the loop goes back:

- $n (E k + r)$ as it is, and with several runs also the weights of each tick's run, $n E N c$, unless they are in the
  compute dtype, and a TPU's compiler reads them again; with several runs and any recomputation $n E k$; with
  `recompute_stages` $n a$, what enters.
- Going back, beside it: the cotangent of what all ticks gave, $n a$, and that of what went in, $M a$, twice with
  several runs; what one tick kept, or computes once more, $E k + r$; a second copy of the gradients of the layers, in
  the compute dtype, as those of a tick are added to those before; and a block at work.

"1f1b" keeps what went in, $M a / S$ (undivided where rows are not). Going back it holds as much of the cotangents of
what came out and of what went in, and one micro-batch of each; the $2 S - 1$ micro-batches that are on their way; what
a stage keeps of one; both copies of the gradients; and a block at work.

Arithmetic, in forward passes of the layers, each of $n$ ticks: a step is three, and one more for each of these: blocks
are recomputed; stages are (once); the schedule is "1f1b" (twice: to make its loss it goes forward before).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from styrax.core import use_rules
from styrax.train.plan.blocks import block_at_work, kept_by_layer, rows_given
from styrax.train.plan.collectives import Collective, exchange

if TYPE_CHECKING:
    from styrax.train.plan.program import Program
    from styrax.train.plan.shape import Widths


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How a pipeline is filled.

    Attributes:
        count: Stages.
        microbatches: Parts that a batch, or what of it is computed at once, is sent in.
        repeats: Runs of layers that each stage holds.
        one_by_one: The schedule is "1f1b".
        recompute: A stage keeps only what enters it, and is computed once more.
        axes: The mesh axes, joined by "+".
        spread: The rows of each micro-batch divide over the stages too.
    """

    count: int
    microbatches: int
    repeats: int
    one_by_one: bool
    recompute: bool
    axes: str
    spread: bool

    @property
    def ticks(self) -> int:
        """Of a pass through all layers."""
        return self.repeats * self.microbatches + self.count - 1

    @property
    def stretch(self) -> float:
        """Ticks over those in which a stage has work.

        >>> Stages(
        ...     count=4, microbatches=9, repeats=1, one_by_one=False, recompute=False, axes="stage", spread=True
        ... ).stretch
        1.3333333333333333
        """
        return self.ticks / (self.repeats * self.microbatches)


def stages_of(config: Any, program: Program) -> Stages | None:
    """Ask a model's configuration how the pipeline is filled; None where there is none, or nothing is known.

    Args:
        config: With a method ``pipeline(rows=, mesh=)``, as that of ``styrax.models.DecoderConfig``.
        program: The step.

    Raises:
        UserError: Layers or rows do not divide.
    """
    ask = getattr(config, "pipeline", None)
    if ask is None:
        return None
    rows, mesh = program.rows // program.accumulate, program.mesh
    with use_rules(program.rules):
        filled = ask(rows=rows, mesh=mesh)
    if filled is None:
        return None
    names = [name for name in program.rules.get("layers", ()) if dict(mesh.shape).get(name, 1) > 1]
    whole = rows // filled.microbatches
    return Stages(
        count=filled.stages,
        microbatches=filled.microbatches,
        repeats=filled.repeats,
        one_by_one=filled.kind == "1f1b",
        recompute=bool(getattr(getattr(config, "runtime", None), "recompute_stages", False)),
        axes="+".join(names),
        spread=set(names) <= set(program.rules.get("batch", ())) and whole % program.shards == 0,
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a pipeline on one device.

    Attributes:
        kept: For the backward pass.
        back: Alive beside it on the way back, with no gradient but the second copy of those of the layers.
        early: What of that is there at the loss already: on a CPU, the zeros that are added to.
    """

    kept: int
    back: int
    early: int


def held_by_stages(
    widths: Widths,
    stages: Stages,
    tokens: float,
    compute_bytes: int,
    *,
    gradients: int,
    length: int,
    rows: bool,
    cast: bool = False,
) -> Held:
    """Work out the bytes of the layers; see the file.

    Args:
        widths: Of the model.
        stages: How the pipeline is filled.
        tokens: Of one micro-batch, on one device.
        compute_bytes: Of a number of the compute dtype.
        gradients: Bytes of those of the layers.
        length: Tokens of a row.
        rows: Rows have positions or documents of their own.
        cast: Parameters are cast to the compute dtype.
    """
    c, ticks, count = compute_bytes, stages.ticks, stages.microbatches
    layers = widths.layers // (stages.count * stages.repeats)
    one = tokens * widths.embed * c
    wide = tokens * widths.embed * (max(c, 4) if widths.fenced else c)  # a CPU adds up over devices in float32
    given = rows_given(widths, tokens, length) if rows else 0.0
    layer = kept_by_layer(widths, tokens, c, length)
    again = layers * layer + given
    work = block_at_work(widths, tokens, c, length)
    if layers == 1:  # there is no loop over layers: what it keeps makes room for its gradients
        work = max(work - layer, 2 * widths.block_numbers * c)
    early = (gradients + (0 if stages.one_by_one else count * wide)) if widths.fenced else 0
    if stages.one_by_one:
        share = count * one / (stages.count if stages.spread else 1)
        back = 2 * share * (1 + 1 / count) + (2 * stages.count - 1) * one + again + gradients + work
        if widths.fenced and stages.count == 2:  # there loops of one tick are unrolled, and get room of their own
            back += layers * layer + gradients
        return Held(kept=round(share), back=round(back), early=round(early))
    several = stages.repeats > 1
    if stages.recompute:
        kept = one
    elif several and widths.remat != "none":
        kept = layers * layer
    else:
        kept = again + (layers * widths.block_numbers * c if several and (cast or widths.fenced) else 0)
    back = ticks * one + count * wide + (count * one if several else 0) + again + gradients + work
    return Held(kept=round(ticks * kept), back=round(back), early=round(early))


def sent_by_stages(stages: Stages, one: float, times: int, head: float) -> list[Collective]:
    """What devices send over the axes of the stages.

    A micro-batch goes to the next stage at each tick, its cotangent to the one before, and with "1f1b" once more
    forward. What goes in comes from all stages and what comes out goes to all: "gpipe" sends it whole, "1f1b" one
    micro-batch at each tick. And where the stages split the loss, the gradient of the head is summed.

    Args:
        stages: How the pipeline is filled.
        one: Bytes of a micro-batch between two layers, on one device.
        times: How many batches are computed one after another in a step.
        head: Bytes of the gradient of the head.
    """
    ticks, forward = stages.ticks, 2 if stages.one_by_one else 1
    found = [("collective-permute", one, (forward + 1) * ticks), ("all-reduce", head, 1)]
    if stages.one_by_one:
        found += [("all-gather", one, 3 * ticks), ("reduce-scatter", one, 2 * ticks)] if stages.spread else []
        found += [] if stages.spread else [("all-reduce", one, 2 * ticks)]
    else:
        whole = stages.microbatches * one
        found += [("all-gather", whole, 2), ("reduce-scatter", whole, 1)] if stages.spread else []
        found += [("all-reduce", whole, 1 if stages.spread else 2)]
    return [exchange(kind, stages.axes, stages.count, size, count * times) for kind, size, count in found]


def micro_tokens(program: Program, stages: Stages) -> float:
    """Tokens of a micro-batch on one device: axes that split rows do, but for those of the stages."""
    over = dict(program.mesh.shape)
    both = math.prod(over[name] for name in stages.axes.split("+") if name in program.rules.get("batch", ()))
    return program.tokens / program.accumulate / (program.shards / both) / stages.microbatches


def passes(stages: Stages | None, remat: str) -> int:
    """Forward passes of the layers that a step takes as long as.

    >>> passes(None, "block"), passes(None, "none")
    (4, 3)
    """
    found = 3 + (remat == "block")
    if stages is None:
        return found
    return found + (2 if stages.one_by_one else int(stages.recompute))
