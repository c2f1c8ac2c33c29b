"""The arithmetic of a program, counted in its trace: matrix products, each as often as its loop runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from styrax.train.step import split_model


def flops_per_token(
    config: Any, vocab_size: int | None, model: Any, loss: Any, batch: Mapping[str, Any], tokens: int
) -> float | None:
    """Arithmetic that training needs per token: as the model's configuration says, or else counted in a trace."""
    ask = getattr(config, "train_flops_per_token", None)
    shape = next(iter(batch.values()))[0]
    if ask is not None and vocab_size is not None and len(shape) == 2:
        return float(ask(vocab_size=vocab_size, length=shape[1])["causal"])
    counted = model_flops(model, loss, batch)
    return None if counted is None else counted / tokens


def model_flops(model: Any, loss: Any, batch: Mapping[str, tuple[tuple[int, ...], Any]]) -> float | None:
    """Arithmetic of a training step without recomputation: three times that of the loss, which is traced as on a CPU.

    The products of the backward pass are twice those of the forward pass. None for a model with kernels of its own.
    """
    arrays = {name: jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(d)) for name, (shape, d) in batch.items()}
    made = (lambda: model) if isinstance(model, nnx.Module) else (lambda: model(nnx.Rngs(0)))
    graphdef, params, variables = split_model(nnx.eval_shape(made))

    def total(params: Any, variables: Any, batch: Any) -> Any:
        out = loss(nnx.merge(graphdef, params, variables), batch, None)
        return jax.tree.leaves(out)

    forward = count_flops(total, params, variables, arrays)
    return None if forward is None else 3 * forward


def count_flops(function: Callable[..., Any], *args: Any) -> float | None:
    """Count products and sums in the matrix products and convolutions of a function, with nothing computed.

    Everything else (norms, activations, softmaxes) is left out, as is usual. None if there is a kernel, whose insides
    are not known here, or a loop with no known end.

    Args:
        function: Any that can be traced.
        args: Arrays, or ``jax.ShapeDtypeStruct``.

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> count_flops(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0], x)
    3072.0
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> float | None:
    total = 0.0
    for equation in jaxpr.eqns:
        found = _of_equation(equation)
        if found is None:
            return None
        total += found
    return total


def _of_equation(equation: Any) -> float | None:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (over, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0]) * math.prod(shape[axis] for axis in over)
    if name == "ragged_dot_general":
        over = params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0]
        shape = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0]) * math.prod(shape[axis] for axis in over)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
        reads = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0]) * reads
    if name == "pallas_call":
        return None
    inner = [_count(each) for each in _inside(params)]
    known = [each for each in inner if each is not None]
    if len(known) < len(inner):
        return None
    if not known:
        return 0.0
    if name == "scan":
        return params["length"] * sum(known)
    if name == "while":
        return None if sum(known) else 0.0
    if name == "cond":
        return max(known)
    if name.startswith(("custom_jvp_call", "custom_vjp_call")):
        return known[0]
    return sum(known)


def _inside(params: Any) -> list[Any]:
    found = []
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)
