"""Held-out loss, and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from styrax.core import UserError
from styrax.train.checks import check_arrays, check_terms, loss_problems
from styrax.train.loss import Term
from styrax.train.step import Loss, TrainState

if TYPE_CHECKING:
    from jaxtyping import Int


class HeldOut(NamedTuple):
    """Result of an evaluation.

    Attributes:
        loss: Mean negative log-likelihood of a token, in nats.
        tokens: Number of tokens in the mean.
        bits_per_byte: ``sum of nll / (ln 2 * bytes of text)``; None where the bytes of a token are not known.
        name: Of the held-out set; empty if it is the only one and has none.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    name: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers to log.

        >>> HeldOut(2.5, 10, None, "code").metrics
        {'held_out_loss/code': 2.5}
        """
        end = f"/{self.name}" if self.name else ""
        found = {f"held_out_loss{end}": self.loss}
        return found if self.bits_per_byte is None else {**found, f"held_out_bits_per_byte{end}": self.bits_per_byte}


def evaluator(
    graphdef: Any, loss: Loss, eval_params: Callable[[Any, Any], Any] | None = None
) -> Callable[..., HeldOut]:
    """Compile a held-out evaluation of the loss's first term, with dropout off.

    Args:
        graphdef: From :func:`styrax.train.init_state`.
        loss: The training loss; it is called with ``rngs=None``.
        eval_params: ``eval_params(opt_state, params)``, the weights to evaluate; None evaluates those that are trained.

    Returns:
        ``evaluate(state, batches, token_bytes=None) -> HeldOut``. ``token_bytes`` is int ``[vocab]``, the bytes of
        text that each token stands for; with it the batches must hold ``targets`` and ``loss_mask``. All batches
        are dispatched before the first result is read.

    Raises:
        UserError: If no token of the batches counts, or a batch lacks what ``token_bytes`` needs.
    """
    if problems := loss_problems(loss):
        raise UserError("\n".join(problems))

    @jax.jit
    def sums(params: Any, variables: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        out: dict[str, Term] = check_terms(loss(nnx.merge(graphdef, params, variables), batch, None), 1)
        first = next(iter(out.values()))
        return first.total, first.weight

    derive = None if eval_params is None else jax.jit(eval_params)

    def evaluate(
        state: TrainState,
        batches: Iterable[Mapping[str, Any]],
        token_bytes: Int[np.ndarray, " vocab"] | None = None,
    ) -> HeldOut:
        results, size = [], 0
        params = state.params if derive is None else derive(state.opt_state, state.params)
        for batch in batches:
            results.append(sums(params, state.variables, check_arrays(batch)))
            if token_bytes is not None:
                size += batch_bytes(batch, token_bytes)
        totals = np.asarray(jax.device_get(results), np.float64).reshape(-1, 2).sum(axis=0)
        if totals[1] == 0:
            raise UserError("there is no held-out token to evaluate; raise data.held_out or add documents")
        bits = float(totals[0]) / math.log(2) / size if size else None
        return HeldOut(float(totals[0] / totals[1]), round(float(totals[1])), bits)

    return evaluate


def batch_bytes(batch: Mapping[str, Any], token_bytes: Int[np.ndarray, " vocab"]) -> int:
    """Bytes of text that the counted targets of a batch stand for.

    >>> import numpy as np
    >>> batch = {"targets": np.array([[1, 2, 0]]), "loss_mask": np.array([[1.0, 1.0, 0.0]])}
    >>> batch_bytes(batch, np.array([0, 3, 4]))
    7
    """
    lacking = [name for name in ("targets", "loss_mask") if name not in batch]
    if lacking:
        raise UserError(
            f"bits per byte need batches with targets and loss_mask; this one lacks {', '.join(lacking)}. Add them, or "
            "leave token_bytes out"
        )
    counts = np.asarray(batch["loss_mask"]) > 0
    return int(token_bytes[np.asarray(batch["targets"])[counts]].sum())
