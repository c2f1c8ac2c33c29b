"""The step, compiled once for each shape of batch that the data announce."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from styrax.core import UserError, tree
from styrax.train.checks import check_batch
from styrax.train.hooks import Hook


def lower_step(raw: Callable[..., Any], state: Any, batch: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
    """Lower a step as a run does: the state is donated, and comes out where it went in.

    The mesh is set, as parts that the compiler cannot split, such as attention kernels, ask for it.

    Args:
        raw: The step, ``raw(state, batch) -> (state, metrics)``.
        state: Arrays, or ``jax.ShapeDtypeStruct`` with shardings.
        batch: Likewise.
        mesh: Where they lie; None for one device.

    Returns:
        A ``jax.stages.Lowered``; call its ``compile()``.
    """
    where = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        return jax.jit(raw, donate_argnums=0, out_shardings=(where, None)).lower(state, batch)


class CompiledStep:
    """Calls a step, compiling it for the first batch, and for others only if their shape was announced.

    A batch of another shape would compile the step again without a word, so it is an error unless it is part of a
    schedule.

    Args:
        raw: The step.
        accumulate: Micro-batches a step.
        mesh: The device mesh; None for one device.
        shards: Devices along its batch axes.
        announced: Name -> shape and dtype, for each shape of batch to come.
        hooks: Told before and after each compilation.
    """

    def __init__(
        self,
        raw: Callable[..., Any],
        *,
        accumulate: int,
        mesh: jax.sharding.Mesh | None = None,
        shards: int,
        announced: Iterable[Mapping[str, tuple[tuple[int, ...], Any]]],
        hooks: Sequence[Hook],
    ) -> None:
        self._raw, self._hooks, self._mesh = raw, hooks, mesh
        self._accumulate, self._shards = accumulate, shards
        self._announced = {
            frozenset((name, tuple(shape), _dtype(dtype)) for name, (shape, dtype) in spec.items())
            for spec in announced
        }
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, batch: Any, step: int) -> tuple[Any, dict[str, Any]]:
        """Take a step; returns the next state and the metrics."""
        leaves, structure = jax.tree.flatten(batch)
        key = structure, *((x.shape, x.dtype) for x in leaves)
        compiled = self._compiled.get(key)
        if compiled is None:
            if self._compiled:
                self._check(batch, step)
            check_batch(batch, self._accumulate, self._shards)
            compiled = self._compiled[key] = self._compile(state, batch)
        return compiled(state, batch)

    def _check(self, batch: Any, step: int) -> None:
        leaves = tree.flatten(batch).items()
        if frozenset((path, tuple(x.shape), _dtype(x.dtype)) for path, x in leaves) in self._announced:
            return
        shapes = {path: (tuple(x.shape), str(x.dtype)) for path, x in leaves}
        raise UserError(
            f"batch {step} does not have the shapes and dtypes that the step was compiled for; got {shapes}. "
            "Batches must all be alike, or be announced by the data (`specs`): drop or pad the last one"
        )

    def _compile(self, state: Any, batch: Any) -> Any:
        for hook in self._hooks:
            hook.on_compile(None)
        begin = time.perf_counter()
        compiled = lower_step(self._raw, state, batch, self._mesh).compile()
        for hook in self._hooks:
            hook.on_compile(time.perf_counter() - begin)
        return compiled


def _dtype(dtype: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(dtype)
