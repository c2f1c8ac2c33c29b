"""What a loss function returns, and the loss of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from styrax.core import UserError

if TYPE_CHECKING:
    from flax import nnx
    from jaxtyping import Array, Float


class Term(NamedTuple):
    r"""One part of the objective, as a sum and the weight that it is divided by.

    The objective of a step over micro-batches :math:`i` is

    .. math:: \mathcal{L} = \sum_t c_t \frac{\sum_i S_{t,i}}{\sum_i W_{t,i}}

    with :math:`S` = ``total``, :math:`W` = ``weight`` and :math:`c` = ``coef``. Sums are divided once, after
    all micro-batches: so the result does not depend on how a batch is cut up, whatever the number of valid
    tokens in each piece, and an auxiliary loss weighs the same with accumulation as without.

    Attributes:
        total: Scalar float32, the sum over examples or tokens.
        weight: Scalar float32, the number of examples or tokens in the sum. Its gradient is not taken.
        coef: What the mean is multiplied by in the objective; 0 makes the term a metric only.

    >>> Term(total=6.0, weight=3.0).coef
    1.0
    """

    total: Any
    weight: Any
    coef: float = 1.0


def next_token_loss(model: nnx.Module, batch: Mapping[str, Array], rngs: nnx.Rngs | None = None) -> dict[str, Term]:
    r"""Cross-entropy of each next token, summed over the tokens that count.

    .. math:: S = -\sum_{b,t} m_{bt} \log \mathrm{softmax}(z_{bt})_{y_{bt}}, \qquad W = \sum_{b,t} m_{bt}

    Args:
        model: A decoder: ``model(tokens, positions=, segment_ids=, rngs=) -> logits[B, T, V]``. One that has
            ``losses(tokens, targets, mask, positions=, segment_ids=, rngs=)`` says itself what it is trained by:
            name -> (total, weight, coef), so that the losses of experts and others are not lost.
        batch: ``tokens`` and ``targets`` int32 ``[B, T]``, ``loss_mask`` ``[B, T]`` in {0, 1}, and where
            documents are packed ``segment_ids`` and ``positions`` int32 ``[B, T]``.
        rngs: Streams for dropout; None turns it off.

    Returns:
        ``{"loss": Term(S, W)}`` in nats, and what else the model is trained by.

    Raises:
        UserError: The batch lacks some of what the loss reads.
    """
    lacking = [name for name in ("tokens", "targets", "loss_mask") if name not in batch]
    if lacking:
        raise UserError(
            f"next_token_loss needs batches with tokens, targets and loss_mask; this one lacks {', '.join(lacking)} "
            f"and has {', '.join(map(str, batch)) or 'nothing'}. Add them, or pass your own loss to fit or make_step"
        )
    named = {"positions": batch.get("positions"), "segment_ids": batch.get("segment_ids"), "rngs": rngs}
    mask = batch["loss_mask"].astype(jnp.float32)
    if (losses := getattr(model, "losses", None)) is not None:
        named |= {"row_ids": batch["row_ids"]} if "row_ids" in batch and draws_by_row(model) else {}
        return {name: Term(*term) for name, term in losses(batch["tokens"], batch["targets"], mask, **named).items()}
    logits = model(batch["tokens"], **named)
    nll = cross_entropy(logits, batch["targets"])
    return {"loss": Term(jnp.sum(nll * mask), jnp.sum(mask))}


def draws_by_row(model: nnx.Module) -> bool:
    """Whether a model's dropout depends on a row's number in the whole batch, and not on what is beside it."""
    losses = getattr(model, "losses", None)
    return losses is not None and "row_ids" in inspect.signature(losses).parameters


next_token_loss.draws_by_row = draws_by_row  # type: ignore[attr-defined]


def cross_entropy(logits: Float[Array, "*batch vocab"], targets: Array) -> Float[Array, "*batch"]:
    r"""Negative log-likelihood :math:`\log\sum_v e^{z_v} - z_y` in float32, in nats.

    The largest logit is subtracted first. Classes lie on the last axis and targets are not checked.

    >>> import jax.numpy as jnp
    >>> round(float(cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)  # log 4
    1.3863
    """
    logits = logits.astype(jnp.float32)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - peak
    picked = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - picked
