"""Products of few rows and a large kernel, as a step of generation makes them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from styrax.models.layers.fence import on_cpu

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_FEW = 32
_TRIAL = contextvars.ContextVar("trial", default=False)


def product(
    x: Float[Array, "... inner"], kernel: Float[Array, "inner outer"], *, turned: bool = False
) -> Float[Array, "... outer"]:
    r"""$y_o = \sum_i x_i W_{io}$, under `by_trial` by the fastest of several ways.

    XLA:CPU makes a product of two to some dozens of rows of 16 bits up to six times faster if it is asked for float32,
    or, of a turned kernel, if it is written as a sum of products; at least where it has no instructions for such
    matrices. Which is fastest here is tried once: so generation does. Training, whose steps must compile to the same
    program whenever they do, does not. Sums are in float32 in any way, and rounded once.

    Args:
        x: In the dtype of the kernel.
        kernel: $W$; turned, `[outer, inner]`.
        turned: Whether it is.

    Example:
        >>> product(jnp.ones((2, 3), "bfloat16"), jnp.ones((3, 1), "bfloat16")).tolist()
        [[3.0], [3.0]]
    """
    few = _TRIAL.get() and 1 < math.prod(x.shape[:-1]) <= _FEW and x.dtype.itemsize == 2 and x.dtype == kernel.dtype
    way = fastest_way(x.dtype, turned) if few and on_cpu(x) else 0
    return _WAYS[way](x, kernel, turned)


@contextlib.contextmanager
def by_trial() -> Iterator[None]:
    """Let `product` choose by a trial in what is traced within."""
    token = _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(token)


@functools.lru_cache(maxsize=4)
def fastest_way(dtype: Any, turned: bool) -> int:
    """Try which way to multiply a few rows takes the least time, and give its number.

    Args:
        dtype: Of 16 bits.
        turned: Whether kernels are.
    """
    took = [seconds(way, 8, dtype, turned=turned) for way in _WAYS]
    return took.index(min(took))


def seconds(way: Callable[..., Array], rows: int, dtype: Any, *, turned: bool) -> float:
    """Measure a product, the best time of several; works while something else is traced, too.

    Args:
        way: Takes rows, a kernel, and whether it is turned.
        rows: How many.
        dtype: Of both.
        turned: Whether the kernel is.
    """
    with jax.ensure_compile_time_eval():
        kernel, x = jnp.ones((1024, 512) if turned else (512, 1024), dtype), jnp.ones((rows, 512), dtype)
        run, times = jax.jit(lambda x, kernel: way(x, kernel, turned=turned)), []
        for _ in range(40):  # the first compiles
            begin = time.perf_counter()
            run(x, kernel).block_until_ready()
            times.append(time.perf_counter() - begin)
    return min(times)


def _multiplied(x: Array, kernel: Array, turned: bool) -> Array:
    return x @ (kernel.T if turned else kernel)


def _widened(x: Array, kernel: Array, turned: bool) -> Array:
    return jnp.matmul(x, kernel.T if turned else kernel, preferred_element_type="float32").astype(x.dtype)


def _summed(x: Array, kernel: Array, turned: bool) -> Array:
    # Without the barrier, what two products have in common is kept apart from both, widened.
    x, kernel = jax.lax.optimization_barrier((x, kernel if turned else kernel.T))
    return (x[..., None, :].astype("float32") * kernel.astype("float32")).sum(-1).astype(x.dtype)


_WAYS = (_multiplied, _widened, _summed)
