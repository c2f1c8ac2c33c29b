"""The training step: a pure function of (state, batch), compiled once and donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from styrax.core import UserError
from styrax.core.config import Positive, mistakes
from styrax.core.random import stream
from styrax.train.checks import (
    check_arrays,
    check_terms,
    key_problems,
    loss_problems,
    model_problems,
    tx_problems,
)
from styrax.train.loss import Term

if TYPE_CHECKING:
    from jaxtyping import Array, Int

Loss = Callable[[Any, Mapping[str, Any], Any], Mapping[str, Term]]
Metrics = Callable[[Any], Mapping[str, Any]]


class TrainState(NamedTuple):
    """All that a step reads and writes.

    Attributes:
        params: Nested dict of the model's ``nnx.Param`` arrays.
        opt_state: State of the optax transformation.
        variables: Nested dict of every other NNX variable (statistics, caches); often empty.
        step: int32 scalar, the number of updates done.
        key: Typed PRNG key of the run. It never changes: a random stream is the key folded by purpose, step
            and micro-batch, so a resumed run draws what the uninterrupted one would.
    """

    params: Any
    opt_state: Any
    variables: Any
    step: Int[Array, ""]
    key: Any


def split_model(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Split a module into (graphdef, params, variables), the latter two as plain nested dicts."""
    graphdef, params, variables = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(variables)


def init_state(
    model: nnx.Module, tx: optax.GradientTransformation, *, key: Any, copy: bool = True
) -> tuple[Any, TrainState]:
    """Make the first state from a module and an optimizer.

    Args:
        model: The module, with concrete arrays (or traced ones, inside ``jax.jit``).
        tx: Any optax transformation.
        key: Typed PRNG key, the root of the run's random streams.
        copy: Copy the arrays, so that donating the state leaves the caller's module usable.

    Returns:
        ``(graphdef, state)``; the graphdef is static and is what :func:`make_step` closes over.

    Raises:
        UserError: An argument is of another kind; all are listed.
    """
    if problems := [*model_problems(model), *tx_problems(tx), *key_problems(key)]:
        raise UserError("\n".join(problems))
    graphdef, params, variables = split_model(model)
    if copy:
        params, variables = jax.tree.map(jnp.copy, (params, variables))
    return graphdef, TrainState(params, tx.init(params), variables, jnp.zeros((), jnp.int32), key)


def make_step(
    graphdef: Any,
    tx: optax.GradientTransformation,
    loss: Loss,
    *,
    accumulate: int = 1,
    metrics: Metrics | None = None,
    rng_streams: tuple[str, ...] = ("dropout",),
) -> Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, dict[str, Any]]]:
    """Build the step: gradients of the objective, the optimizer's update, and metrics.

    A model may have a method ``end_step()``: it is called after the update, and what it changes of the model's
    variables is kept, such as a router's correction that follows the load of the whole batch.

    The result is pure and not compiled: ``jax.jit(step, donate_argnums=0)`` is yours to call, anywhere.

    Args:
        graphdef: From :func:`init_state`.
        tx: The optax transformation; clipping and skipping belong to it.
        loss: ``loss(model, batch, rngs) -> {name: Term}``, see :class:`styrax.train.Term`.
        accumulate: Cut the batch into this many micro-batches and run them one after another. It must divide
            the batch size. Equal to one large batch up to rounding; with dropout too if the loss draws it row by
            row (``loss.draws_by_row(model)``), as :func:`next_token_loss` does for a model whose ``losses`` takes
            ``row_ids``. Any other loss gets random streams of its own for each micro-batch.
        metrics: ``metrics(opt_state) -> {name: scalar}``, read after the update.
        rng_streams: Names of the random streams given to the loss as ``nnx.Rngs``; empty gives ``None``.

    Returns:
        ``step(state, batch) -> (state, metrics)``. Metrics are float32 scalars: ``loss`` (the objective), each
        further term's mean by its name, ``tokens`` (weight of the first term), and the optimizer's.

    Raises:
        UserError: An argument is of another kind (all are listed); in the step, what the loss returned is.
    """

    problems = [*mistakes({"accumulate": (Positive, accumulate)}), *tx_problems(tx), *loss_problems(loss)]
    if isinstance(rng_streams, str):
        problems.append(f"rng_streams: expected a tuple of names, got {rng_streams!r}; write ({rng_streams!r},)")
    if problems:
        raise UserError("\n".join(problems))

    gradients = Gradients(graphdef, loss, accumulate=accumulate, rng_streams=rng_streams)

    def ended(params: Any, variables: Any) -> Any:
        model = nnx.merge(graphdef, params, variables)
        if not hasattr(model, "end_step"):
            return variables
        model.end_step()
        return split_model(model)[2]

    def step(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        grads, report, variables = gradients(state, dict(check_arrays(batch)))
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        variables = ended(params, variables)
        if metrics is not None:
            report.update({k: jnp.asarray(v, jnp.float32) for k, v in metrics(opt_state).items()})
        return TrainState(params, opt_state, variables, state.step + 1, state.key), report

    return step


class Gradients:
    """The gradient of the objective over a batch, as a step takes it: a pure function of (state, batch).

    Args:
        graphdef: And all the others: as for :func:`make_step`.

    Attributes:
        coefs: Name of a term -> its coefficient, in the order of the loss; empty until this was traced.
    """

    def __init__(
        self, graphdef: Any, loss: Loss, *, accumulate: int = 1, rng_streams: tuple[str, ...] = ("dropout",)
    ) -> None:
        self._graphdef, self._loss, self._accumulate, self._streams = graphdef, loss, accumulate, rng_streams
        self.coefs: dict[str, float] = {}

    def __call__(self, state: TrainState, batch: Any, only: str | None = None) -> tuple[Any, dict[str, Any], Any]:
        """Take it.

        Args:
            state: Of the step.
            batch: All of it.
            only: The term whose part of the gradient is wanted, with its coefficient; None takes all.

        Returns:
            The gradient, the metrics, and the variables after the batch.
        """
        return (self._at_once if self._accumulate == 1 else self._piecewise)(state, batch, only)

    def _terms(
        self, params: Any, variables: Any, batch: Any, key: Any, part: Any = None
    ) -> tuple[dict[str, Term], Any]:
        model = nnx.merge(self._graphdef, params, variables)
        batch, key = drawn(self._loss, model, batch, key, part)
        rngs = nnx.Rngs(**{name: stream(key, name) for name in self._streams}) if self._streams else None
        out = check_terms(self._loss(model, batch, rngs), self._accumulate)
        self.coefs = {name: term.coef for name, term in out.items()}  # JAX sorts the keys of what goes through it
        return out, split_model(model)[2]

    def _at_once(self, state: TrainState, batch: Any, only: str | None) -> tuple[Any, dict[str, Any], Any]:
        def objective(params):
            out, variables = self._terms(params, state.variables, batch, stream(state.key, "step", state.step))
            return _objective(out, _weights(out), only), (out, variables)

        (value, (out, variables)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        return grads, _report(value, out, next(iter(self.coefs))), variables

    def _piecewise(self, state: TrainState, batch: Any, only: str | None) -> tuple[Any, dict[str, Any], Any]:
        accumulate = self._accumulate
        pieces = jax.tree.map(lambda x: cut(x, accumulate), batch)
        root = stream(state.key, "step", state.step)
        rows = len(jax.tree.leaves(batch)[0])
        parts = jnp.arange(accumulate), cut(jnp.arange(rows), accumulate)

        # The divisors of the whole batch come first. They seldom depend on the parameters, and then XLA drops
        # the forward pass from this scan and only counts tokens.
        def count(variables, inputs):
            out, variables = self._terms(state.params, variables, inputs[0], root, inputs[1])
            return variables, _weights(out)

        weights = jax.tree.map(jnp.sum, jax.lax.scan(count, state.variables, (pieces, parts))[1])

        def body(carry, inputs):
            grads, variables = carry

            def objective(params):
                out, new = self._terms(params, variables, inputs[0], root, inputs[1])
                return _objective(out, weights, only), (out, new)

            (value, (out, variables)), g = jax.value_and_grad(objective, has_aux=True)(state.params)
            grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, g)
            return (grads, variables), (value, {k: t.total for k, t in out.items()})

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), state.params)
        (grads, variables), (values, totals) = jax.lax.scan(body, (zeros, state.variables), (pieces, parts))
        out = {k: Term(jnp.sum(v), weights[k]) for k, v in totals.items()}
        return grads, _report(jnp.sum(values), out, next(iter(self.coefs))), variables


def _weights(out: Mapping[str, Term]) -> dict[str, Any]:
    return {k: jax.lax.stop_gradient(jnp.asarray(t.weight, jnp.float32)) for k, t in out.items()}


def _mean(total: Any, weight: Any) -> Any:
    """``total / weight``, and 0 where nothing was counted (a batch that is wholly masked)."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def _objective(out: Mapping[str, Term], weights: Mapping[str, Any], only: str | None = None) -> Any:
    chosen = {k: t for k, t in out.items() if t.coef != 0.0 and only in (None, k)}
    parts = [t.coef * _mean(t.total, weights[k]) for k, t in chosen.items()]
    return sum(parts[1:], parts[0])


def _report(value: Any, out: Mapping[str, Term], first: str) -> dict[str, Any]:
    means = {k: _mean(t.total, t.weight) for k, t in out.items()} if len(out) > 1 else {}
    if "loss" in means:  # the first term keeps its name only where it is the whole objective
        means["loss_term"] = means.pop("loss")
    return {"loss": value, **means, "tokens": jnp.asarray(out[first].weight, jnp.float32)}


def drawn(loss: Loss, model: nnx.Module, batch: Any, key: Any, part: Any) -> tuple[Any, Any]:
    """Say what the dropout of a batch, or of a micro-batch, is drawn by.

    Args:
        loss: Whose attribute ``draws_by_row``, if it has one, tells whether rows draw by their number.
        model: Which it asks.
        batch: All of it, or the rows of a micro-batch.
        key: The step's.
        part: Of a micro-batch its number, and the numbers of its rows in the batch; None for all of it.

    Returns:
        The batch, perhaps with ``row_ids``, and the key.
    """
    if part is None:
        return batch, key
    if getattr(loss, "draws_by_row", lambda model: False)(model):
        return {**batch, "row_ids": part[1]}, key
    return batch, stream(key, "micro", part[0])


def cut(x: Any, k: int) -> Any:
    """``[B, ...] -> [k, B/k, ...]`` by strides, so that rows stay on the device that holds them."""
    return jnp.swapaxes(x.reshape(x.shape[0] // k, k, *x.shape[1:]), 0, 1)
