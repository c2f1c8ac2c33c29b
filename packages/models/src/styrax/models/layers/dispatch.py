"""How tokens come to their experts: rows in an order in which a product with many kernels is cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from styrax.models.layers.fence import on_cpu

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Shaped

_LARGEST_BLOCK = 64
_SMALLEST_BLOCK = 8


class Layout(NamedTuple):
    """Where each choice of a token is computed.

    A choice has the number `token * k + j`. Those of padding, and those that find no place, have no row.

    Attributes:
        row: `[tokens * k]`, the row of a choice; `rows` if it has none.
        choice: `[rows]`, the choice of a row; `tokens * k` if it has none.
        expert: `[rows]`, the expert that computes a row.
        multiply: Takes `[rows, in]` and kernels `[experts, in, out]`, and multiplies each row by its expert's.
        dropped: How many choices found no place, `[]` float32.
    """

    row: Int[Array, " choices"]
    choice: Int[Array, " rows"]
    expert: Int[Array, " rows"]
    multiply: Callable[[Float[Array, "rows inner"], Float[Array, "experts inner outer"]], Float[Array, "rows outer"]]
    dropped: Float[Array, ""]


def dropless(experts: Int[Array, " choices"], num_experts: int, *, on: Array | None = None) -> Layout:
    """Compute every choice, with rows sorted by expert.

    On a CPU every expert's rows begin at a new block, and each block is multiplied by one kernel;
    `jax.lax.ragged_dot`, which other backends get, would there cost `num_experts` times the work.

    Args:
        experts: The expert of each choice, `num_experts` at padding.
        num_experts: How many there are.
        on: An array of the computation, which knows what it will run on.

    Example:
        >>> layout = dropless(jnp.array([1, 0, 1]), 2)
        >>> layout.multiply(jnp.ones((len(layout.choice), 1)), jnp.array([[[5.0]], [[7.0]]]))[layout.row].tolist()
        [[7.0], [5.0], [7.0]]
    """
    counts, rank = _queue(experts, num_experts)
    if on_cpu(*([] if on is None else [on])):
        return _blocks(experts, num_experts, counts, rank)
    total, rows = counts.sum(), len(experts)
    row = jnp.where(experts < num_experts, (jnp.cumsum(counts) - counts).at[experts].get(mode="clip") + rank, rows)
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows), side="right").clip(max=num_experts - 1)

    def multiply(
        x: Float[Array, "rows inner"], kernels: Float[Array, "experts inner outer"]
    ) -> Float[Array, "rows outer"]:
        # What it gives for rows of no group is not promised.
        return jnp.where((jnp.arange(rows) < total)[:, None], jax.lax.ragged_dot(x, kernels, counts), 0)

    return Layout(row, _inverse(row, rows), expert, multiply, jnp.zeros((), "float32"))


def capacity(experts: Int[Array, " choices"], num_experts: int, places: int) -> Layout:
    """Give every expert the same number of rows; the first choices, in the order of tokens, get them.

    Source: Lepikhin et al., "GShard" (2020), section 2.2, but with all choices of a token at its turn.

    Args:
        experts: The expert of each choice, `num_experts` at padding.
        num_experts: How many there are.
        places: Rows for each.

    Example:
        >>> layout = capacity(jnp.array([0, 0, 1, 0]), num_experts=2, places=2)
        >>> layout.row.tolist(), layout.choice.tolist(), float(layout.dropped)
        ([0, 1, 2, 4], [0, 1, 2, 4], 1.0)
    """
    rank, rows = _queue(experts, num_experts)[1], num_experts * places
    found = (experts < num_experts) & (rank < places)
    row = jnp.where(found, experts * places + rank, rows)
    dropped = ((experts < num_experts) & ~found).sum(dtype="float32")
    expert = jnp.repeat(jnp.arange(num_experts), places)
    return Layout(row, _inverse(row, rows), expert, grid_product, dropped)


def grid_product(
    x: Float[Array, "rows inner"], kernels: Float[Array, "experts inner outer"]
) -> Float[Array, "rows outer"]:
    """Multiply rows by kernels, as many of the first rows by the first kernel as of the last by the last.

    Args:
        x: Rows.
        kernels: One for each expert.
    """
    grid = x.reshape(len(kernels), -1, x.shape[-1])
    return jnp.einsum("eni,eio->eno", grid, kernels).reshape(-1, kernels.shape[-1])


@jax.custom_vjp
def move(
    x: Shaped[Array, "old dim"], source: Int[Array, " new"], target: Int[Array, " old"]
) -> Shaped[Array, "new dim"]:
    """Give each row its source's, or 0 where there is no such row.

    Its gradient moves rows back; that of plain indexing would add them up, which is slow.

    Args:
        x: Rows.
        source: Of each new row, the old row; no old row twice.
        target: The inverse: of each old row, the new row, out of bounds where it goes nowhere.

    Example:
        >>> move(jnp.array([[1.0], [2.0]]), jnp.array([1, 2, 0]), jnp.array([2, 0])).tolist()
        [[2.0], [0.0], [1.0]]
    """
    del target
    return _take(x, source)


def _take(x: Shaped[Array, "old dim"], source: Int[Array, " new"]) -> Shaped[Array, "new dim"]:
    return x.at[source].get(mode="fill", fill_value=0, wrap_negative_indices=False)


move.defvjp(
    lambda x, source, target: (_take(x, source), (source, target)),
    lambda indices, cotangent: (move(cotangent, indices[1], indices[0]), None, None),
)


def _queue(experts: Int[Array, " choices"], num_experts: int) -> tuple[Int[Array, " experts"], Int[Array, " choices"]]:
    # How many choices each expert has, and each choice's place among those of its expert.
    count = len(experts)
    order = jnp.argsort(experts, stable=True)
    place = jnp.zeros(count, "int32").at[order].set(jnp.arange(count, dtype="int32"), unique_indices=True)
    counts = jnp.zeros(num_experts, "int32").at[experts].add(1, mode="drop")
    start = jnp.cumsum(counts) - counts
    return counts, place - start.at[experts].get(mode="fill", fill_value=0)


def _inverse(row: Int[Array, " choices"], rows: int) -> Int[Array, " rows"]:
    count = len(row)
    return jnp.full(rows, count, "int32").at[row].set(jnp.arange(count, dtype="int32"), mode="drop")


def _blocks(
    experts: Int[Array, " choices"], num_experts: int, counts: Int[Array, " experts"], rank: Int[Array, " choices"]
) -> Layout:
    choices = len(experts)
    mean = max(choices // num_experts, 1)
    size = min(max(1 << (mean.bit_length() - 1), _SMALLEST_BLOCK), _LARGEST_BLOCK)
    # Every expert that has any rows has a last block that is not full.
    number = (choices + min(num_experts, choices) * (size - 1)) // size
    used = -(-counts // size)
    first = jnp.cumsum(used) - used
    rows = number * size
    row = jnp.where(experts < num_experts, first.at[experts].get(mode="clip") * size + rank, rows)
    owner = jnp.searchsorted(jnp.cumsum(used), jnp.arange(number), side="right").clip(max=num_experts - 1)

    def multiply(
        x: Float[Array, "rows inner"], kernels: Float[Array, "experts inner outer"]
    ) -> Float[Array, "rows outer"]:
        blocks = x.reshape(number, size, x.shape[-1])
        return block_product(blocks, kernels, owner).reshape(rows, kernels.shape[-1])

    return Layout(row, _inverse(row, rows), jnp.repeat(owner, size), multiply, jnp.zeros((), "float32"))


@jax.custom_vjp
def block_product(
    blocks: Float[Array, "blocks size inner"],
    kernels: Float[Array, "experts inner outer"],
    owner: Int[Array, " blocks"],
) -> Float[Array, "blocks size outer"]:
    """Multiply each block of rows by its owner's kernel.

    The gradient of the kernels is added up in place; that of a plain loop would copy all of them for each block.

    Args:
        blocks: Rows.
        kernels: One for each expert.
        owner: The expert of each block.

    Example:
        >>> kernels = jnp.array([[[5.0]], [[7.0]]])
        >>> block_product(jnp.ones((3, 2, 1)), kernels, jnp.array([1, 0, 1]))[..., 0].tolist()
        [[7.0, 7.0], [5.0, 5.0], [7.0, 7.0]]
    """
    return jax.lax.map(lambda each: each[0] @ kernels[each[1]], (blocks, owner))


def _block_product_forward(
    blocks: Float[Array, "blocks size inner"],
    kernels: Float[Array, "experts inner outer"],
    owner: Int[Array, " blocks"],
) -> tuple:
    return block_product(blocks, kernels, owner), (blocks, kernels, owner)


def _block_product_backward(saved: tuple, cotangent: Float[Array, "blocks size outer"]) -> tuple:
    blocks, kernels, owner = saved

    def add(total: Float[Array, "experts inner outer"], each: tuple) -> tuple:
        block, back, expert = each
        return total.at[expert].add(jnp.matmul(block.T, back, preferred_element_type="float32")), None

    # Float32 sums: an expert has many blocks, and each sum would be rounded.
    start = jnp.zeros(kernels.shape, "float32")
    total = jax.lax.scan(add, start, (blocks, cotangent, owner))[0]
    return block_product(cotangent, kernels.swapaxes(1, 2), owner), total.astype(kernels.dtype), None


block_product.defvjp(_block_product_forward, _block_product_backward)
