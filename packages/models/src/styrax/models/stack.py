"""One stack of equal blocks: parameters `[layers, ...]`, run by a scan or unrolled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int, Key

Block = TypeVar("Block")
Carry = TypeVar("Carry")


def stack(make: Callable[[Key[Array, ""]], Block], num_layers: int, key: Key[Array, ""]) -> Block:
    """Make blocks with independent keys, as one block whose arrays have a leading axis.

    Args:
        make: Makes a block, a pytree, from a key.
        num_layers: Length of the leading axis.
        key: Split into one per block.
    """
    return jax.vmap(make)(jax.random.split(key, num_layers))


def unstack(blocks: Block) -> tuple[Block, ...]:
    """Cut a stack into its blocks.

    One split per array, so that the gradient is one concatenation; that of `array[i]` would be a sum of
    as many arrays of full size as there are layers.

    Args:
        blocks: From `stack`.

    Example:
        >>> [block["w"].tolist() for block in unstack({"w": jnp.array([[1, 2], [3, 4]])})]
        [[1, 2], [3, 4]]
    """
    leaves, treedef = jax.tree.flatten(blocks)
    slices = [[each.reshape(each.shape[1:]) for each in jax.lax.split(leaf, (1,) * len(leaf))] for leaf in leaves]
    return tuple(treedef.unflatten(block) for block in zip(*slices, strict=True))


def run_stack(
    step: Callable[[Block, int | Int[Array, ""], Carry], Carry],
    blocks: Block | tuple[Block, ...],
    carry: Carry,
    *,
    num_layers: int,
    remat: bool,
) -> Carry:
    r"""Compute $c_{i+1} = \mathrm{step}(b_i, i, c_i)$ for all layers.

    Args:
        step: Takes a block, its number and the carry.
        blocks: A stack, over which `jax.lax.scan` runs, or a tuple of single blocks, for an unrolled loop.
        carry: $c_0$, a pytree.
        num_layers: How many there are.
        remat: Recompute each step in the backward pass instead of keeping what it computed.

    Returns:
        $c_L$.

    Example:
        >>> double = lambda block, layer, carry: carry * block["w"] + layer
        >>> stacked = {"w": jnp.array([2.0, 3.0])}
        >>> float(run_stack(double, stacked, 1.0, num_layers=2, remat=False))
        7.0
        >>> float(run_stack(double, unstack(stacked), 1.0, num_layers=2, remat=True))
        7.0
    """
    unrolled = isinstance(blocks, tuple)
    if remat:
        # In a scan nothing outside can be shared with the recomputation, so no barrier is needed against it.
        step = jax.checkpoint(step, prevent_cse=unrolled)
    if unrolled:
        for layer, block in enumerate(blocks):
            carry = step(block, layer, carry)
        return carry
    return jax.lax.scan(lambda c, each: (step(*each, c), None), carry, (blocks, jnp.arange(num_layers)))[0]
