"""What went on in one step: losses of single tokens, norms and activations by path, and what is not finite."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import checkify

from styrax.core import UserError, tree
from styrax.core.random import stream
from styrax.train.loss import cross_entropy, next_token_loss
from styrax.train.step import Gradients, Loss, Metrics, TrainState, cut, drawn, make_step

if TYPE_CHECKING:
    from jaxtyping import Array, Float

_UPSTREAM = re.compile(r"[/\\](jax|jaxlib|flax|optax)[/\\]")

LAYERS = "layers"
"""The logical axis along which parameters of several layers are stacked."""


class Probed(NamedTuple):
    """What a step did.

    Attributes:
        metrics: As the step reports them.
        norms: Path of a parameter -> `parameter`, `gradient` and `update`, each a norm, or one for each layer where
            layers are stacked.
        not_finite: Name of a tensor -> how many of its numbers are not finite; in the order in which a step makes them.
    """

    metrics: dict[str, float]
    norms: dict[str, dict[str, float | list[float]]]
    not_finite: dict[str, int]


class Prober:
    """Takes a step apart, without changing the state that it is given.

    The gradients are those of the step, clipping and skipping excluded: they are seen where the optimizer gets them.

    Args:
        graphdef: From :func:`styrax.train.shardings.lay_out`.
        tx: The optimizer.
        loss: The training loss.
        accumulate: Micro-batches a step.
        metrics: Scalars of the optimizer.
        mesh: Where the state lies; None for one device.
        logical_axes: Pattern of a parameter's path to its axes; tells which are stacked.
    """

    def __init__(
        self,
        graphdef: Any,
        tx: optax.GradientTransformation,
        loss: Loss = next_token_loss,
        *,
        accumulate: int = 1,
        metrics: Metrics | None = None,
        mesh: jax.sharding.Mesh | None = None,
        logical_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    ) -> None:
        self._graphdef, self._loss, self._accumulate = graphdef, loss, accumulate
        self._mesh, self._axes = mesh, logical_axes or {}

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            moves, inner = tx.update(updates, state[0], params)
            return moves, (inner, norms(tree.flatten(updates), self._axes), _counts(updates))

        seen: Metrics | None = None if metrics is None else lambda state: metrics(state[0])
        watching = optax.GradientTransformation(lambda params: (tx.init(params), {}, {}), update)
        step = make_step(graphdef, watching, loss, accumulate=accumulate, metrics=seen)

        # What does not depend on the step is a program of its own: exchanges of one program that do not depend on each
        # other, of which one is in a loop, begin on some CPU devices with the one and on others with the other, and
        # wait for each other for ever.
        def given(state: TrainState, batch: Any) -> Any:
            found = {"parameter": state.params, "variable": state.variables, "batch": batch}
            counts = {name: _counts(each) for name, each in found.items()}
            return {"parameter": norms(tree.flatten(state.params), self._axes)}, counts

        def probe(state: TrainState, batch: Any) -> Any:
            after, report = step(state._replace(opt_state=(state.opt_state, {}, {})), batch)
            inner, gradient, grads = after.opt_state
            moved = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), after.params, state.params)
            counts = {
                "metric": _counts(report), "gradient": grads, "optimizer state": _counts(inner),
                "new parameter": _counts(after.params),
            }  # fmt: skip
            return report, {"update": norms(tree.flatten(moved), self._axes), "gradient": gradient}, counts

        self._given, self._probe = jax.jit(given), jax.jit(probe)
        self._tokens = jax.jit(self._token_losses)
        self._watch = jax.jit(self.measure)
        self._gradients = Gradients(graphdef, loss, accumulate=accumulate)
        self._whole: Any = None
        self._part = jax.jit(self._term, static_argnames="name")

    def __call__(self, state: TrainState, batch: Any) -> Probed:
        """Take the step from ``state`` over ``batch``, and say what it did."""
        with self._meshed():
            before, counted = jax.device_get(self._given(state, batch))
            report, told, counts = jax.device_get(self._probe(state, batch))
        counts |= counted
        by_path: dict[str, dict[str, float | list[float]]] = {}
        for kind, values in (before | told).items():
            for path, value in values.items():
                by_path.setdefault(path, {})[kind] = value.tolist()
        bad: dict[str, int] = {}
        for kind in ("parameter", "variable", "batch", "metric", "gradient", "optimizer state", "new parameter"):
            bad |= {f"{kind} {path}": int(count) for path, count in counts[kind].items() if count}
        return Probed({name: float(value) for name, value in report.items()}, by_path, bad)

    def token_losses(self, state: TrainState, batch: Any) -> Float[np.ndarray, "batch seq"]:
        """The cross-entropy of every target, with the step's own dropout; 0 where a target does not count.

        The model is called as a decoder, ``model(tokens, positions=, segment_ids=, rngs=) -> logits``.
        """
        with self._meshed():
            found = self._tokens(state, batch)
            if self._mesh is not None:
                everywhere = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())
                found = jax.jit(lambda x: x, out_shardings=everywhere)(found)
        return np.asarray(found)

    def activations(self, state: TrainState, batch: Any) -> tuple[dict[str, dict[str, Any]], str | None]:
        """What each layer makes of a batch, before the step and with its dropout.

        A model tells them by ``activations(tokens, positions=, segment_ids=, rngs=) -> {path: {name: numbers}}``, one
        number or one for each layer, with the names ``rms``, ``max``, ``zeros``, ``not_finite``, ``numbers`` and
        perhaps ``layer``, as the decoder of styrax-models does. With ``row_ids`` among the arguments it draws dropout
        by row.

        Returns:
            The numbers, and None; or nothing, and why.
        """
        model = nnx.merge(self._graphdef, state.params, state.variables)
        if why := untold(model):
            return {}, why
        if "tokens" not in batch:
            return {}, "the batch has no tokens to run the model on"
        try:
            with self._meshed():
                found = jax.device_get(self._watch(state, batch))
        except UserError as error:
            return {}, str(error)
        return {path: together(stats) for path, stats in sorted(found.items())}, None

    def term_gradients(self, state: TrainState, batch: Any) -> dict[str, dict[str, float]]:
        r"""What each term of the loss has in the step's gradient.

        With $g_t$ the gradient of a term as it goes into the step, times its coefficient and over the weights of the
        whole batch, the step's gradient is $g = \sum_t g_t$, as the optimizer gets it.

        Returns:
            Name of each term whose coefficient is not 0 -> `norm`, $|g_t|$; `share`, $g_t \cdot g / |g|^2$, which add
            up to 1 and are below 0 where a term works against the others; and `cosine` of $g_t$ and $g$. Share and
            cosine are 0 where a gradient is.
        """
        with self._meshed():
            if not self._gradients.coefs:
                jax.eval_shape(self._gradients, state, batch)
            names = [name for name, coef in self._gradients.coefs.items() if coef != 0.0]
            if len(names) == 1:  # which is what the probe has measured already, and needs no program of its own
                size = math.hypot(*np.concatenate([np.ravel(n["gradient"]) for n in self(state, batch).norms.values()]))
                return {names[0]: _share(size, size, size * size)}
            if self._whole is None:
                where = jax.tree.map(lambda x: x.sharding, state.params)
                self._whole = jax.jit(self._all_terms, out_shardings=(where, None))
            whole, size = self._whole(state, batch)
            found = jax.device_get({name: self._part(state, batch, whole, name=name) for name in names})
        return {name: _share(float(found[name][0]), float(size), float(found[name][1])) for name in names}

    def measure(self, state: TrainState, batch: Any) -> dict[str, dict[str, Any]]:
        """What the model tells of its activations, of each micro-batch along a first axis; :func:`together` joins them.

        A pure function, to be compiled. Arguments are as for :meth:`activations`.
        """
        root, k = stream(state.key, "step", state.step), self._accumulate
        names = ("tokens", "positions", "segment_ids")
        pieces = {name: cut(batch[name], k) for name in names if name in batch}
        rows = cut(jnp.arange(len(batch["tokens"])), k)

        def watch(inputs: Any) -> Any:
            piece, row_ids, index = inputs
            model: Any = nnx.merge(self._graphdef, state.params, state.variables)
            given, key = drawn(self._loss, model, piece, root, None if k == 1 else (index, row_ids))
            return model.activations(**_taken(model.activations, given), rngs=nnx.Rngs(dropout=stream(key, "dropout")))

        return jax.lax.map(watch, (pieces, rows, jnp.arange(k)))

    def first_nan(self, state: TrainState, batch: Any) -> str | None:
        """Name the operation that makes the first NaN of the loss or of its gradient, and where it stands.

        Every operation of the first micro-batch that has one is checked while it runs, so this is slow.

        Returns:
            What ``jax.experimental.checkify`` says, and the innermost lines of code; None if there is no NaN, or where
            it cannot check.
        """
        root = stream(state.key, "step", state.step)

        def objective(params: Any, piece: Any, part: Any) -> Any:
            model = nnx.merge(self._graphdef, params, state.variables)
            piece, key = drawn(self._loss, model, piece, root, part)
            out = self._loss(model, piece, nnx.Rngs(dropout=stream(key, "dropout")))
            return sum(term.coef * term.total / jnp.maximum(term.weight, 1.0) for term in out.values() if term.coef)

        for number in range(self._accumulate):
            piece = {name: np.asarray(x)[number :: self._accumulate] for name, x in batch.items()}
            rows = len(next(iter(batch.values())))
            part = None if self._accumulate == 1 else (number, np.arange(rows)[number :: self._accumulate])
            for function in (objective, jax.grad(objective)):
                try:
                    with self._meshed():
                        checked = jax.jit(checkify.checkify(function, errors=checkify.nan_checks))
                        error = checked(state.params, piece, part)[0]
                except Exception:  # not every operation can be checked, and this is only a help
                    continue
                if error.get() is not None:
                    return f"{error.get()} {_frames(error.get_exception())}".strip()
        return None

    def _token_losses(self, state: TrainState, batch: Any) -> Any:
        root, k = stream(state.key, "step", state.step), self._accumulate

        def losses(inputs: Any) -> Any:
            piece, part = inputs
            model: Any = nnx.merge(self._graphdef, state.params, state.variables)
            given, key = drawn(self._loss, model, piece, root, part)
            names = ("positions", "segment_ids", "row_ids")
            named = _taken(model, {name: given.get(name) for name in names})
            logits = model(piece["tokens"], **named, rngs=nnx.Rngs(dropout=stream(key, "dropout")))
            return jnp.where(piece["loss_mask"] > 0, cross_entropy(logits, piece["targets"]), 0.0)

        if k == 1:
            return losses((batch, None))
        pieces = jax.tree.map(lambda x: cut(x, k), batch)
        parts = jnp.arange(k), cut(jnp.arange(len(batch["tokens"])), k)
        found = jax.lax.map(losses, (pieces, parts))
        return jnp.swapaxes(found, 0, 1).reshape(-1, found.shape[-1])

    def _all_terms(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        whole = self._gradients(state, batch)[0]
        return whole, jnp.sqrt(_dot(whole, whole))

    def _term(self, state: TrainState, batch: Any, whole: Any, name: str) -> tuple[Any, Any]:
        part = self._gradients(state, batch, name)[0]
        return jnp.sqrt(_dot(part, part)), _dot(part, whole)

    def _meshed(self) -> contextlib.AbstractContextManager[Any]:
        return jax.set_mesh(self._mesh) if self._mesh is not None else contextlib.nullcontext()


def norms(values: Mapping[str, Array], logical_axes: Mapping[str, tuple[str | None, ...]]) -> dict[str, Array]:
    """The norm of each array, or where layers are stacked one for each layer, in float32.

    Args:
        values: Path -> array.
        logical_axes: Pattern of a path to its axes; a first one of the name ``layers`` is a stack's.

    >>> found = norms({"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])}, {"w": ("layers", None)})
    >>> found["w"].tolist()
    [5.0, 2.0]
    """
    found = {}
    for path, x in values.items():
        axes = tree.first_match(logical_axes, path, ())
        stacked = len(axes) == x.ndim and bool(axes) and axes[0] == LAYERS
        over = tuple(range(1, x.ndim)) if stacked else None
        found[path] = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=over))
    return found


def untold(model: Any) -> str | None:
    """Why a model cannot be asked for its activations; None if it can."""
    if callable(getattr(model, "activations", None)):
        return None
    return f"a {type(model).__name__} does not tell its activations: it has no method of that name"


def together(stats: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """One path's numbers over all micro-batches, the first axis.

    >>> one = {"rms": np.array([3.0, 4.0]), "max": np.array([3.0, 4.0]), "zeros": np.array([0.0, 0.5])}
    >>> together({**one, "not_finite": np.zeros(2), "numbers": np.array([3.0, 1.0])})["zeros"]
    0.125
    """
    values = {name: np.asarray(value, np.float64) for name, value in stats.items() if name != "layer"}
    numbers = values.pop("numbers")
    weights, finite = (np.maximum(x, 1e-300) for x in (numbers, numbers * (1 - values["not_finite"])))
    found: dict[str, Any] = {
        "rms": np.sqrt(np.average(values.pop("rms") ** 2, axis=0, weights=finite)),
        "max": values.pop("max").max(axis=0),
        **{name: np.average(value, axis=0, weights=weights) for name, value in values.items()},
        **({"layer": stats["layer"][0]} if "layer" in stats else {}),
    }
    return {name: value.tolist() for name, value in found.items()}


def _dot(one: Any, other: Any) -> Any:
    """The inner product of two trees, in float32."""
    return sum(
        jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def _share(norm: float, whole: float, dot: float) -> dict[str, float]:
    """Norm of a part, its share in the whole, and the cosine of both, by their norms and their product.

    >>> _share(3.0, 5.0, 9.0), _share(0.0, 5.0, 0.0)["cosine"]
    ({'norm': 3.0, 'share': 0.36, 'cosine': 0.6}, 0.0)
    """
    cosine = dot / norm / whole if norm and whole else 0.0
    return {"norm": norm, "share": cosine * norm / whole if whole else 0.0, "cosine": cosine}


def _frames(error: Any) -> str:
    """The innermost three lines of code of an error of checkify, those of JAX and this file left out."""
    lines = [line.strip() for line in str(getattr(error, "traceback_info", None) or "").splitlines()]
    own = [line for line in lines if not _UPSTREAM.search(line) and not line.startswith(__file__)]
    return "at " + ", called by ".join(own[:3]) if own else ""


def _taken(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the numbers of rows where they are not asked for."""
    asked = "row_ids" in inspect.signature(function).parameters
    return {name: value for name, value in given.items() if asked or name != "row_ids"}


def _counts(values: Any) -> dict[str, Array]:
    """How many numbers of each array of floats are not finite, by path."""
    flat = {path: jnp.asarray(x) for path, x in tree.flatten(values).items()}
    return {path: jnp.sum(~jnp.isfinite(x)) for path, x in flat.items() if jnp.issubdtype(x.dtype, jnp.inexact)}


def isolated(batch: Mapping[str, Any], keep: np.ndarray) -> dict[str, np.ndarray]:
    """A batch with all places but some made into padding: no token, no target, no segment.

    Args:
        batch: Arrays ``[rows, columns]``, on this host.
        keep: bool ``[rows, columns]``, the places that stay.

    >>> isolated({"tokens": np.array([[5, 6]])}, np.array([[True, False]]))["tokens"].tolist()
    [[5, 0]]
    """
    return {name: np.where(keep, np.asarray(x), np.zeros((), np.asarray(x).dtype)) for name, x in batch.items()}
