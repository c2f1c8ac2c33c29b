"""What the checks of a checkpointer share: save, open anew, restore, and compare to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core import tree
from styrax.core.testing.compare import fail_if

Factory = Callable[[Path], Any]
Check = Callable[[Factory, Path], None]


@contextlib.contextmanager
def opened(factory: Factory, folder: Path) -> Iterator[Any]:
    """Open a checkpointer, and close it at the end of the block, whatever happens inside."""
    checkpointer = factory(folder)
    try:
        yield checkpointer
    except BaseException:
        with contextlib.suppress(Exception):
            checkpointer.close()
        raise
    checkpointer.close()


def save(factory: Factory, folder: Path, step: int, items: Any) -> None:
    """Save one step and close."""
    with opened(factory, folder) as checkpointer:
        checkpointer.save(step, items)


def restore(factory: Factory, folder: Path, step: int, like: Any) -> Any:
    """Restore from one step with a checkpointer of its own."""
    with opened(factory, folder) as checkpointer:
        return checkpointer.restore(step, like)


def comes_back(factory: Factory, folder: Path, value: Any) -> None:
    """Save a tree, and restore it twice from a fresh checkpointer: as its abstract form says, and as it was saved."""
    save(factory, folder, 1, {"item": value})
    with opened(factory, folder) as fresh:
        assert_exact(fresh.restore(1, {"item": abstract(value)})["item"], value, "restored as asked", kinds=True)
        assert_exact(fresh.restore(1, {"item": None})["item"], value, "restored as saved (like=None)")


def abstract(value: Any) -> Any:
    """Give a tree that says what to restore another one as: kinds, shapes and dtypes, but no values.

    Example:
        >>> abstract([np.ones(2), 3])
        [array([0., 0.]), 0]
    """
    import jax

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        if isinstance(x, np.ndarray):
            return np.zeros(x.shape, x.dtype)
        return np.zeros((), x.dtype)[()] if isinstance(x, np.generic) else type(x)()

    return jax.tree.map(leaf, value)


def assert_exact(got: Any, expected: Any, what: str, *, kinds: bool = False) -> None:
    """Assert that two trees have the same containers, keys, dtypes, shapes and bits.

    Args:
        got: The tree to judge.
        expected: The right one.
        what: Begins the error text.
        kinds: Whether a jax array must be one, and a numpy array or scalar such a one.

    Raises:
        AssertionError: They differ; every differing path is listed.

    Example:
        >>> assert_exact({"a": (np.float32(1),)}, {"a": (np.float32(1),)}, "a copy", kinds=True)
    """
    import jax

    left, right = jax.tree.structure(got), jax.tree.structure(expected)
    assert left == right, f"{what}: got the structure {left}, expected {right}"
    found, wanted = tree.flatten(got), tree.flatten(expected)
    problems = []
    for path, leaf in wanted.items():
        (kind, data), (right_kind, right_data) = _described(found[path]), _described(leaf)
        if kind != right_kind:
            problems.append(f"{path}: got {kind}, expected {right_kind}")
        elif data.tobytes() != right_data.tobytes():
            problems.append(f"{path}: {_different(data, right_data)} of {data.size} values differ")
        elif kinds and _class(found[path]) is not _class(leaf):
            problems.append(f"{path}: got {type(found[path]).__name__}, expected {type(leaf).__name__}")
    fail_if(problems, f"{what}: the trees differ")


def refuses(what: str, names: str, attempt: Callable[[], Any]) -> None:
    """Assert that something is an error whose text names what is wrong."""
    try:
        got = attempt()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        assert names in text, f"the error for {what} does not name {names}: {text[:300]}"
    else:
        raise AssertionError(f"{what} gave {str(got)[:200]}, expected an error that names {names}")


def _described(leaf: Any) -> tuple[str, np.ndarray]:
    import jax
    import jax.numpy as jnp

    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{leaf.dtype}{leaf.shape}", np.asarray(jax.random.key_data(leaf))
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        array = np.asarray(leaf)
        return f"{array.dtype}{array.shape}", array
    return type(leaf).__name__, np.frombuffer(repr(leaf).encode(), np.uint8)


def _different(left: np.ndarray, right: np.ndarray) -> int:
    """Count the values of which some bit differs."""
    if left.size != right.size or not left.size:
        return left.size
    bits = [np.frombuffer(each.tobytes(), np.uint8).reshape(each.size, -1) for each in (left, right)]
    return int((bits[0] != bits[1]).any(axis=1).sum())


def _class(leaf: Any) -> type:
    import jax

    return jax.Array if isinstance(leaf, jax.Array) else type(leaf)
