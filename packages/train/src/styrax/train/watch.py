"""Statistics of parameters and activations that were asked for by name, while a run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from styrax.core import UserError, tree
from styrax.core.config import Positive, mistakes
from styrax.core.errors import nearest
from styrax.train.checks import check_batch
from styrax.train.hooks import Hook, Setup
from styrax.train.probe import Prober, norms, together, untold
from styrax.train.step import Gradients, TrainState

TOLD = ("rms", "max", "not_finite")
"""What is told of activations."""

SHOWN = 50
"""Paths that an error lists."""


class Watch(Hook):
    r"""Adds norms of some parameters, of their gradients and of their updates to the metrics, and activations.

    Every so many steps, and at the last one, programs of its own take the step's gradient and update once more from
    the same state, batch and random streams, and keep nothing of them but numbers. So the program of the training step
    is the one of a run without this, and the parameters are the same bit for bit. A watched step costs about the time
    of two. The gradient is that which the optimizer gets, before it is clipped.

    The metrics are ``norm/parameter/PATH``, ``norm/gradient/PATH`` and ``norm/update/PATH``, and with activations
    ``activation/rms/PATH``, ``activation/max/PATH`` and ``activation/not_finite/PATH``, see
    :meth:`styrax.train.probe.Prober.activations`. Where layers are stacked, each has a metric with its number at the
    end, from 0, with zeros in front so that names sort.

    With several processes all of them need this hook, as their devices measure together.

    Args:
        patterns: Of parameters' paths, see :func:`styrax.core.tree.match`: ``"layers/attn/**"``, ``"**/kernel"``.
        activations: Also what each layer makes of the batch, if the model has ``activations``.
        every: Steps between watched steps.

    Raises:
        UserError: Nothing is asked for; before the first step, for patterns that no parameter fits, and models and
            batches without activations.

    >>> import itertools
    >>> from styrax.train import Term, fit
    >>> def squares(model, batch, rngs):
    ...     return {"loss": Term(jnp.sum((model(batch["x"]) - 1.0) ** 2), 4.0)}
    >>> data = itertools.repeat({"x": jnp.ones((4, 1))})
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> result = fit(model, optax.sgd(0.1), data, squares, steps=2, hooks=[Watch("kernel", every=2)])
    >>> [name for name in result.metrics if "norm" in name]
    ['norm/gradient/kernel', 'norm/parameter/kernel', 'norm/update/kernel']
    """

    def __init__(self, *patterns: str, activations: bool = False, every: int = 100) -> None:
        problems = mistakes({"every": (Positive, every)})
        problems += [f"patterns: expected text, got {each!r}" for each in patterns if not isinstance(each, str)]
        if not (patterns or activations):
            problems.append("there is nothing to watch; name a pattern such as '**/kernel', or set activations=True")
        if problems:
            raise UserError("\n".join(f"Watch: {problem}" for problem in problems))
        self._patterns, self._activations, self._every = patterns, activations, every
        self._compiled: dict[Any, Any] = {}

    def on_setup(self, setup: Setup) -> None:
        """Look up what was asked for."""
        params, problems = tree.flatten(setup.abstract.params), []
        for pattern in self._patterns:
            if not any(tree.match(pattern, path) for path in params):
                problems.append(f"{pattern!r} fits no parameter{nearest(pattern, _patterns(params))}")
        if problems:
            more = f" and {len(params) - SHOWN} more" if len(params) > SHOWN else ""
            problems.append(f"the parameters are: {', '.join(list(params)[:SHOWN])}{more}")
        model = nnx.merge(setup.graphdef, setup.abstract.params, setup.abstract.variables)
        if self._activations and (why := untold(model)):
            problems.append(f"activations: {why}; leave them out")
        if problems:
            raise UserError("\n".join(f"watch: {problem}" for problem in problems))
        self._setup, self._compiled = setup, {}
        self._paths = [path for path in params if any(tree.match(pattern, path) for pattern in self._patterns)]
        self._gradients = Gradients(setup.graphdef, setup.loss, accumulate=setup.accumulate)
        self._prober = Prober(setup.graphdef, setup.tx, setup.loss, accumulate=setup.accumulate)

    def on_batch(self, step: int, state: TrainState, batch: Any) -> Callable[[], Mapping[str, float]] | None:
        """Measure, if the step is one to watch."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *((x.shape, x.dtype) for x in leaves)
        # At the first step, watched or not: a mistake is told now, and a watchdog does not count yet.
        if shapes not in self._compiled and (self._due(step) or not self._compiled):
            self._compiled[shapes] = self._compile(state, batch)
        if not self._due(step):
            return None
        found = {name: program(state, batch) for name, program in self._compiled[shapes].items()}
        return lambda: _named(jax.device_get(found))

    def _due(self, step: int) -> bool:
        return step % self._every == 0 or step == self._setup.steps

    def _compile(self, state: TrainState, batch: Any) -> Any:
        check_batch(batch, self._setup.accumulate)
        if self._activations and "tokens" not in batch:
            raise UserError("watch: activations: the batch has no tokens to run the model on; leave them out")
        mesh = self._setup.mesh
        everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            if self._activations:
                try:
                    jax.eval_shape(self._prober.measure, state, batch)
                except UserError as error:
                    raise UserError(f"watch: activations: {error}, or leave the activations out") from error
            # Programs of their own, for the reason that stands in the prober.
            programs: dict[str, Callable[..., Any]] = {}
            if self._paths:
                programs |= {"parameter": self._held, "moved": self._moved}
            if self._activations:
                programs["activation"] = self._prober.measure
            return {
                name: jax.jit(program, out_shardings=everywhere).lower(state, batch).compile()
                for name, program in programs.items()
            }

    def _held(self, state: TrainState, batch: Any) -> dict[str, Any]:
        return norms(self._chosen(state.params), self._setup.logical_axes or {})

    def _moved(self, state: TrainState, batch: Any) -> dict[str, dict[str, Any]]:
        gradient = self._gradients(state, dict(batch))[0]
        moves, _ = self._setup.tx.update(gradient, state.opt_state, state.params)
        before, after = self._chosen(state.params), self._chosen(optax.apply_updates(state.params, moves))
        update = {path: after[path].astype(jnp.float32) - x.astype(jnp.float32) for path, x in before.items()}
        kinds = {"gradient": self._chosen(gradient), "update": update}
        return {kind: norms(values, self._setup.logical_axes or {}) for kind, values in kinds.items()}

    def _chosen(self, values: Any) -> dict[str, Any]:
        flat = tree.flatten(values)
        return {path: flat[path] for path in self._paths}


def _named(found: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by the names of metrics.

    >>> _named({"parameter": {"embed": jnp.array(2.0)}, "moved": {"update": {"layers/w": jnp.array([1.0, 3.0])}}})
    {'norm/parameter/embed': 2.0, 'norm/update/layers/w/0': 1.0, 'norm/update/layers/w/1': 3.0}
    """
    told: dict[str, float] = {}
    for kind, values in sorted({"parameter": found.get("parameter", {}), **found.get("moved", {})}.items()):
        for path, value in values.items():
            told |= _each(f"norm/{kind}/{path}", value.tolist())
    joined = {path: together(stats) for path, stats in sorted(found.get("activation", {}).items())}
    for kind in TOLD:
        for path, stats in joined.items():
            told |= _each(f"activation/{kind}/{path}", stats[kind], stats.get("layer"))
    return told


def _each(name: str, value: float | list[float], numbers: list[int] | None = None) -> dict[str, float]:
    """One metric, or one for each layer.

    >>> _each("a", 1.0), _each("a", [1.0, 2.0], [2, 10])
    ({'a': 1.0}, {'a/02': 1.0, 'a/10': 2.0})
    """
    if not isinstance(value, list):
        return {name: value}
    numbers = list(range(len(value))) if numbers is None else numbers
    width = len(str(max(numbers, default=0)))
    return {f"{name}/{number:0{width}}": each for number, each in zip(numbers, value, strict=True)}


def _patterns(paths: Iterable[str]) -> list[str]:
    """Patterns that somebody may have meant.

    >>> _patterns(["a/b/c"])
    ['a/b/c', '**/b/c', 'a/**', '**/c', 'a/b/**']
    """
    found: dict[str, None] = dict.fromkeys(paths)
    for path in list(found):
        parts = path.split("/")
        for cut in range(1, len(parts)):
            found |= dict.fromkeys(("**/" + "/".join(parts[cut:]), "/".join(parts[:cut]) + "/**"))
    return list(found)
