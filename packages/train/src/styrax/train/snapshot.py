"""A run as the items of a checkpoint, and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from styrax.core import UserError
from styrax.train.step import TrainState

if TYPE_CHECKING:
    from styrax.core.protocols import Checkpointer

ARRAYS = ("params", "opt_state", "variables")


def newest(checkpointer: Checkpointer) -> int | None:
    """The step to resume from: what the checkpointer says is its newest good one, else the last that it lists."""
    if latest := getattr(checkpointer, "latest", None):
        return latest()
    return max(checkpointer.steps(), default=None)


def due_by_time(checkpointer: Checkpointer, step: int) -> bool:
    """Whether the checkpointer itself wants a checkpoint now, one that goes when the next one is saved."""
    due = getattr(checkpointer, "due", None)
    return due is not None and due(step) == "temporary"


def save(
    checkpointer: Checkpointer,
    step: int,
    state: TrainState,
    data: Any,
    run_info: Mapping[str, Any] | None,
    *,
    metrics: Mapping[str, float] | None = None,
    temporary: bool = False,
    loop: Mapping[str, Any] | None = None,
) -> None:
    """Hand everything that the run is to the checkpointer, as named items.

    Items: ``params``, ``opt_state``, ``variables``, ``rng`` (key data), ``data`` (position, JSON), ``run``
    (step, PRNG implementation, ``run_info`` and, where the loop keeps a history, ``loop``; JSON). ``metrics`` and
    ``temporary`` go to checkpointers that say when they are ``due``, as styrax-checkpoint's do.
    """
    if not (hasattr(data, "get_state") and hasattr(data, "set_state")):
        raise UserError(
            f"a run that is saved needs data that can be resumed, with get_state() and set_state(); got "
            f"{type(data).__name__}. Pass a Grain iterator or a styrax-data loader, or no checkpointer"
        )
    run = {**(run_info or {}), "step": step, "prng_impl": str(jax.random.key_impl(state.key))}
    run |= {"loop": dict(loop)} if loop else {}
    more: dict[str, Any] = {"metrics": metrics, "temporary": temporary} if hasattr(checkpointer, "due") else {}
    checkpointer.save(
        step,
        {
            "params": state.params,
            "opt_state": state.opt_state,
            "variables": state.variables,
            "rng": {"key": jax.random.key_data(state.key)},
            "data": encode(data.get_state()),
            "run": run,
        },
        **more,
    )


class Restored(NamedTuple):
    """What a checkpoint gives back.

    Attributes:
        state: In its shardings.
        step: Its step.
        loop: What the loop kept with it.
    """

    state: TrainState
    step: int
    loop: Mapping[str, Any]


def restore(checkpointer: Checkpointer, step: int, abstract: TrainState, data: Any = None) -> Restored:
    """Read a state into its shardings and put the data where it stood.

    Args:
        checkpointer: Where it is.
        step: Which one.
        abstract: Shapes, dtypes and shardings.
        data: What gives the batches; None leaves it where it is.

    Raises:
        UserError: If the checkpoint is of another model, optimizer or data, naming every difference.
    """
    replicated = getattr(abstract.step, "sharding", None)
    key = jax.eval_shape(jax.random.key_data, abstract.key)
    like: dict[str, Any] = {name: getattr(abstract, name) for name in ARRAYS}
    like["rng"] = {"key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)}
    items = checkpointer.restore(step, {**like, "data": None, "run": None})
    if data is not None:
        if not hasattr(data, "set_state"):
            raise UserError(f"cannot resume at step {step}: {type(data).__name__} has no set_state()")
        data.set_state(decode(items["data"]))
    rng = jax.random.wrap_key_data(items["rng"]["key"], impl=items["run"]["prng_impl"])
    count = jax.numpy.asarray(step, abstract.step.dtype)
    if replicated is not None:
        count, rng = jax.device_put((count, rng), replicated)
    state = TrainState(items["params"], items["opt_state"], items["variables"], count, rng)
    return Restored(state, int(items["run"]["step"]), items["run"].get("loop", {}))


def encode(state: Any) -> Any:
    """A data position as JSON; Grain's DataLoader gives bytes."""
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def decode(state: Any) -> Any:
    """Inverse of :func:`encode`.

    >>> decode(encode(b"ab")), decode(encode({"step": 3}))
    (b'ab', {'step': 3})
    """
    return base64.b64decode(state["base64"]) if isinstance(state, dict) and set(state) == {"base64"} else state
