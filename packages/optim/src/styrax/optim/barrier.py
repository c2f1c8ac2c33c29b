"""What JAX has no function for: arrays whose sharding is their own, and arrays that are to lie as others do."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def barrier(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
    """Give an array as it is, through which the compiler carries no sharding, neither forward nor backward.

    The compiler gives what an array is made from, and what is made from it, the sharding that it is told for the array.
    So of `y = 2 * (a + b)`, told that `y` is to lie in another way than `a` and `b`, it might move both of them. With
    `y = 2 * barrier(a + b)` it moves one array, at the barrier, and none if both sides agree. Nothing else happens.

    Without Shardy, JAX's partitioner since 0.7, an axis that is cut and put together does the same, but for arrays that
    are split along it already.

    Example:
        >>> barrier(jnp.arange(2)).tolist()
        [0, 1]
    """
    if getattr(jax.config, "jax_use_shardy_partitioner", True):
        return _primitive().bind(x)
    return jnp.concatenate([x[:1], x[1:]]) if x.shape[0] > 1 else x


def alike(x: Shaped[Array, " ..."], y: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
    """Give `y`, which is to lie as `x`, of the same shape, lies, whatever the compiler decides for that.

    Without Shardy, and mapped by `jax.vmap`, nothing is said about it.

    Example:
        >>> alike(jnp.arange(2), jnp.ones(2)).tolist()
        [1.0, 1.0]
    """
    return _group().bind(x, y) if getattr(jax.config, "jax_use_shardy_partitioner", True) else y


_GROUPS = itertools.count(1 << 20)
"""Numbers of groups, far from those that JAX gives."""


@functools.cache
def _group() -> Any:
    from jax.extend.core import Primitive
    from jax.extend.mlir.dialects import sdy
    from jax.interpreters import ad, batching, mlir

    primitive = Primitive("sharding_group")
    primitive.def_impl(lambda x, y: y)
    primitive.def_abstract_eval(lambda x, y: y)

    def lower(context: Any, x: Any, y: Any) -> list[Any]:
        del context
        number = next(_GROUPS)
        for each in (x, y):
            sdy.ShardingGroupOp(each, number)
        return [y]

    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = lambda arguments, axes: (arguments[1], axes[1])
    ad.primitive_jvps[primitive] = lambda primals, tangents: (primitive.bind(*primals), tangents[1])
    return primitive


@functools.cache
def _primitive() -> Any:
    # JAX has no function for Shardy's operation.
    from jax.extend.core import Primitive
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import sdy
    from jax.interpreters import ad, batching, mlir

    primitive = Primitive("sharding_barrier")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)

    def lower(context: Any, x: Any) -> list[Any]:
        del context
        neither = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 0)
        return [sdy.PropagationBarrierOp(x, neither).result]

    mlir.register_lowering(primitive, lower)
    batching.defvectorized(primitive)
    ad.deflinear2(primitive, lambda cotangent, x: [primitive.bind(cotangent)])
    return primitive
