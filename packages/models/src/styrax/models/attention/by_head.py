"""Attention of long rows on a CPU: head by head, and the scores are made again for the gradient.

What is kept for the gradient is as long as the rows, not as long as their square, and the scores of one block of
queries of one head stay in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

Blocks = Sequence[tuple[int, int, int, int]]
"""Queries that are taken together, `[start, stop)`, each with the keys that they can see; every query is in one."""
_LOW = float(jnp.finfo("float32").min)


class Rule(NamedTuple):
    """How scores are made.

    Attributes:
        scale: Factor of the products.
        softcap: Largest score, if any.
        blocks: Queries and their keys.
    """

    scale: float
    softcap: float | None
    blocks: Blocks

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Give the blocks' queries and keys."""
        return ((slice(start, stop), slice(first, last)) for start, stop, first, last in self.blocks)

    def scores(self, query: Float[Array, "group seq dim"], key: Float[Array, "keys dim"]) -> Float[Array, "..."]:
        """Make `[group, seq, keys]` scores in float32."""
        scores = _product("gtd,sd->gts", query, key) * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


def attend(
    query: Float[Array, "batch seq kv_heads group head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    allowed: Bool[Array, "rows seq keys"],
    rule: Rule,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq kv_heads group value_dim"]:
    r"""Attend, with a gradient of its own.

    With $p = \exp(s - \log\sum\exp s)$ and $\bar p = \bar o v^\top$, the gradient of the scores is
    $p \circ (\bar p - \sum_{keys} p \circ \bar p)$, and of a sink $-p_{sink} \sum_{keys} p \circ \bar p$, summed over
    queries.

    Source: Dao et al., "FlashAttention" (2022), algorithm 4, with whole rows.

    Args:
        query: Grouped by the key head that they read.
        key: Keys.
        value: Values.
        allowed: The allowed pairs, of each row or of all.
        rule: How scores are made.
        sinks: A score for each query head that has no value.

    Returns:
        In the dtype of `value`.
    """
    table = None if sinks is None else sinks.astype("float32").reshape(query.shape[2:4])
    out: Array = _attend(query.transpose(0, 2, 3, 1, 4), key, value, table, allowed, rule)
    return out.transpose(0, 3, 1, 2, 4)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(query: Array, key: Array, value: Array, sinks: Array | None, allowed: Array, rule: Rule) -> Array:
    return _forward(query, key, value, sinks, allowed, rule)[0]


def _forward(query: Array, key: Array, value: Array, sinks: Array | None, allowed: Array, rule: Rule) -> Any:
    out, sums = _by_head(partial(_head, rule=rule), (query, key, value), sinks, allowed)
    return out, (query, key, value, sinks, allowed, sums)


def _backward(rule: Rule, kept: tuple[Any, ...], given: Array) -> tuple[Array | None, ...]:
    query, key, value, sinks, allowed, sums = kept
    work = partial(_head_gradients, rule=rule)
    *gradients, shares = _by_head(work, (query, key, value, sums, given), None, allowed)
    of_sinks = None
    if sinks is not None:
        of_sinks = -(jnp.exp(sinks[None, ..., None] - sums) * shares).sum((0, 3))
    return (*gradients, of_sinks, None)


_attend.defvjp(_forward, _backward)


def _by_head(
    work: Callable[..., Any], arrays: tuple[Array, ...], sinks: Array | None, allowed: Bool[Array, "rows seq keys"]
) -> Any:
    """Work on each row and key head in turn: arrays `[batch, kv_heads, ...]`, sinks `[kv_heads, group]`."""
    batch, heads = arrays[0].shape[:2]

    def one(number: Array) -> Any:
        row, head = number // heads, number % heads
        parts = [array.reshape(batch * heads, *array.shape[2:])[number] for array in arrays]
        return work(*parts, None if sinks is None else sinks[head], allowed[row if len(allowed) > 1 else 0])

    found = jax.lax.map(one, jnp.arange(batch * heads))
    return jax.tree.map(lambda array: array.reshape(batch, heads, *array.shape[1:]), found)


def _head(
    query: Float[Array, "group seq head_dim"],
    key: Float[Array, "keys head_dim"],
    value: Float[Array, "keys value_dim"],
    sinks: Float[Array, " group"] | None,
    allowed: Bool[Array, "seq keys"],
    *,
    rule: Rule,
) -> tuple[Float[Array, "group seq value_dim"], Float[Array, "group seq"]]:
    """The output, and the logarithm of the sum of the exponentials of the scores."""
    outs, sums = [], []
    for rows, keys in rule.slices():
        scores = jnp.where(allowed[rows, keys], rule.scores(query[:, rows], key[keys]), _LOW)
        top = scores.max(-1)
        if sinks is not None:
            top = jnp.maximum(top, sinks[:, None])
        weights = jnp.where(allowed[rows, keys], jnp.exp(scores - top[..., None]), 0)
        total = weights.sum(-1)
        if sinks is not None:
            total += jnp.exp(sinks[:, None] - top)
        total = jnp.where(total == 0, 1, total)  # a query that sees nothing gives 0
        out = _product("gts,sd->gtd", weights.astype(value.dtype), value[keys])
        outs.append((out / total[..., None]).astype(value.dtype))
        sums.append(top + jnp.log(total))
    return jnp.concatenate(outs, 1), jnp.concatenate(sums, 1)


def _head_gradients(
    query: Float[Array, "group seq head_dim"],
    key: Float[Array, "keys head_dim"],
    value: Float[Array, "keys value_dim"],
    sums: Float[Array, "group seq"],
    given: Float[Array, "group seq value_dim"],
    _: None,
    allowed: Bool[Array, "seq keys"],
    *,
    rule: Rule,
) -> tuple[Array, Array, Array, Float[Array, "group seq"]]:
    """Gradients of queries, keys and values, and the sums of weights times their gradients."""
    of_queries, shares = [], []
    of_keys, of_values = jnp.zeros(key.shape, "float32"), jnp.zeros(value.shape, "float32")
    for rows, keys in rule.slices():
        asking, back = query[:, rows], given[:, rows]
        scores = rule.scores(asking, key[keys])
        weights = jnp.where(allowed[rows, keys], jnp.exp(scores - sums[:, rows, None]), 0)
        of_weights = _product("gtd,sd->gts", back, value[keys])
        # Without the barriers all of this is computed once for each product that reads it.
        weights, of_weights = jax.lax.optimization_barrier((weights, of_weights))
        share = (weights * of_weights).sum(-1)
        of_scores = weights * (of_weights - share[..., None]) * rule.scale
        if rule.softcap is not None:
            of_scores *= 1 - jnp.square(scores / rule.softcap)
        of_scores = jax.lax.optimization_barrier(of_scores.astype(query.dtype))
        of_values = of_values.at[keys].add(_product("gts,gtd->sd", weights.astype(value.dtype), back))
        of_keys = of_keys.at[keys].add(_product("gts,gtd->sd", of_scores, asking))
        of_queries.append(_product("gts,sd->gtd", of_scores, key[keys]).astype(query.dtype))
        shares.append(share)
    whole = jnp.concatenate(of_queries, 1), of_keys.astype(key.dtype), of_values.astype(value.dtype)
    return *whole, jnp.concatenate(shares, 1)


def _product(spec: str, left: Array, right: Array) -> Array:
    """Float32 sums, of bfloat16 products where both are bfloat16."""
    narrow = left.dtype == right.dtype == jnp.bfloat16
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if narrow else None
    return jnp.einsum(spec, left, right, precision=precision, preferred_element_type="float32")
