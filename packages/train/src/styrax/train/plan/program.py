"""The step of a run as an abstract program: lowered and compiled, with no array made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from styrax.core import rules_in_force, use_rules
from styrax.train.checks import check_batch
from styrax.train.compiled import lower_step
from styrax.train.loss import next_token_loss
from styrax.train.shardings import batch_sharding, batch_shards, lay_out
from styrax.train.step import Loss, Metrics, TrainState, make_step

Spec = Mapping[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step and what goes into it.

    Attributes:
        step: The step, not compiled.
        state: Its state, abstract, each leaf with its sharding.
        batch: Its batch, likewise.
        mesh: Where they lie; of one device, if that is all there is.
        shards: Pieces that the mesh cuts the batch into.
        accumulate: Micro-batches a step.
        rules: Logical axes to mesh axes; the step is to be traced under them, see ``styrax.core.use_rules``.
    """

    step: Callable[..., Any]
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    mesh: Mesh
    shards: int
    accumulate: int
    rules: Mapping[str, tuple[str, ...]]

    @property
    def tokens(self) -> int:
        """Elements of the largest array of a batch: tokens, where rows are tokens."""
        return max(int(np.prod(leaf.shape)) for leaf in self.batch.values())

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return next(iter(self.batch.values())).shape[0]


def program_of(
    model: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    batch: Spec,
    loss: Loss = next_token_loss,
    *,
    mesh: Mesh,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    accumulate: int = 1,
    metrics: Metrics | None = None,
    seed: int = 0,
) -> Program:
    """Make the program that ``fit`` would compile with the same arguments.

    Args:
        model: As for ``fit``.
        tx: As there.
        batch: Name -> shape of the whole array and its dtype.
        loss: As there.
        mesh: Devices that need not exist.
        logical_axes: As there.
        rules: As there.
        accumulate: As there.
        metrics: As there.
        seed: As there.

    Raises:
        UserError: The batch does not divide over the mesh, or parameters do not; all are listed.
    """
    rules = rules_in_force() if rules is None else rules
    shards = batch_shards(mesh, rules)
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
        for name, (shape, dtype) in batch.items()
    }
    check_batch(arrays, accumulate, shards)
    graphdef, state, _ = lay_out(model, tx, seed=seed, mesh=mesh, logical_axes=logical_axes, rules=rules)
    where = batch_sharding(mesh, rules)

    def lie(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":  # a run on one device has no mesh
        alone = SingleDeviceSharding(mesh.devices.flat[0])
        state = jax.tree.map(lambda leaf: lie(leaf, alone), state)
        arrays = {name: lie(leaf, alone) for name, leaf in arrays.items()}
    else:
        arrays = {
            name: lie(leaf, NamedSharding(mesh, PartitionSpec(*where.spec[: len(leaf.shape)])))
            for name, leaf in arrays.items()
        }
    step = make_step(graphdef, tx, loss, accumulate=accumulate, metrics=metrics)
    return Program(step=step, state=state, batch=arrays, mesh=mesh, shards=shards, accumulate=accumulate, rules=rules)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of the program of one device; None where it says nothing that can be believed.

    It counts the body of a loop once, however often it runs: of a model whose layers are looped over, `flops`,
    `bytes_accessed` and `seconds` are those of about one layer.

    Attributes:
        argument_bytes: State and batch.
        output_bytes: Next state and metrics.
        alias_bytes: Of the outputs, those that take the place of arguments.
        temp_bytes: What is alive between the two at the worst moment.
        code_bytes: The program.
        flops: Arithmetic.
        bytes_accessed: Read from and written to memory.
        seconds: The cost model's optimum.
        compile_seconds: How long compiling took here.
    """

    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    code_bytes: int | None
    flops: float | None
    bytes_accessed: float | None
    seconds: float | None
    compile_seconds: float

    @property
    def total_bytes(self) -> int | None:
        """What a device needs: arguments, what of the outputs is no argument's place, temporaries, the program."""
        parts = (self.argument_bytes, self.output_bytes, self.temp_bytes)
        if any(part is None for part in parts):
            return None
        return sum(part for part in parts if part is not None) - (self.alias_bytes or 0) + (self.code_bytes or 0)


LONGEST = 86_400.0
"""No step takes longer: a cost model that says so has overflowed."""


def believable(value: Any, most: float = float("inf")) -> float | None:
    """A positive finite number up to a limit, or None: cost models overflow, and then they lie.

    >>> believable(0.05), believable(-3.2), believable(float("nan")), believable(None), believable(1e12, LONGEST)
    (0.05, None, None, None, None)
    """
    if not isinstance(value, (int, float)) or not 0 < value < most:
        return None
    return float(value)


def compile_program(program: Program) -> tuple[Compiled, str]:
    """Compile for the devices of the mesh.

    Returns:
        ``(what the compiler says, the compiled program as text)``.
    """
    begin = time.perf_counter()
    single = not isinstance(next(iter(program.batch.values())).sharding, NamedSharding)
    with use_rules(program.rules):
        lowered = lower_step(program.step, program.state, program.batch, None if single else program.mesh)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    return read_compiled(compiled.memory_analysis(), compiled.cost_analysis(), seconds), compiled.as_text() or ""


def read_compiled(memory: Any, cost: Any, seconds: float) -> Compiled:
    """Take from JAX's analyses what can be believed.

    Args:
        memory: Of ``compiled.memory_analysis()``.
        cost: Of ``compiled.cost_analysis()``: a mapping, or a list of one.
        seconds: Spent on compiling.

    >>> read_compiled(None, {"flops": 8.0, "optimal_seconds": -2.0}, 1.0).seconds is None
    True
    """
    if isinstance(cost, Sequence) and not isinstance(cost, str):
        cost = cost[0] if cost else None
    cost = cost if isinstance(cost, Mapping) else {}

    def size(name: str) -> int | None:
        value = getattr(memory, f"{name}_size_in_bytes", None)
        return int(value) if isinstance(value, int) and value >= 0 else None

    return Compiled(
        argument_bytes=size("argument"),
        output_bytes=size("output"),
        alias_bytes=size("alias"),
        temp_bytes=size("temp"),
        code_bytes=size("generated_code"),
        flops=believable(cost.get("flops")),
        bytes_accessed=believable(cost.get("bytes accessed")),
        seconds=believable(cost.get("optimal_seconds"), LONGEST),
        compile_seconds=seconds,
    )
