"""The loop: batches in, steps, metrics out; evaluated, saved, interruptible and exactly resumable."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import nnx

from styrax.core import UserError
from styrax.core.mesh import DEFAULT_RULES
from styrax.train.checks import check_arrays, check_fit
from styrax.train.compiled import CompiledStep
from styrax.train.evaluate import HeldOut, evaluator
from styrax.train.hooks import Hook
from styrax.train.interrupts import Interrupts
from styrax.train.loss import next_token_loss
from styrax.train.shardings import batch_sharding, batch_shards, state_shardings
from styrax.train.snapshot import due_by_time, newest, restore, save
from styrax.train.step import Loss, Metrics, TrainState, init_state, make_step, split_model

if TYPE_CHECKING:
    from styrax.core.protocols import Checkpointer, Tracker

MAX_BAD_STEPS = 10
"""A run stops after this many skipped steps in a row: it would only burn time."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run leaves in memory.

    Attributes:
        state: The last state.
        graphdef: Static part of the model.
        step: Steps done, over all starts of the run.
        metrics: The last step's metrics; empty where no step was done.
        held_out: The last evaluation, or None.
        interrupted: Name of the signal that stopped the run, or None.
        eval_params: As given to :func:`fit`.
    """

    state: TrainState
    graphdef: Any
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: HeldOut | None = None
    interrupted: str | None = None
    eval_params: Callable[[Any, Any], Any] | None = None

    @property
    def model(self) -> nnx.Module:
        """The trained module, with the weights to evaluate."""
        params = self.state.params
        if self.eval_params is not None:
            params = self.eval_params(self.state.opt_state, params)
        return nnx.merge(self.graphdef, params, self.state.variables)


def fit(
    model: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    data: Iterable[Mapping[str, Any]],
    loss: Loss = next_token_loss,
    *,
    steps: int,
    seed: int = 0,
    accumulate: int = 1,
    metrics: Metrics | None = None,
    eval_params: Callable[[Any, Any], Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    rules: Mapping[str, tuple[str, ...]] = DEFAULT_RULES,
    checkpointer: Checkpointer | None = None,
    save_every: int | None = None,
    run_info: Mapping[str, Any] | None = None,
    tracker: Tracker | None = None,
    log_every: int = 1,
    held_out: Sequence[Mapping[str, Any]] | None = None,
    token_bytes: np.ndarray | None = None,
    eval_every: int | None = None,
    hooks: Sequence[Hook] = (),
) -> FitResult:
    """Train a model, or go on with what the checkpointer holds.

    Args:
        model: An ``nnx.Module`` (left as it is), or a function of ``nnx.Rngs`` that makes one; the latter is
            initialised in place, in its shards.
        tx: Any optax transformation.
        data: Iterator of batches: dicts of arrays with a common leading axis. To resume exactly it needs
            ``get_state()`` and ``set_state(state)``, as Grain's iterators and styrax-data's loader have.
        loss: ``loss(model, batch, rngs) -> {name: Term}``.
        steps: Updates in all, those before a resume included.
        seed: Root of initialisation and of every random stream.
        accumulate: Micro-batches a step.
        metrics: ``metrics(opt_state)``, scalars of the optimizer to log.
        eval_params: ``eval_params(opt_state, params)``, the weights to evaluate where they are not those that are
            trained: an average, or those of schedule-free training.
        mesh: Device mesh; None trains on the default device.
        logical_axes: Parameter path pattern to logical axes; None replicates the parameters.
        rules: Logical axes to mesh axes.
        checkpointer: Where the run is saved and resumed from. The caller closes it.
        save_every: Steps between checkpoints; the last step is always saved. None or 0 saves that one only.
        run_info: JSON to keep with each checkpoint (the configuration, versions).
        tracker: Is given ``(step, metrics)``; if it has ``truncate(step)`` and ``flush()``, its record stays
            exact over a kill: later lines are dropped on resume, and it is flushed before each checkpoint.
        log_every: Steps between logged steps.
        held_out: Batches to evaluate on, ``eval_every`` steps apart and at the end; not an iterator, which would be
            used up after the first time.
        token_bytes: Bytes of text a token stands for, for bits per byte.
        eval_every: Steps between evaluations; None or 0 evaluates at the end only.
        hooks: Told of each event.

    Returns:
        The result; ``result.interrupted`` names the signal if one stopped it, after saving.

    Raises:
        UserError: For arguments of another kind (all are listed), batches that the mesh or ``accumulate`` does not
            divide, data that cannot be resumed, a checkpoint of another model, a loss that stays non-finite.

    >>> import jax, jax.numpy as jnp, itertools, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> batch = {"x": jnp.ones((4, 1)), "y": 3 * jnp.ones((4, 1))}
    >>> def squares(model, batch, rngs):
    ...     return {"loss": Term(jnp.sum((model(batch["x"]) - batch["y"]) ** 2), 4.0)}
    >>> from styrax.train import Term
    >>> fit(model, optax.sgd(0.2), itertools.repeat(batch), squares, steps=60).metrics["loss"] < 1e-6
    True
    """
    counts = {"steps": steps, "seed": seed, "accumulate": accumulate, "log_every": log_every}
    check_fit(
        model=model, tx=tx, data=data, loss=loss, mesh=mesh, rules=rules, checkpointer=checkpointer, tracker=tracker,
        held_out=held_out, numbers={**counts, "save_every": save_every, "eval_every": eval_every},
    )  # fmt: skip
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(lambda name: _tell(hooks, "on_interrupt", name)))
        graphdef, abstract, make = _plan(model, tx, seed, mesh, logical_axes, rules)
        latest = newest(checkpointer) if checkpointer is not None else None
        if checkpointer is not None and latest is not None:
            state, start = restore(checkpointer, latest, abstract, data)
        else:
            state, start = make(), 0
        if truncate := getattr(tracker, "truncate", None):
            truncate(start)
        _tell(hooks, "on_start", start, steps, latest is not None)

        stream = iter(data)
        place = _placer(mesh, rules)
        evaluate = evaluator(graphdef, loss, eval_params) if held_out else None
        ledger = Ledger(tracker, hooks, log_every, steps, saved=latest)
        result, step = None, start
        step_fn = CompiledStep(
            make_step(graphdef, tx, loss, accumulate=accumulate, metrics=metrics),
            accumulate=accumulate,
            shards=batch_shards(mesh, rules) if mesh is not None else 1,
            announced=getattr(data, "specs", ()),
            hooks=hooks,
        )

        while step < steps and interrupts.received is None:
            batch = next(stream, None)
            if batch is None:
                raise UserError(
                    f"the data ended after {step} of {steps} steps; repeat it, or ask for at most {step} steps"
                )
            batch = place(check_arrays(batch))
            state, report = step_fn(state, batch, step)
            step += 1
            ledger.add(step, report)
            last = step == steps or interrupts.received is not None
            if evaluate is not None and (step == steps or (eval_every and step % eval_every == 0)):
                begin = time.perf_counter()
                result = evaluate(state, held_out or (), token_bytes)
                ledger.annotate(step, _held_out_metrics(result))
                _tell(hooks, "on_evaluate", step, result, time.perf_counter() - begin)
            lasting = last or bool(save_every and step % save_every == 0)
            if checkpointer is not None and (lasting or due_by_time(checkpointer, step)):
                ledger.flush()
                begin = time.perf_counter()
                save(checkpointer, step, state, data, run_info, metrics=ledger.last, temporary=not lasting)
                ledger.saved = step
                _tell(hooks, "on_save", step, time.perf_counter() - begin)
        # A signal may have come between the last step's save and here: no step is left unsaved.
        if checkpointer is not None and ledger.saved != step and step > start:
            ledger.flush()
            save(checkpointer, step, state, data, run_info, metrics=ledger.last)
        ledger.flush()
        if evaluate is not None and result is None and interrupts.received is None:
            result = evaluate(state, held_out or (), token_bytes)
        if checkpointer is not None:
            checkpointer.wait()
        _tell(hooks, "on_end", step)
        return FitResult(
            state=state, graphdef=graphdef, step=step, metrics=ledger.last, held_out=result,
            interrupted=interrupts.received if step < steps else None, eval_params=eval_params,
        )  # fmt: skip


class Ledger:
    """Metrics on their way from the device to the tracker, one step behind so that nothing waits."""

    def __init__(
        self, tracker: Tracker | None, hooks: Sequence[Hook], every: int, steps: int, saved: int | None = None
    ) -> None:
        self.last: dict[str, float] = {}
        self.saved = saved
        self._tracker, self._hooks, self._every, self._steps = tracker, hooks, every, steps
        self._pending: deque[tuple[int, Any, dict[str, float]]] = deque()
        self._bad = 0

    def add(self, step: int, report: Mapping[str, Any]) -> None:
        """Take a step's metrics, still being computed, and pass on those of the step before."""
        self._pending.append((step, report, {}))
        while len(self._pending) > 1:
            self._emit(*self._pending.popleft())

    def annotate(self, step: int, extra: Mapping[str, float]) -> None:
        """Add to the metrics of the newest step."""
        newest, report, old = self._pending.pop()
        assert newest == step
        self._pending.append((step, report, {**old, **extra}))

    def flush(self) -> None:
        """Pass on everything, and make it durable."""
        while self._pending:
            self._emit(*self._pending.popleft())
        if flush := getattr(self._tracker, "flush", None):
            flush()

    def _emit(self, step: int, report: Mapping[str, Any], extra: Mapping[str, float]) -> None:
        values = {k: float(v) for k, v in jax.device_get(dict(report)).items()} | dict(extra)
        skipped = values.get("skipped", 0.0) - self.last.get("skipped", values.get("skipped", 0.0))
        self._watch(step, values, skipped)
        self.last = values
        if self._tracker is not None and (step % self._every == 0 or step == self._steps or extra):
            self._tracker.log(step, values)
        for hook in self._hooks:
            hook.on_step(step, values)

    def _watch(self, step: int, values: Mapping[str, float], skipped: float) -> None:
        finite = math.isfinite(values["loss"]) and not skipped
        self._bad = 0 if finite else self._bad + 1
        if self._bad > MAX_BAD_STEPS or (not math.isfinite(values["loss"]) and "skipped" not in values):
            first = step - self._bad + 1
            kept = (
                "nothing was saved, so start anew with the change"
                if self.saved is None
                else f"the newest checkpoint is of step {self.saved}"
            )
            raise UserError(
                f"the loss or its gradient is not finite since step {first} (loss {values['loss']} at step {step}). "
                "Lower the learning rate, lengthen the warm-up, clip harder, or look at the batch of that step; "
                f"{kept}"
            )


def _plan(model, tx, seed, mesh, logical_axes, rules) -> tuple[Any, TrainState, Callable[[], TrainState]]:
    """The static model, the abstract state with its shardings, and how to make it in place."""
    key = jax.random.key(seed)

    def build(key: Any) -> TrainState:
        made = model if isinstance(model, nnx.Module) else model(nnx.Rngs(params=stream_key(key)))
        return init_state(made, tx, key=key)[1]

    if isinstance(model, nnx.Module):
        graphdef = split_model(model)[0]
    else:
        graphdef = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(params=stream_key(key)))), nnx.Param, ...)[0]
    abstract = jax.eval_shape(build, key)
    if mesh is None:
        return graphdef, abstract, lambda: jax.jit(build)(key)
    where = state_shardings(abstract, mesh, logical_axes, rules)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        where,
    )
    return graphdef, abstract, lambda: jax.jit(build, out_shardings=where)(key)


def stream_key(key: Any) -> Any:
    """Key of the parameters' initial values."""
    from styrax.core.random import stream

    return stream(key, "init")


def _placer(mesh: jax.sharding.Mesh | None, rules: Mapping[str, tuple[str, ...]]) -> Callable[[Any], Any]:
    """Host rows become global arrays on the mesh; arrays that are there already pass."""
    if mesh is None:
        return lambda batch: batch
    target = batch_sharding(mesh, rules)

    def place(x: Any) -> Any:
        if isinstance(x, jax.Array) and len(x.sharding.device_set) == mesh.size:
            return x
        wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*target.spec[: np.ndim(x)]))
        return jax.make_array_from_process_local_data(wanted, np.asarray(x))

    return lambda batch: jax.tree.map(place, batch)


def _held_out_metrics(result: HeldOut) -> dict[str, float]:
    out = {"held_out_loss": result.loss}
    return out if result.bits_per_byte is None else {**out, "held_out_bits_per_byte": result.bits_per_byte}


def _tell(hooks: Iterable[Hook], event: str, *args: Any) -> None:
    for hook in hooks:
        getattr(hook, event)(*args)


def count_parameters(params: Any) -> int:
    """Number of scalars in a tree of arrays."""
    return sum(math.prod(x.shape) for x in itertools.chain(jax.tree.leaves(params)))
