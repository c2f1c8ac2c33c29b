"""What an item may be besides a tree of arrays: plain JSON, an iterator, an `nnx` module.

flax is never imported: whoever hands over a module has imported it.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from styrax.checkpoint.errors import CheckpointError


def is_json(value: Any) -> bool:
    """Tell whether a value is plain JSON, so that text brings back the very same value.

    Example:
        >>> is_json({"a": [1, 2.5, None]}), is_json({"a": (1, 2)}), is_json({1: "a"})
        (True, False, False)
    """
    kind = type(value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_json, value.values()))
    if kind is list:
        return all(map(is_json, value))
    return value is None or kind in (str, int, float, bool)


def is_iterator(value: Any) -> bool:
    """Tell whether a value says where it is by `get_state` and can be put there by `set_state`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("get_state", "set_state")
    )


def is_module(value: Any) -> bool:
    """Tell whether a value is an `nnx` object that holds variables: a module, `nnx.Optimizer`, `nnx.Rngs`, a metric."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    # Optimizers and random streams are no modules; what they have in common with them changed its name.
    return isinstance(value, (nnx.Module, nnx.Optimizer, getattr(nnx, "Pytree", None) or nnx.Object))


def state_of(value: Any) -> Any:
    """Give the tree of a module's variables, each once however often it is shared; another value as it is."""
    return sys.modules["flax.nnx"].state(value) if is_module(value) else value


def with_state(module: Any, state: Any, *, in_place: bool) -> Any:
    """Put a tree of variables into a module.

    Args:
        module: Gives the structure.
        state: Like `state_of(module)`.
        in_place: Change the module itself; otherwise make another one.
    """
    nnx = sys.modules["flax.nnx"]
    if in_place:
        nnx.update(module, state)
        return module
    return nnx.merge(nnx.split(module)[0], state)


def position_of(iterator: Any) -> Any:
    """Give the state of an iterator as plain JSON.

    Raises:
        TypeError: It is neither JSON nor bytes.
    """
    state = iterator.get_state()
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    if not is_json(state):
        raise TypeError(f"get_state() gave {type(state).__name__} that is neither plain JSON nor bytes")
    return {"json": state}


def state_from(position: Any) -> Any:
    """Give what `set_state` takes, from what `position_of` gave."""
    return base64.b64decode(position["base64"]) if "base64" in position else position["json"]


def merged(positions: list[str]) -> bytes:
    """Make one document of the positions of all processes, each as JSON; equal ones are written once."""
    alike = all(position == positions[0] for position in positions)
    texts = positions[:1] if alike else positions
    return f'{{"alike":{json.dumps(alike)},"states":[{",".join(texts)}]}}'.encode()


def mine(document: bytes, *, index: int, count: int) -> Any:
    """Give the state of the iterator for one of `count` processes.

    Raises:
        CheckpointError: Each process had a position of its own, and there were another number of them.
    """
    record = json.loads(document)
    states = record["states"]
    if record["alike"]:
        return state_from(states[0])
    if len(states) != count:
        raise CheckpointError(
            f"each of {len(states)} processes had a position of its own and now there are {count}; use as many, or an "
            "iterator with one position for all (as styrax-data makes them)"
        )
    return state_from(states[index])
