"""AdamW whose moments are stored in 8 bits: a code for each element and a scale for each block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from styrax.core.config import NonNegative, Positive
from styrax.core.errors import nearest
from styrax.optim.elementwise import (
    BELOW_ONE,
    Common,
    Leaf,
    Now,
    Step,
    as_it_lies,
    debias,
    elementwise,
    shared_out,
)
from styrax.optim.guard import FusedTransformation
from styrax.optim.roles import ROLES, Role
from styrax.optim.specs import ParamSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt8


class EightBitState(NamedTuple):
    """State of `eight_bit_adamw`.

    Attributes:
        count: Updates applied so far; skipped steps do not count.
        learning_rate: Rate of the last applied update (before the first: the rate it will have).
        mu: First moments, a tree like the parameters: uint8 codes, or float32 where a parameter is kept so.
        nu: Second moments, likewise.
        mu_scale: Largest first moment of each block, float32, `[..., blocks of the last axis]`; a scalar for a
            parameter kept in float32.
        nu_scale: Largest second moment of each block, likewise.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    learning_rate: Float[Array, ""]
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any


def eight_bit_adamw(
    learning_rate: float | Float[Array, ""],
    *,
    specs: Mapping[str, ParamSpec],
    schedule: Callable[[Any], Any] | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float | Mapping[str, float] = 1e-8,
    block: int = 256,
    min_size: int = 4096,
    keep: Collection[Role] = ("embed",),
    weight_decay: float | Mapping[str, float] = 0.1,
    lr_multipliers: float | Mapping[str, float] = 1.0,
) -> FusedTransformation:
    """AdamW as `styrax.optim.adamw`, with moments rounded to 8 bits between updates.

    Each block of `block` neighbours on the last axis has a scale `a`, its largest absolute moment, and each moment `m`
    is stored as the code of the entry of a table that is nearest to `m / a`:

        mu, nu = a table[code]                                          from the state
        mu, nu, update = as in adamw, in float32
        a = max over the block of |mu|,  code = nearest to mu / a       nu likewise, with a table of its own

    The tables are dynamic: their steps grow with the number, over seven powers of ten (see `dynamic_table`). A linear
    table makes second moments zero that are not, and the steps explode. For the same reason a second moment that is
    not zero is never stored as zero, which bitsandbytes allows.

    Blocks run along the last axis, not along the flattened array, so that codes lie as their parameters do on a mesh.
    They stay on their devices if `block` divides the part of the last axis that a device has. Parameters of less than
    `min_size` elements, those with a role in `keep` (of embeddings, rare rows take large and uneven steps) and arrays
    with a last axis too short to save anything stay in float32. Arguments not named here, `update`'s extra arguments
    and the handling of leaves are those of `styrax.optim.adamw`.

    Args:
        learning_rate: Peak learning rate.
        specs: Path -> description, from `styrax.optim.specs`; only the role is read.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, for every parameter, or one by path; above 0.
        block: Elements of the last axis that share a scale; shorter where the axis ends.
        min_size: Least number of elements to store in 8 bits.
        keep: Roles of the parameters that stay in float32; `()` for none.
        weight_decay: Decay `d` of every parameter, or one by path.
        lr_multipliers: Multiplier `k` of every parameter, or one by path.

    Returns:
        A transformation with state `EightBitState`, whose structure, shapes and dtypes never change.

    Raises:
        UserError: A constant is out of range or no number, or `keep` has what is no role; all are listed.
        ValueError: As `adamw`.

    Source: Dettmers et al. 2021, arXiv 2110.02861, section 2; `bitsandbytes` 0.50.2.

    Example:
        >>> from styrax.optim.specs import specs
        >>> w = {"w": jnp.ones((16, 512)), "b": jnp.ones(512)}
        >>> state = eight_bit_adamw(1e-3, specs=specs(w)).init(w)
        >>> str(state.mu["w"].dtype), state.mu_scale["w"].shape, str(state.mu["b"].dtype)
        ('uint8', (16, 2), 'float32')
    """
    common = Common("eight_bit_adamw", learning_rate, schedule, weight_decay, lr_multipliers, eps)
    common.check(
        *(f"keep: {role!r} is no role{nearest(str(role), ROLES)}" for role in keep if role not in ROLES),
        b1=(BELOW_ONE, b1),
        b2=(BELOW_ONE, b2),
        block=(Positive, block),
        min_size=(NonNegative, min_size),
    )

    def is_small(path: str, shape: tuple[int, ...]) -> bool:
        short = not shape or min(shape[-1], block) < 4
        return short or math.prod(shape) < min_size or specs[path].role in keep

    def make(path: str, w: Any) -> tuple[Any, ...]:
        zeros = jnp.zeros_like(w, jnp.float32)
        if is_small(path, zeros.shape):
            return zeros, jnp.zeros_like(zeros), jnp.ones((), jnp.float32), jnp.ones((), jnp.float32)
        mu, mu_scale = _zeros(zeros, block, signed=True)
        nu, nu_scale = _zeros(zeros, block, signed=False)
        return as_it_lies(mu, zeros), as_it_lies(nu, zeros), mu_scale, nu_scale

    def rule(now: Now) -> Step:
        debias1, debias2 = debias(b1, now.t), debias(b2, now.t)

        def step(leaf: Leaf) -> tuple[Any, tuple[Any, ...]]:
            g, (mu, nu, mu_scale, nu_scale) = leaf.g, leaf.slots
            if is_small(leaf.path, g.shape):
                mu = now.keep(b1 * mu + (1.0 - b1) * g, mu)
                nu = now.keep(b2 * nu + (1.0 - b2) * (g * g), nu)
                return debias1 * mu / (jnp.sqrt(debias2 * nu) + common.epsilon(leaf.path)), (mu, nu, mu_scale, nu_scale)
            first = b1 * as_it_lies(dequantise(mu, mu_scale, block, signed=True), g) + (1.0 - b1) * g
            second = b2 * as_it_lies(dequantise(nu, nu_scale, block, signed=False), g) + (1.0 - b2) * (g * g)
            direction = debias1 * first / (jnp.sqrt(debias2 * second) + common.epsilon(leaf.path))
            new = (*quantise(first, block, signed=True), *quantise(second, block, signed=False))
            new = (new[0], new[2], new[1], new[3])
            return direction, tuple(now.keep(as_it_lies(a, b), b) for a, b in zip(new, leaf.slots))

        return step

    return elementwise(common, EightBitState, 4, rule, make=make)


@functools.cache
def dynamic_table(*, signed: bool) -> np.ndarray:
    """Give the 256 numbers in [-1, 1], or in [0, 1], that a code stands for, in rising order.

    For each power of ten from -6 to 0 there are numbers evenly between it and a tenth of it, twice as many for each
    power; and besides 0 and 1. The smallest above 0 is 5.5e-7, or 3.25e-7 without a sign.

    Returns:
        float32 `[256]`. Do not write to it.

    Source: Dettmers 2015, arXiv 1511.04561; `bitsandbytes.functional.create_dynamic_map`.

    Example:
        >>> table = dynamic_table(signed=True)
        >>> [f"{x:.6g}" for x in table[[0, 127, 128, 255]]]
        ['-0.992969', '0', '5.5e-07', '1']
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (power + (not signed)) + 1)
        middles = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [*middles, *-middles] if signed else [*middles]
    return np.sort(np.array(numbers, np.float32))


def quantise(
    x: Float[Array, "*rest n"], block: int, *, signed: bool
) -> tuple[UInt8[Array, "*rest n"], Float[Array, "*rest blocks"]]:
    """Store an array as codes and scales.

    Args:
        x: What to store; not below 0 without a sign.
        block: Elements of the last axis that share a scale.
        signed: Which table; without a sign nothing but zero is stored as zero.

    Example:
        >>> codes, scale = quantise(jnp.array([[1.0, -2.0, 0.0, 8.0]]), 2, signed=True)
        >>> scale.tolist(), [round(x, 2) for x in dequantise(codes, scale, 2, signed=True)[0].tolist()]
        ([[2.0, 8.0]], [1.0, -1.99, 0.0, 8.0])
    """

    def stored(x: Any) -> tuple[Any, Any]:
        blocks = _blocks(x, block)
        scale = jnp.max(jnp.abs(blocks), axis=-1)
        unit = blocks / jnp.where(scale > 0, scale, 1.0)[..., None]
        # A search for each element would take most of the update's time.
        edges, first = _code_tables(signed=signed)
        bits = jax.lax.bitcast_convert_type(unit, jnp.uint32) >> 16
        codes = jnp.asarray(first).at[bits].get(mode="promise_in_bounds")
        codes += (unit > jnp.asarray(edges).at[codes].get(mode="promise_in_bounds")).astype(jnp.uint8)
        if not signed:
            codes = jnp.maximum(codes, (unit > 0).astype(jnp.uint8))
        return codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scale

    return shared_out(stored, lambda spec: (spec, PartitionSpec(*spec[:-1], None)), x)


def dequantise(
    codes: UInt8[Array, "*rest n"], scale: Float[Array, "*rest blocks"], block: int, *, signed: bool
) -> Float[Array, "*rest n"]:
    """Undo `quantise`, up to the rounding."""

    def restored(codes: Any, scale: Any) -> Any:
        numbers = _blocks(jnp.asarray(dynamic_table(signed=signed))[codes], block) * scale[..., None]
        return numbers.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]]

    return shared_out(restored, lambda spec: spec, codes, scale)


def _zeros(x: Any, block: int, *, signed: bool) -> tuple[Any, Any]:
    """Give what `quantise` makes of zeros in the shape of an array; XLA would take minutes to find that out."""

    def stored(x: Any) -> tuple[Any, Any]:
        zero = int(np.searchsorted(dynamic_table(signed=signed), 0.0))
        blocks = -(-x.shape[-1] // min(block, x.shape[-1]))
        return jnp.full(x.shape, zero, jnp.uint8), jnp.zeros((*x.shape[:-1], blocks), jnp.float32)

    return shared_out(stored, lambda spec: (spec, PartitionSpec(*spec[:-1], None)), x)


@functools.cache
def _code_tables(*, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Give the edge above each code, and the lowest code of the numbers that begin with each 16 bits.

    No two edges lie between float32 numbers whose first 16 bits are alike, so that code or the next is the nearest.

    Returns:
        float32 `[256]`, the last NaN, above which there is nothing; uint8 `[65536]`.
    """
    table = dynamic_table(signed=signed)
    edges = (table[1:] + table[:-1]) / 2
    bits = np.arange(2**16, dtype=np.uint32) << 16
    bits[2**15 :] |= 0xFFFF  # the lowest number below zero is the one with the greatest magnitude
    return np.append(edges, np.float32("nan")), np.searchsorted(edges, bits.view(np.float32)).astype(np.uint8)


def _blocks(x: Any, block: int) -> Any:
    n = x.shape[-1]
    size = min(block, n)
    if n % size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % size)])
    return x.reshape(*x.shape[:-1], -1, size)
