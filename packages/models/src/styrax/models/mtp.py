"""Prediction of tokens beyond the next one, as a further objective of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.models.block import Block
from styrax.models.layers.linear import Linear
from styrax.models.layers.norm import Norm

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models.config import DecoderConfig
    from styrax.models.layers.attention import Scope


class MTP(nnx.Module):
    r"""One more token ahead: $h^k_i = \mathrm{block}(W [\mathrm{norm}(e_{i+k}); \mathrm{norm}(h^{k-1}_i)])$.

    $e$ are embeddings of tokens and $h^0$ is what the decoder gives to its head. $\mathrm{head}(\mathrm{norm}(h^k_i))$
    predicts token $i + k + 1$, with the head of the model. The block is made like the last one of the model.

    Source: DeepSeek-AI, "DeepSeek-V3" (2024), equations 21 to 25; the order of the two halves is that of its weights,
    and of those of Qwen3-Next.

    Attributes:
        token_norm: Of the embeddings.
        hidden_norm: Of the activations.
        proj: $W$, `[2 * embed, embed]`.
        block: A block of the model's kind.
        norm: Before the head.
    """

    def __init__(self, config: DecoderConfig, policy: Policy, key: Key[Array, ""]):
        first, second = jax.random.split(key)
        dim, norm = config.embed_dim, config.arch.norm
        std = config.scales.init_std * config.scales.hidden_init_mult
        self.token_norm = Norm(dim, norm, policy=policy)
        self.hidden_norm = Norm(dim, norm, policy=policy)
        self.proj = Linear(2 * dim, dim, std=std, policy=policy, key=first)
        self.block = Block(config, config.kinds[-1]._replace(role="own"), policy, second)
        self.norm = Norm(dim, norm, policy=policy)

    def __call__(
        self,
        hidden: Float[Array, "... embed"],
        embedded: Float[Array, "... embed"],
        *,
        scope: Scope,
        layer: int,
        key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "... embed"], Any]:
        """Look one token further.

        Args:
            hidden: $h^{k-1}$.
            embedded: $e_{i+k}$ at place $i$, in the same shape.
            scope: Of the model's blocks: a place keeps its position and sees the same places.
            layer: A number that no block of the model has, for dropout.
            key: As for a block.

        Returns:
            $h^k$, and what the router of its experts reports, `None` without experts.
        """
        both = jnp.concatenate([self.token_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x, _, report, _ = self.block(self.proj(both), None, scope=scope, layer=layer, index=0, key=key)
        return x, report


def ahead(
    steps: int,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"] | None,
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Find what each place knows and is asked, so many steps further on, and whether it is asked.

    The document may not end before, and what counts is what the mask says of the place further on.

    Args:
        steps: 1 or more.
        tokens: What the model reads.
        targets: The token after each.
        mask: What counts.
        segment_ids: The document of each token; `None` means one document per row.

    Returns:
        The token so many steps on, the one after it, and the mask; tokens and mask are 0 where there is none.

    Example:
        >>> row, segments = jnp.array([[5, 6, 7, 8]]), jnp.array([[1, 1, 1, 2]])
        >>> [each.tolist() for each in ahead(1, row, row + 1, jnp.ones((1, 4)), segments)]
        [[[6, 7, 0, 0]], [[7, 8, 9, 0]], [[1.0, 1.0, 0.0, 0.0]]]
    """

    def shifted(x: Array) -> Array:
        return jnp.pad(x[:, steps:], ((0, 0), (0, min(steps, x.shape[1]))))

    known, kept = shifted(tokens), shifted(mask)
    if segment_ids is not None:
        same = (shifted(segment_ids) == segment_ids) & (segment_ids != 0)
        known, kept = jnp.where(same, known, 0), jnp.where(same, kept, 0)
    return known, shifted(targets), kept
