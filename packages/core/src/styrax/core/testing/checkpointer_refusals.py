"""Checks of a checkpointer: what does not fit is an error that names it, and nothing is given or saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.testing.round_trip import Check, Factory, assert_exact, opened, refuses

_SAVED: dict[str, Any] = {"block": {"kernel": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)}}


def _asked(change: Callable[[dict[str, Any]], Any], what: str, names: str) -> Check:
    """Give the check that restoring with a changed abstract tree is refused; the checkpoint stays good."""

    def check(factory: Factory, folder: Path) -> None:
        import jax

        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _SAVED)
        change(like["block"])
        with opened(factory, folder) as checkpointer:
            checkpointer.save(1, {"params": _SAVED})
            checkpointer.wait()
            refuses(what, names, lambda: checkpointer.restore(1, {"params": like}))
            assert_exact(checkpointer.restore(1, {"params": None})["params"], _SAVED, "afterwards")

    return check


def _more(block: dict[str, Any]) -> None:
    block["another_leaf"] = block["bias"]


def _shape(block: dict[str, Any]) -> None:
    import jax

    block["kernel"] = jax.ShapeDtypeStruct((2, 4), np.float32)


def _transposed(block: dict[str, Any]) -> None:
    import jax

    block["kernel"] = jax.ShapeDtypeStruct((3, 2), np.float32)


def _dtype(block: dict[str, Any]) -> None:
    import jax

    block["kernel"] = jax.ShapeDtypeStruct((2, 3), np.int8)


def _absent(step: int, item: str, names: str) -> Check:
    def check(factory: Factory, folder: Path) -> None:
        with opened(factory, folder) as checkpointer:
            checkpointer.save(5, {"run": {"a": 1}})
            checkpointer.wait()
            refuses(f"restore of a missing {names}", names, lambda: checkpointer.restore(step, {item: None}))

    return check


def _unsavable(make: Callable[[], Any], what: str) -> Check:
    def check(factory: Factory, folder: Path) -> None:
        bad = {"good": np.ones(3), "bad_leaf": make()}
        with opened(factory, folder) as checkpointer:

            def attempt() -> None:
                checkpointer.save(1, {"params": bad})
                checkpointer.wait()

            refuses(f"save of {what}", "bad_leaf", attempt)
            assert checkpointer.steps() == [], f"after that, steps() gives {checkpointer.steps()}, expected []"

    return check


def _deleted() -> Any:
    import jax.numpy as jnp

    array = jnp.ones(3)
    array.delete()
    return array


def _described() -> Any:
    import jax

    return jax.ShapeDtypeStruct((2,), np.float32)


REFUSALS: dict[str, Check] = {
    "a missing step is refused": _absent(77, "run", "77"),
    "a missing item is refused": _absent(5, "absent-item", "absent-item"),
    "a missing leaf is refused": _asked(_more, "a leaf that was not saved", "another_leaf"),
    "a leaf too many is refused": _asked(lambda block: block.pop("bias"), "a saved leaf that was not asked", "bias"),
    "another shape is refused": _asked(_shape, "another shape", "kernel"),
    "a transposed shape is refused": _asked(_transposed, "a shape of as many elements", "kernel"),
    "another dtype is refused": _asked(_dtype, "another dtype", "kernel"),
    "a leaf that is no array is refused": _unsavable(object, "a Python object"),
    "a deleted array is refused": _unsavable(_deleted, "an array that was deleted"),
    "an abstract array is refused": _unsavable(_described, "a ShapeDtypeStruct"),
}
