r"""The bytes of one block of a decoder: what it keeps for the backward pass, and what it works with.

With $t$ tokens, $c$ bytes of the compute dtype, widths of the residual stream $d$, of all queries $h$, of keys and of
values $k$, of the MLP $f$ ($f'$ with both sides of a gate), and $N$ numbers in the block:

- recomputed, a block keeps what enters it, $t d c$; of "dots" also the products, $t c\,(d + h + 2 k + f')$;
- keeping all, $t c\,(6 d + 2 h + 2 k + f' + 4 f)$: of each norm what enters, what is normalised and what leaves, and of
  the MLP what enters its activation, three steps of that, and what leaves; in a narrow dtype also what enters the norms
  in float32, $8 t d$. A loop over layers stacks all of it, and the compiler cannot leave any out.
- at work on the way back, with its weights and their gradients whole, it has $2 N c + t c\,(2 f' + 2 h + 2 k + 4 d)$.

On a CPU attention keeps its weights too, twice in float32 and with a table of pairs, for all the keys that its blocks
of queries go through, but not those of rows of 512 tokens or more on one device (`styrax.models.attention.blocked`);
narrow numbers are widened; and of a block that is recomputed all that it would keep is there at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from styrax.train.plan.shape import Widths

_LONG = 512


def kept_by_layer(widths: Widths, tokens: float, compute_bytes: int, length: int = 0) -> float:
    """Bytes that one layer keeps for the backward pass.

    Args:
        widths: Of the model.
        tokens: Of the device.
        compute_bytes: Of a number of the compute dtype.
        length: Tokens of a row.
    """
    if widths.remat == "none":
        return _all(widths, tokens, compute_bytes, length)
    products = widths.embed + widths.heads + 2 * widths.kv + _both(widths) if widths.remat == "dots" else 0.0
    return tokens * compute_bytes * (widths.embed + products)


def block_at_work(widths: Widths, tokens: float, compute_bytes: int, length: int = 0) -> float:
    """Bytes of a block on its way back, beside what was kept.

    Args:
        widths: And the others: as for `kept_by_layer`.
    """
    c = max(compute_bytes, 4) if widths.fenced else compute_bytes
    weights = 2 * widths.block_numbers * c
    if widths.fenced and widths.remat == "block":
        return weights + _all(widths, tokens, c, length)
    return weights + tokens * c * (2 * _both(widths) + 2 * widths.heads + 2 * widths.kv + 4 * widths.embed)


def rows_given(widths: Widths, tokens: float, length: int) -> float:
    """Bytes worked out of the positions and documents of rows: angles, and on a CPU a table of pairs.

    Args:
        widths: Of the model.
        tokens: Of the device.
        length: Tokens of a row.
    """
    return tokens * (4 * widths.head + (length if widths.fenced else 0))


def _both(widths: Widths) -> float:
    return widths.mlp * (2 if widths.gated else 1)


def _all(widths: Widths, tokens: float, compute_bytes: int, length: int) -> float:
    c, scores = compute_bytes, 0.0
    if widths.fenced:
        blocks = max(1, min(8, -(-length // 64)))
        keys = length * (blocks + 1) / (2 * blocks)
        tables = widths.head and not (widths.alone and length >= _LONG)
        c, scores = max(c, 4), (widths.heads / widths.head * keys * 9 if tables else 0.0)
    numbers = 6 * widths.embed + 2 * widths.heads + 2 * widths.kv + _both(widths) + 4 * widths.mlp
    return tokens * (numbers * c + (8 * widths.embed if c < 4 else 0) + scores)
