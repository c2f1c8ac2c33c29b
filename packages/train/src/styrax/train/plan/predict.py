r"""The bytes of a step, predicted without a compiler.

Parameters, optimizer state, other variables and the batch are exact: the sizes of their shards. The rest is a model of
what XLA does with a decoder, per device, with $T$ tokens of a micro-batch, $c$ bytes of the compute dtype, widths of
the residual stream $d$, of all queries $h$, of keys and of values $k$, of the MLP $f$ (twice that with a gate), $L$
layers, $V$ logits, and $N$ numbers in a block and $H$ in the head:

- gradients $G$: as the parameters, and once more where micro-batches are summed;
- activations $A$: what is kept for the backward pass. With everything recomputed, the stream between blocks, $L T d c$;
  else also what a block keeps, $L T c\,(3 d + 2 h + 2 k + f + f')$ with $f'$ of one side of the gate, of which "dots"
  keeps the products, $L T c\,(d + h + 2 k + f)$;
- temporaries: the rest of the larger of two moments. One is a block on its way back, whose weights and their gradients
  are whole, $A + G + C + 2 N c + T c\,(2 f + 2 h + 2 k + 4 d)$, where $C$ is a copy of the parameters in the
  compute dtype, if that is another. The other is the loss, $A + C + H c + 4 T d c$ and a piece of the logits, with
  the ids of the whole batch, of all devices, by which the embedding is looked up and its gradient added up.
  Where a device has one row of the batch, or, with the older compilers, fewer than eight of the head, $H c$ becomes
  $3 H c$.
  Older TPU compilers leave gaps: they take `gaps_of` times what is alive.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from styrax.core.mesh import DEFAULT_RULES
from styrax.train.plan.collectives import Collective, exchange
from styrax.train.plan.program import Program
from styrax.train.plan.shape import Widths, held
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
        flops: Arithmetic of a step, recomputation included, split evenly over the devices.
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
    gaps: float = 1.0,
    metrics: int = 8,
) -> Predicted:
    """Work it out.

    Args:
        program: Of the step.
        widths: Of the model; None if it is no decoder.
        compute_bytes: Of a number of the compute dtype.
        flops_per_token: Of a training step of the model, without recomputation.
        gaps: What the compiler takes over what is alive; see `gaps_of`.
        metrics: How many scalars a step gives.
    """
    state = program.state
    params = held(state.params)
    gradients = params * (2 if program.accumulate > 1 else 1)
    activations = temporaries = None
    if widths is not None:
        tokens = program.tokens / program.shards / program.accumulate
        activations = kept(widths, tokens, compute_bytes)
        copy = cast_copy(state.params, compute_bytes)
        pieces = min(tokens, MOST_LOGITS / vocab_total(widths, program)) * widths.vocab
        mesh = dict(program.mesh.shape)
        ways = math.prod(mesh.get(axis, 1) for axis in DEFAULT_RULES["embed"])
        few = program.rows // program.accumulate == program.shards or (gaps > 1 and widths.embed < 8 * ways)
        block, loss = working(widths, tokens, compute_bytes, pieces, few=few and program.shards > 1)
        ids = ID_BYTES * program.tokens // program.accumulate if program.shards > 1 else 0
        alive = activations + copy + max(gradients + block, loss + ids)
        temporaries = max(0, round(gaps * alive) - activations - gradients)
    arguments = params + held(state.opt_state) + held(state.variables) + held((state.step, state.key))
    flops = None
    if flops_per_token is not None:
        again = 4 / 3 if widths is not None and widths.remat == "block" else 1.0
        flops = flops_per_token * program.tokens * again / program.mesh.size
    accessed = None
    if activations is not None:
        gathered = (3 * widths.layers * widths.block_numbers * compute_bytes) if widths is not None else 0
        accessed = float(2 * arguments + 2 * gradients + 2 * activations + 2 * gathered * program.accumulate)
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


def exchanges(program: Program, widths: Widths | None, *, compute_bytes: int) -> tuple[Collective, ...] | None:
    """What devices have to send one another by the usual ways to split a decoder; None if it is none.

    Over ``fsdp`` parameters are gathered for each pass (forward, again if it is recomputed, and backward) and gradients
    reduced; over ``data`` gradients are summed; over ``tensor`` the stream is summed twice a block and pass; over
    ``expert`` tokens go to experts and back. The compiler may need more.

    Args:
        program: Of the step.
        widths: Of the model.
        compute_bytes: Of a number of the compute dtype.
    """
    if widths is None:
        return None
    sizes, c, times = dict(program.mesh.shape), compute_bytes, program.accumulate
    fsdp, data, tensor, expert = (sizes.get(name, 1) for name in ("fsdp", "data", "tensor", "expert"))
    passes = 3 if widths.remat == "block" else 2
    numbers = widths.layers * widths.block_numbers + widths.head_numbers
    stream = program.tokens / program.shards / times * widths.embed * c
    found = [
        exchange("all-gather", "fsdp", fsdp, numbers * c, passes * times),
        exchange("reduce-scatter", "fsdp", fsdp, numbers * c, times),
        exchange("all-reduce", "data", data, numbers / fsdp * c, times),
        exchange("all-reduce", "tensor", tensor, stream, 2 * passes * widths.layers * times),
        exchange("all-to-all", "expert", expert, stream, 2 * passes * widths.layers * times),
    ]
    return tuple(each for each in found if each.group > 1)


def cast_copy(params: Any, compute_bytes: int) -> int:
    """Bytes of the copy of the parameters in the compute dtype; 0 where it is their own."""
    wide = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1 and leaf.dtype.itemsize != compute_bytes]
    return sum(held(leaf) * compute_bytes // leaf.dtype.itemsize for leaf in wide)


def kept(widths: Widths, tokens: float, compute_bytes: int) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    stream = widths.embed
    mlp = widths.mlp * (2 if widths.gated else 1)
    more: Mapping[str, float] = {
        "block": 0.0,
        "dots": widths.embed + widths.heads + 2 * widths.kv + mlp,
        "none": 3 * widths.embed + 2 * widths.heads + 2 * widths.kv + mlp + widths.mlp,
    }
    return round(widths.layers * tokens * compute_bytes * (stream + more[widths.remat]))


def working(widths: Widths, tokens: float, compute_bytes: int, logits: float, *, few: bool) -> tuple[int, int]:
    """Bytes alive beside parameters, gradients and activations: of a block on its way back, and at the loss.

    At the loss the head is gathered; where a device has few rows, one of the batch or fewer than eight of the head, the
    compiler keeps what is as large as three of it.
    """
    c, mlp = compute_bytes, widths.mlp * (2 if widths.gated else 1)
    block = 2 * widths.block_numbers * c
    block += tokens * c * (2 * mlp + 2 * widths.heads + 2 * widths.kv + 4 * widths.embed)
    loss = (3 if few else 1) * widths.head_numbers * c + 4 * tokens * c * widths.embed + logits * (4 + c)
    return round(block), round(loss)


def vocab_total(widths: Widths, program: Program) -> float:
    """Logits a token over all devices."""
    return widths.vocab * dict(program.mesh.shape).get("tensor", 1)
