"""Exact comparison of trees, with every difference named by path."""

from typing import Any

import numpy as np

from styrax.core import tree


def signature(value: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Give each leaf's shape and dtype by path.

    Example:
        >>> signature({"w": np.zeros((2, 3), np.float32)})
        {'w': ((2, 3), 'float32')}
    """
    return {path: (tuple(np.shape(leaf)), _dtype(leaf)) for path, leaf in tree.flatten(value).items()}


def assert_same(got: Any, expected: Any, what: str) -> None:
    """Assert that two trees have the same paths, shapes, dtypes and bits.

    Args:
        got: The tree to judge.
        expected: The right one; its container types may differ.
        what: Begins the error text.

    Raises:
        AssertionError: They differ; every differing path is listed.

    Example:
        >>> assert_same({"a": np.ones(2)}, {"a": np.ones(2)}, "copy")
    """
    wanted, found = tree.flatten(expected), tree.flatten(got)
    problems = [f"{path}: missing" for path in wanted if path not in found]
    problems += [f"{path}: not expected" for path in found if path not in wanted]
    for path in (path for path in wanted if path in found):
        left, right = np.asarray(found[path]), np.asarray(wanted[path])
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            problems.append(f"{path}: got {left.dtype}{left.shape}, expected {right.dtype}{right.shape}")
        elif left.tobytes() != right.tobytes():
            problems.append(f"{path}: {np.sum(left != right)} of {left.size} values differ")
    fail_if(problems, f"{what}: the trees differ")


def fail_if(problems: list[str], what: str) -> None:
    """Raise an `AssertionError` that lists all problems, if there are any.

    Example:
        >>> fail_if([], "nothing is wrong")
    """
    if problems:
        raise AssertionError("\n  ".join([f"{what} ({len(problems)}):", *problems]))


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
