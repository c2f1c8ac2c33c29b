"""What a decoder is trained by: sums and counts, so that batches may be cut up as one likes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from styrax.models.layers.fence import on_cpu
from styrax.models.layers.meshes import mesh_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from styrax.models.layers.router import RouterStats
    from styrax.models.moe_config import MoE

#: Logits that a device makes at once, at most; what is more is made piece by piece. On a CPU they should stay near.
MOST_LOGITS = 2**24
#: The same where the head's parameters may have to be gathered for each piece.
MOST_LOGITS_ON_ACCELERATORS = 2**27


class LossTerm(NamedTuple):
    """A part of the objective: `coef * total / weight`, once totals and weights of the whole batch are added up.

    Attributes:
        total: Sum, float32.
        weight: What it is divided by, float32; no gradient.
        coef: 0 makes it a metric only.
    """

    total: Any
    weight: Any
    coef: float = 1.0


def next_token(
    head: Callable[[Any, Array], Array],
    params: Any,
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    most_logits: int | None = None,
) -> dict[str, LossTerm]:
    r"""Cross-entropy of the next token, and $\zeta \ln^2 Z$, without all logits in memory at once.

    $S = \sum_t m_t (\ln Z_t - z_{t, y_t})$, with $Z_t = \sum_v \exp z_{t,v}$, in float32.

    Where a device would make more than `most_logits` logits, the sequence is cut into pieces; the gradient of a piece
    is made together with its loss, so that logits are made once, not twice, and never kept.

    Source: Chowdhery et al., "PaLM" (2022), section 5, for the second term.

    Args:
        head: `head(params, x)` gives logits.
        params: Of the head.
        x: What the head takes.
        targets: $y$, in `[0, vocab_size)` where the mask is not 0.
        mask: $m$, mostly 0 or 1.
        vocab_size: Logits per token.
        z_loss: $\zeta$; 0 leaves the second term out.
        most_logits: See above; `None` means what suits the platform.

    Returns:
        `{"loss": ...}` in nats, and `"z_loss"` if it is asked for.

    Example:
        >>> terms = next_token(lambda w, x: x @ w, jnp.zeros((2, 4)), jnp.ones((1, 3, 2)), jnp.zeros((1, 3), int),
        ...                    jnp.ones((1, 3)), vocab_size=4)
        >>> round(float(terms["loss"].total / terms["loss"].weight), 4)  # log 4
        1.3863
    """
    mask = mask.astype("float32")

    def piece(params: Any, x: Array, targets: Array, mask: Array) -> tuple[Array, ...]:
        logits = head(params, x).astype("float32")
        peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        shifted = logits - peak
        picked = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
        log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
        each = [log_sum - picked] + ([jnp.square(log_sum + peak[..., 0])] if z_loss else [])
        # Where the mask is 0 there may be anything, NaN too.
        return tuple(jnp.sum(jnp.where(mask != 0, term, 0) * mask) for term in each)

    here = mesh_of(x)
    if most_logits is None:
        most_logits = MOST_LOGITS if on_cpu(x) else MOST_LOGITS_ON_ACCELERATORS
    ways = math.prod(map(here.ways, here.split(("batch", "seq"), x.shape[:2])))
    pieces = _pieces(x.shape[0], x.shape[1], vocab_size, most_logits * ways)
    run = piece if pieces == 1 else functools.partial(_by_pieces, piece, pieces)
    coefs = {"loss": 1.0, "z_loss": z_loss}
    weight = jnp.sum(mask)
    totals = zip(coefs.items(), run(params, x, targets, mask), strict=False)
    return {name: LossTerm(total, weight, coef) for (name, coef), total in totals}


def _pieces(batch: int, seq: int, vocab_size: int, most: int) -> int:
    """Find the fewest equal pieces of a sequence whose logits are few enough."""
    return next(
        (count for count in range(1, seq) if seq % count == 0 and batch * seq // count * vocab_size <= most), seq
    )


Piece = Callable[..., "tuple[Array, ...]"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_pieces(piece: Piece, count: int, params: Any, x: Array, targets: Array, mask: Array) -> tuple[Array, ...]:
    sums = jax.lax.map(lambda each: piece(params, *each), _cut(count, x, targets, mask))
    return tuple(each.sum() for each in sums)


def _forward(
    piece: Piece, count: int, params: Any, x: Array, targets: Array, mask: Array
) -> tuple[tuple[Array, ...], Any]:
    """Make the gradient of each sum too: it is linear in the one number that comes back for that sum."""
    cut = _cut(count, x, targets, mask)
    terms = len(jax.eval_shape(piece, params, *jax.tree.map(lambda leaf: leaf[0], cut)))
    units = [tuple(jnp.float32(row == column) for column in range(terms)) for row in range(terms)]

    def step(carry: Any, each: Any) -> tuple[Any, Any]:
        part, rest = each[0], each[1:]
        sums, back = jax.vjp(lambda params, part: piece(params, part, *rest), params, part)
        found = [back(unit) for unit in units]
        grads = [
            jax.tree.map(lambda total, new: total + new.astype(total.dtype), total, new)
            for total, (new, _) in zip(carry[1], found, strict=True)
        ]
        return (jax.tree.map(jnp.add, carry[0], sums), grads), [by_part for _, by_part in found]

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, "float32"), params)
    start = tuple(jnp.zeros((), "float32") for _ in units), [zeros for _ in units]
    (totals, grads), by_x = jax.lax.scan(step, start, cut)
    kept = [jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grad, params) for grad in grads]
    return totals, (kept, [jnp.moveaxis(each, 0, 2).reshape(x.shape) for each in by_x], mask)


def _backward(piece: Piece, count: int, saved: Any, cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
    *grads, mask = saved

    def weigh(*each: Array) -> Array:
        first, *rest = (factor.astype(grad.dtype) * grad for factor, grad in zip(cotangents, each, strict=True))
        return sum(rest, first)

    by_params, by_x = (jax.tree.map(weigh, *each) for each in grads)
    return by_params, by_x, np.zeros(mask.shape, jax.dtypes.float0), jnp.zeros_like(mask)


_by_pieces.defvjp(_forward, _backward)


def _cut(count: int, *arrays: Array) -> tuple[Array, ...]:
    """`[batch, seq, ...] -> [count, batch, seq / count, ...]` by strides: tokens stay on the devices that hold them."""
    return tuple(
        jnp.moveaxis(each.reshape(each.shape[0], each.shape[1] // count, count, *each.shape[2:]), 2, 0)
        for each in arrays
    )


def routers(reports: Sequence[RouterStats], config: MoE) -> dict[str, LossTerm]:
    r"""Keep experts evenly used and router logits small.

    The balance of one row and layer is $E \sum_e f_e P_e$: $f_e$ the part of its choices that fell on expert $e$,
    $P_e$ the mean probability. As a row is never cut up, the sum over rows is the same however a batch is. No weight
    depends on the parameters, so that a step can have the weights of a whole batch for nothing.

    Source: DeepSeek-AI, "DeepSeek-V3" (2024), equations 17 to 20; Zoph et al., "ST-MoE" (2022), equation 5.

    Args:
        reports: From `Decoder.hidden`: for each stack of sparse layers, with leading axes of layers and rows.
        config: Gives the coefficients.

    Returns:
        `balance` and `router_z`, and as metrics `router_entropy` in nats and `dropped`, the part of choices that found
        no place.
    """
    sums = {name: [jnp.zeros(()), jnp.zeros(())] for name in ("balance", "router_z", "router_entropy", "dropped")}

    def add(name: str, total: Array, weight: Array) -> None:
        sums[name] = [sums[name][0] + jnp.sum(total), sums[name][1] + jnp.sum(weight)]

    for stats in reports:
        load = jax.lax.stop_gradient(stats.load)
        share = load / jnp.maximum(load.sum(-1, keepdims=True), 1)
        tokens = jax.lax.stop_gradient(stats.tokens)
        balance = config.num_experts * (share * stats.probs).sum(-1) / jnp.maximum(tokens, 1)
        add("balance", balance, (tokens > 0).astype("float32"))
        add("router_z", stats.z, tokens)
        add("router_entropy", jax.lax.stop_gradient(stats.entropy), tokens)
        add("dropped", jax.lax.stop_gradient(stats.dropped), tokens * config.experts_per_token)
    coefs = {"balance": config.balance_coef, "router_z": config.z_coef}
    return {name: LossTerm(total, weight, coefs.get(name, 0.0)) for name, (total, weight) in sums.items()}
