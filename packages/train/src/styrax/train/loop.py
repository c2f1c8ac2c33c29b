"""The loop: batches in, steps, metrics out; evaluated, saved, interruptible and exactly resumable."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import nnx

from styrax.core import UserError, rules_in_force, use_rules
from styrax.train.accord import Accord
from styrax.train.checks import check_arrays, check_fit
from styrax.train.compiled import CompiledStep
from styrax.train.config import Spike
from styrax.train.course import Course
from styrax.train.evaluate import HeldOut, evaluator
from styrax.train.goodput import Goodput, Meter
from styrax.train.hooks import Hook, Setup
from styrax.train.interrupts import Interrupts
from styrax.train.ledger import Ledger, tell
from styrax.train.loss import next_token_loss
from styrax.train.shardings import Initial, batch_sharding, batch_shards, lay_out
from styrax.train.snapshot import due_by_time, newest
from styrax.train.spikes import SpikeWatch
from styrax.train.step import Loss, Metrics, TrainState, make_step

if TYPE_CHECKING:
    from styrax.core.protocols import Checkpointer, Tracker

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run leaves in memory.

    Attributes:
        state: The last state.
        graphdef: Static part of the model.
        step: Steps done, over all starts of the run.
        metrics: The last step's metrics; empty where no step was done.
        held_out: The last evaluation, or None; by name where the held-out sets have names.
        interrupted: Name of the signal that stopped the run, or None.
        stopped: Why a hook wished to stop before the last step, or None.
        eval_params: As given to :func:`fit`.
        skipped: Ranges `(first, last + 1)` of batches, in the order of the data, that rollbacks have left out.
        goodput: Where the time went.
    """

    state: TrainState
    graphdef: Any
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: HeldOut | Mapping[str, HeldOut] | None = None
    interrupted: str | None = None
    stopped: str | None = None
    eval_params: Callable[[Any, Any], Any] | None = None
    skipped: tuple[tuple[int, int], ...] = ()
    goodput: Goodput | None = None

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
    data: Iterable[Batch],
    loss: Loss = next_token_loss,
    *,
    steps: int,
    seed: int = 0,
    accumulate: int = 1,
    metrics: Metrics | None = None,
    eval_params: Callable[[Any, Any], Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    initial: Initial | None = None,
    checkpointer: Checkpointer | None = None,
    save_every: int | None = None,
    run_info: Mapping[str, Any] | None = None,
    tracker: Tracker | None = None,
    log_every: int = 1,
    held_out: Sequence[Batch] | Mapping[str, Sequence[Batch]] | None = None,
    token_bytes: np.ndarray | None = None,
    eval_every: int | None = None,
    sample: Callable[[FitResult], None] | None = None,
    sample_every: int | None = None,
    spike: Spike | None = None,
    hooks: Sequence[Hook] = (),
    goodput: Goodput | None = None,
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
        rules: Logical axes to mesh axes, for arrays and for what layers do by hand, see ``styrax.core.use_rules``; all
            that runs in here, hooks too, is traced under them. None means those in force.
        initial: ``initial(mesh, rules)`` gives a module with the weights to begin with, such as
            ``from_pretrained`` of styrax-models loads into their shards; it is asked only where there is no
            checkpoint. None takes those that ``model`` has or draws.
        checkpointer: Where the run is saved and resumed from. The caller closes it.
        save_every: Steps between checkpoints; the last step is always saved. None or 0 saves that one only.
        run_info: JSON to keep with each checkpoint (the configuration, versions).
        tracker: Is given ``(step, metrics)``; if it has ``truncate(step)`` and ``flush()``, its record stays
            exact over a kill: later lines are dropped on resume, and it is flushed before each checkpoint.
        log_every: Steps between logged steps.
        held_out: Batches to evaluate on, ``eval_every`` steps apart and at the end; not an iterator, which would be
            used up after the first time. Or several such sets by name: their metrics are ``held_out_loss/NAME``, and
            without a name where that is empty.
        token_bytes: Bytes of text a token stands for, for bits per byte.
        eval_every: Steps between evaluations; None or 0 evaluates at the end only.
        sample: Called ``sample_every`` steps apart, but not at the end, with the result so far. What it holds is gone
            when the next step begins.
        sample_every: Steps between samples; None or 0 takes none.
        spike: What to do when the loss is suddenly far above what it was; None does nothing.
        hooks: Told of each event; one may wish to stop, or add metrics as :class:`styrax.train.Watch` does.
        goodput: Where to keep account of the time; None makes a new one, which the result has.

    Returns:
        The result; ``result.interrupted`` names the signal if one stopped it, after saving, and ``result.stopped`` says
        why a hook wished to stop.

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
    rules = rules_in_force() if rules is None else rules
    counts = {"steps": steps, "seed": seed, "accumulate": accumulate, "log_every": log_every}
    check_fit(
        model=model, tx=tx, data=data, loss=loss, mesh=mesh, rules=rules, checkpointer=checkpointer, tracker=tracker,
        held_out=held_out,
        numbers={**counts, "save_every": save_every, "eval_every": eval_every, "sample_every": sample_every},
    )  # fmt: skip
    goodput = goodput or Goodput()

    def interrupted(name: str) -> None:
        tell(hooks, "on_interrupt", name)

    with use_rules(rules), Interrupts(interrupted) as interrupts:
        watch = SpikeWatch(spike) if spike is not None and spike.action == "rollback" else None
        accord = Accord(mesh, lambda: interrupts.received)
        with goodput.during("startup"):
            graphdef, abstract, make = lay_out(
                model, tx, seed=seed, mesh=mesh, logical_axes=logical_axes, rules=rules, initial=initial
            )
            tell(hooks, "on_setup", Setup(graphdef, abstract, tx, loss, accumulate, mesh, logical_axes, steps))
            latest = newest(checkpointer) if checkpointer is not None else None
            now = Course(make, abstract, checkpointer, watch)
            now.resume(latest, data)
            start = now.step
            accord.check_alike(step=start, steps=steps, config=(run_info or {}).get("config"), data=_identity(data))
            if truncate := getattr(tracker, "truncate", None):
                truncate(start)
            tell(hooks, "on_start", start, steps, latest is not None)

            stream = iter(data)
            place = _placer(mesh, rules)
            sets = dict(held_out) if isinstance(held_out, Mapping) else {"": held_out} if held_out else {}
            evaluate = _on(mesh, evaluator(graphdef, loss, eval_params)) if sets else None
            ledger = Ledger(tracker, hooks, goodput, every=log_every, steps=steps, saved=latest, watch=watch)
            step_fn = CompiledStep(
                make_step(graphdef, tx, loss, accumulate=accumulate, metrics=metrics),
                accumulate=accumulate,
                mesh=mesh,
                shards=batch_shards(mesh, rules) if mesh is not None else 1,
                announced=getattr(data, "specs", ()),
                hooks=(Meter(goodput), *hooks),
            )
        found: dict[str, HeldOut] = {}
        evaluated = wish = None

        def judge(log: bool = True) -> None:
            nonlocal evaluated
            for name, batches in sets.items():
                assert evaluate is not None
                begin = time.perf_counter()
                with goodput.during("evaluate"):
                    found[name] = evaluate(now.state, batches, token_bytes)._replace(name=name)
                if log:
                    ledger.annotate(now.step, found[name].metrics)
                    ledger.tell("on_evaluate", now.step, found[name], time.perf_counter() - begin)
            evaluated = now.step

        def keep(temporary: bool = False) -> None:
            ledger.flush()
            if checkpointer is None or ledger.spike is not None:
                return
            begin = time.perf_counter()
            with goodput.during("checkpoint"):
                now.save(data, run_info, metrics=ledger.last, temporary=temporary)
            ledger.saved = now.step
            ledger.tell("on_save", now.step, time.perf_counter() - begin)

        def go_back() -> None:
            assert ledger.spike is not None
            goodput.done = max(goodput.done, now.step)
            step, value = ledger.spike
            with goodput.during("lost"):
                now.rewind(step, value)
                ledger.rewind(now.step)
            ledger.tell("on_rollback", step, now.step, value)

        while now.step < steps and accord.signal is None and wish is None:
            with goodput.during("data"):
                batch = next(stream, None)
                if batch is None:
                    raise UserError(
                        f"the data ended after {now.step} of {steps} steps; repeat it, or ask for at most "
                        f"{now.step} steps"
                    )
                batch = place(check_arrays(batch))
            further = ledger.watch(now.step + 1, now.state, batch)
            with goodput.step(now.step + 1):
                now.state, report = step_fn(now.state, batch, now.step)
                now.step += 1
                ledger.add(now.step, report, further)
                accord.turn(ledger.wish)
            last, wish = now.step == steps, accord.wish(ledger.wish)
            if last or wish or (eval_every and now.step % eval_every == 0):
                judge()
                wish = accord.wish(ledger.wish)
            if sample is not None and sample_every and now.step % sample_every == 0 and not (last or wish):
                begin = time.perf_counter()
                with goodput.during("sample"):
                    sample(FitResult(state=now.state, graphdef=graphdef, step=now.step, eval_params=eval_params))
                ledger.tell("on_sample", now.step, time.perf_counter() - begin)
            lasting = last or wish or accord.signal or (save_every and now.step % save_every == 0)
            if checkpointer is not None and (lasting or due_by_time(checkpointer, now.step)):
                keep(temporary=not lasting)
            elif last or wish:
                ledger.flush()
            if ledger.spike is not None:
                go_back()
        # A signal may have come between the last step's save and here: no step is left unsaved.
        if ledger.saved != now.step and now.step > start:
            keep()
        ledger.flush()
        if ledger.spike is not None:
            go_back()
        if evaluated != now.step and accord.signal is None:
            judge(log=False)
        if checkpointer is not None:
            with goodput.during("checkpoint"):
                checkpointer.wait()
        ledger.tell("on_end", now.step)
        return FitResult(
            state=now.state, graphdef=graphdef, step=now.step, metrics=ledger.last,
            held_out=found if isinstance(held_out, Mapping) else found.get(""),
            interrupted=accord.signal if now.step < steps else None,
            stopped=wish if now.step < steps else None, eval_params=eval_params, skipped=tuple(now.skipped),
            goodput=goodput,
        )  # fmt: skip


def _identity(data: Any) -> Any:
    """What tells data from others, if they say so; the position of other iterators may be each process's own."""
    state = data.get_state() if hasattr(data, "get_state") else None
    return (state.get("fingerprint"), state.get("step")) if isinstance(state, Mapping) else None


def _on(mesh: jax.sharding.Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the mesh set, as parts that the compiler cannot split ask for it."""
    if mesh is None:
        return function

    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return function(*args)

    return call


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


def count_parameters(params: Any) -> int:
    """Number of scalars in a tree of arrays."""
    return sum(math.prod(x.shape) for x in itertools.chain(jax.tree.leaves(params)))
