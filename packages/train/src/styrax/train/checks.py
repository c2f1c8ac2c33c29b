"""What users hand in (losses, batches, arguments), and what to tell them when it is something else."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from styrax.core import UserError
from styrax.core.config import NonNegative, Positive, Seed, mistakes
from styrax.core.mesh import idle_axes
from styrax.train.config import Steps, rows_misfit
from styrax.train.loss import Term

RESERVED = ("step", "tokens")
"""Names of metrics that no term of a loss can have."""


def check_terms(out: Any, accumulate: int) -> dict[str, Term]:
    """Accept a mapping of terms, or a scalar mean where one batch is one piece; explain anything else."""
    if isinstance(out, Term):
        out = {"loss": out}
    if isinstance(out, Mapping) and out and all(isinstance(t, Term) for t in out.values()):
        if problems := _term_problems(out):
            raise UserError("\n".join(problems))
        if all(t.coef == 0.0 for t in out.values()):
            raise UserError("the loss has only terms with coef=0, so there is nothing to minimise; give one a coef")
        return dict(out)
    if _is_scalar(out):
        if accumulate == 1:
            return {"loss": Term(out, jnp.ones((), jnp.float32))}
        raise UserError(
            f"the loss returned a bare scalar, which cannot be accumulated over {accumulate} micro-batches: a mean of "
            "means weighs tokens unevenly. Return {'loss': Term(sum, count)} (styrax.train.Term)"
        )
    hint = ""
    if isinstance(out, Mapping) and out:
        hint = ". Wrap each in Term(sum over the batch, count); coef=0 makes one a metric only (styrax.train.Term)"
    elif isinstance(out, tuple):
        hint = ". What is only to be logged is a further term with coef=0 (styrax.train.Term)"
    raise UserError(f"the loss must return {{name: Term(total, weight)}} or a scalar; got {_shown(out)}{hint}")


def _term_problems(out: Mapping[str, Term]) -> list[str]:
    problems = []
    for name, term in out.items():
        for part in ("total", "weight"):
            if not _is_scalar(value := getattr(term, part)):
                hint = f"; sum it over the batch: jnp.sum({part})" if getattr(value, "shape", ()) else ""
                problems.append(f"Term.{part} of the loss's {name!r} must be a scalar, got {_shown(value)}{hint}")
        if isinstance(term.coef, Tracer) or not _is_scalar(term.coef):
            problems.append(
                f"Term.coef of the loss's {name!r} must be a plain number, got {_shown(term.coef)}; multiply the total "
                "by what changes with the step"
            )
        if len(out) > 1 and name in RESERVED:
            problems.append(f"a term of the loss cannot be named {name!r}, which the metrics use; choose another name")
    return problems


def _is_scalar(value: Any) -> bool:
    number = isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
    return number and not jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended)


def _shown(value: Any) -> str:
    """A value for people, who wrote an array where tracing has something else."""
    if isinstance(value, Term):
        return "Term"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shown(each)}" for name, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_shown, value))})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def check_arrays(batch: Any) -> Mapping[str, Any]:
    """Refuse a batch that is not a mapping of arrays; gives it back."""
    if not isinstance(batch, Mapping):
        raise UserError(
            f"a batch must be a dict of arrays by name, rows first, got {_shown(batch)}; such as "
            "{'x': inputs, 'y': targets} for a loss that reads batch['x'] and batch['y']"
        )
    if wrong := {name: _shown(x) for name, x in batch.items() if not (hasattr(x, "shape") and hasattr(x, "dtype"))}:
        raise UserError(f"a batch must be a dict of arrays by name, rows first; got {wrong}; see numpy.asarray")
    return batch


def check_batch(batch: Mapping[str, Any], accumulate: int, shards: int = 1) -> None:
    """Refuse a batch whose leading axis the micro-batches and the mesh do not divide."""
    check_arrays(batch)
    sizes = {k: x.shape[0] if x.shape else None for k, x in batch.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise UserError(f"every array of a batch must have the same leading axis; got {sizes}")
    (size,) = set(sizes.values())
    assert size is not None
    if problem := rows_misfit(size, accumulate, shards):
        raise UserError(problem)


def check_fit(
    *,
    model: Any,
    tx: Any,
    data: Any,
    loss: Any,
    numbers: Mapping[str, Any],
    mesh: Any,
    rules: Mapping[str, tuple[str, ...]],
    checkpointer: Any,
    tracker: Any,
    held_out: Any,
) -> None:
    """Refuse arguments of ``fit`` that are of another kind; all are listed.

    Args:
        numbers: Those that are counts, by name; None where that is allowed and given.
        model: And so on: as for ``fit``.
    """
    kinds: dict[str, Any] = {"steps": Steps, "seed": Seed, "accumulate": Positive, "log_every": Positive}
    given = {name: value for name, value in numbers.items() if value is not None or name in kinds}
    problems = mistakes({name: (kinds.get(name, NonNegative), value) for name, value in given.items()})
    if not (isinstance(model, nnx.Module) or callable(model)):
        problems.append(f"model: expected an nnx.Module, or a function of nnx.Rngs that makes one; got {_shown(model)}")
    problems += [*tx_problems(tx), *loss_problems(loss)]
    if not isinstance(data, Iterable) or isinstance(data, (Mapping, str, bytes)) or hasattr(data, "shape"):
        problems.append(
            f"data: expected an iterable of batches, got {_shown(data)}; one batch again and again is "
            "itertools.repeat(batch)"
        )
    sets = held_out if isinstance(held_out, Mapping) else {"": held_out} if held_out is not None else {}
    for name, batches in sets.items():
        if not isinstance(name, str) or isinstance(batches, (Iterator, Mapping)) or not isinstance(batches, Iterable):
            problems.append(
                f"held_out{f'[{name!r}]' if name else ''}: expected a list of batches, which is read at each "
                f"evaluation, or such lists by name, got {_shown(batches)}; write list(...) around an iterator"
            )
    for name, value, methods in (
        ("checkpointer", checkpointer, ("save", "restore", "steps")),
        ("tracker", tracker, ("log",)),
    ):
        lacking = [method for method in methods if value is not None and not hasattr(value, method)]
        if lacking:
            problems.append(f"{name}: {_shown(value)} lacks {', '.join(lacking)}; see styrax.core.protocols")
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        problems.append(f"mesh: expected a jax.sharding.Mesh, such as MeshConfig().build(); got {_shown(mesh)}")
    elif mesh is not None:
        problems += [
            f"mesh axis {line}" for line in idle_axes((n for n in mesh.axis_names if mesh.shape[n] > 1), rules)
        ]
    if problems:
        raise UserError("\n".join(problems))


def model_problems(model: Any) -> list[str]:
    """Tell when a model is no module."""
    return [] if isinstance(model, nnx.Module) else [f"model: expected an nnx.Module, got {_shown(model)}"]


def tx_problems(tx: Any) -> list[str]:
    """Tell when an optimizer is none."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return []
    return [f"tx: expected an optax transformation, with init and update, such as optax.adamw(1e-3); got {_shown(tx)}"]


def loss_problems(loss: Any) -> list[str]:
    """Tell when a loss cannot be called."""
    return [] if callable(loss) else [f"loss: expected a function loss(model, batch, rngs), got {_shown(loss)}"]


def key_problems(key: Any) -> list[str]:
    """Tell when a key is none, or one of the old kind."""
    if jnp.issubdtype(getattr(key, "dtype", np.int32), jax.dtypes.prng_key):
        return []
    return [f"key: expected a typed key, jax.random.key(seed), got {_shown(key)}"]
