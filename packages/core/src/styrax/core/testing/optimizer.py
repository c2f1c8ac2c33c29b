"""Conformance of an `Optimizer`."""

from __future__ import annotations

import re
from typing import Any

from styrax.core import tree
from styrax.core.testing.compare import fail_if, signature


def check_optimizer(tx: Any, params: Any) -> None:
    """Check that a gradient transformation can be compiled, scanned, checkpointed and donated.

    - its state has the structure, shapes and dtypes that `jax.eval_shape(init)` says, and keeps them through
      `update` (a change would recompile the step and break a restore);
    - updates have the structure and shapes of the parameters;
    - it works inside `jax.lax.scan`, and gives the same there as outside;
    - gradients of zero give finite updates and a finite state;
    - bfloat16 parameters with float32 gradients keep all of the above;
    - nothing is hidden in Python: called again, `init` and `update` compute the same.

    Args:
        tx: Has `init(params)` and `update(grads, state, params)`.
        params: A tree of float arrays, such as a model's.

    Raises:
        AssertionError: The optimizer breaks one of these; every differing leaf is listed.
    """
    import jax
    import jax.numpy as jnp

    params = jax.tree.map(jnp.asarray, params)
    grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)
    _stable(tx, params, grads, "")
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    _stable(tx, half, jax.tree.map(lambda g: g.astype(jnp.float32), grads), "bfloat16 parameters: ")


def _stable(tx: Any, params: Any, grads: Any, what: str) -> None:
    import jax
    import jax.numpy as jnp

    traces = [_trace(tx, grads, params) for _ in range(2)]
    assert traces[0] == traces[1], f"{what}init and update compute something else when they are called again"
    abstract = jax.eval_shape(tx.init, params)
    state = tx.init(params)
    _same_kind(state, abstract, f"{what}init against eval_shape(init)")

    update = jax.jit(tx.update)
    updates, after = update(grads, state, params)
    _same_kind(after, abstract, f"{what}the state after update")
    shapes = {path: shape for path, (shape, _) in signature(updates).items()}
    wanted = {path: shape for path, (shape, _) in signature(params).items()}
    assert shapes == wanted, f"{what}updates have shapes {shapes}, parameters {wanted}"
    _finite(updates, f"{what}updates")
    for _ in range(2):
        updates, after = update(grads, after, params)

    def body(carry: Any, _: None) -> tuple[Any, Any]:
        updates, carry = tx.update(grads, carry, params)
        return carry, updates

    try:
        scanned, trace = jax.lax.scan(body, state, None, length=3)
    except TypeError as error:
        raise AssertionError(f"{what}update does not work as the body of jax.lax.scan: {error}") from error
    _same_kind(scanned, abstract, f"{what}the state after lax.scan")
    # Compilation may fuse and reorder. An update is as exact as the least precise array that it comes from.
    coarsest = max(float(jnp.finfo(leaf.dtype).eps) for leaf in _floats((params, grads, state)))
    rtol = max(16 * float(jnp.finfo(jnp.float32).eps), 2 * coarsest)
    _close(jax.tree.map(lambda u: u[-1], trace), updates, rtol, f"{what}the third update in lax.scan")

    zeros = jax.tree.map(jnp.zeros_like, grads)
    for step in range(2):
        updates, state = update(zeros, state, params)
        _finite(updates, f"{what}updates of zero gradients, step {step}")
        _finite(state, f"{what}state after zero gradients, step {step}")


def _trace(tx: Any, grads: Any, params: Any) -> str:
    """Write the computation as text; a state hidden in Python changes it from one time to the next."""
    import jax

    program = jax.make_jaxpr(lambda params, grads: tx.update(grads, tx.init(params), params))(params, grads)
    return re.sub("0x[0-9a-f]+", "", str(program))


def _same_kind(got: Any, expected: Any, what: str) -> None:
    import jax

    left, right = signature(got), signature(expected)
    problems = [
        f"{path}: got {left.get(path, 'nothing')}, expected {right.get(path, 'nothing')}"
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]
    fail_if(problems, f"{what}: leaves differ in shape or dtype")
    assert jax.tree.structure(got) == jax.tree.structure(expected), (
        f"{what}: got structure {jax.tree.structure(got)}, expected {jax.tree.structure(expected)}"
    )


def _close(got: Any, expected: Any, rtol: float, what: str) -> None:
    import numpy as np

    wanted = tree.flatten(expected)
    problems = []
    for path, leaf in tree.flatten(got).items():
        left, right = np.asarray(leaf, np.float64), np.asarray(wanted[path], np.float64)
        if not np.allclose(left, right, rtol=rtol, atol=rtol * (np.abs(right).max(initial=0.0))):
            problems.append(f"{path}: differs by up to {np.abs(left - right).max()}")
    fail_if(problems, f"{what}: values differ")


def _floats(value: Any) -> list[Any]:
    import jax
    import jax.numpy as jnp

    return [leaf for leaf in jax.tree.leaves(value) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _finite(value: Any, what: str) -> None:
    import jax.numpy as jnp

    problems = [
        path
        for path, leaf in tree.flatten(value).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all())
    ]
    fail_if(problems, f"{what}: not finite")
