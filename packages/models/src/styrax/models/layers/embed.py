"""Token embedding, whose table is also the output head of a tied model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from styrax.models.layers.linear import normal

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy


class Embed(nnx.Module):
    """A table with one row per token.

    Attributes:
        embedding: `[vocab, dim]` in the parameter dtype.
    """

    def __init__(self, vocab_size: int, dim: int, *, std: float, policy: Policy, key: Key[Array, ""]):
        self.embedding = nnx.Param(normal(key, (vocab_size, dim), std, policy))
        self.policy = policy

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq dim"]:
        """Look up rows.

        Args:
            tokens: An id outside `[0, vocab)` gives a row of NaN, so that a vocabulary that does not fit the
                data shows at the first step.

        Returns:
            In the compute dtype.
        """
        table = self.embedding[...]
        rows = table.at[tokens].get(mode="fill", fill_value=float("nan"), wrap_negative_indices=False)
        return rows.astype(self.policy.compute_dtype)
