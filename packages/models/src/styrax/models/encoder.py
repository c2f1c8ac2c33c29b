"""The encoder: input vectors, a stack of blocks that look both ways, and what is made of the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.core import UserError
from styrax.models.encoder_block import INIT_STD, EncoderBlock, segment_mask
from styrax.models.encoder_config import Text
from styrax.models.encoder_input import ImageInput, TextInput
from styrax.models.encoder_pool import Pooling
from styrax.models.layers.dropout import dropout
from styrax.models.layers.fence import rows
from styrax.models.layers.linear import Linear
from styrax.models.layers.norm import Norm
from styrax.models.stack import Turn, remat_of, run_scanned, run_unrolled, scans, stack, unstack

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int

    from styrax.core import Policy
    from styrax.models.encoder_config import EncoderConfig


class Encoded(NamedTuple):
    """What an encoder makes, all in the policy's output dtype.

    Attributes:
        tokens: `[batch, seq, embed]`, normalised; 0 at padding.
        pooled: `[batch, width]`, or `[batch, num_segments, width]` if a number of segments is given; `None` if the
            config pools by "none".
        logits: Of the classes, in place of the last axis of `pooled`, or of `tokens` if nothing is pooled; `None`
            without classes.
    """

    tokens: Float[Array, "batch seq embed"]
    pooled: Float[Array, "batch ... width"] | None
    logits: Float[Array, "batch ... classes"] | None


class Encoder(nnx.Module):
    r"""A bidirectional encoder of text or pictures.

    Kernels and embeddings start as $N(0, 0.02^2)$, in pre-norm blocks the two that write to the residual stream as
    $N(0, 0.02^2 / 2L)$, norms as 1, biases as 0. All state is `nnx.Param`; the parameters of the blocks are stacked,
    `[layers, ...]`, whatever runs them.

    Attributes:
        input: Makes vectors of what is read: `TextInput` or `ImageInput`.
        embed_norm: Before the first block, if the config asks for it.
        layers: The blocks, as one `EncoderBlock` with a leading axis on every array.
        final_norm: Behind the last block, if the blocks are pre-norm.
        pool: Makes one vector, if the config asks for it.
        head: Gives logits, if there are classes.
        config: What it was built from.
        policy: Dtypes of parameters, computation and results.

    Example:
        >>> from styrax.models.encoder_config import EncoderConfig, Image, Pool
        >>> picture = Image(height=8, width=8, patch=4)
        >>> pool = Pool(by="mean", num_classes=3)
        >>> config = EncoderConfig(input=picture, num_layers=1, embed_dim=16, num_heads=2, pool=pool)
        >>> config.build(rngs=nnx.Rngs(0))(jnp.zeros((1, 8, 8, 3))).logits.shape
        (1, 3)
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, policy: Policy):
        first, layers, pool, head = jax.random.split(rngs.params(), 4)
        dim, given = config.embed_dim, config.input
        if isinstance(given, Text):
            self.input = TextInput(given, dim, policy=policy, key=first)
        else:
            self.input = ImageInput(given, dim, policy=policy, key=first)
        if config.embed_norm:
            self.embed_norm = Norm(dim, config.norm, policy=policy)
        self.layers = stack(lambda key: EncoderBlock(config, policy, key), config.num_layers, layers)
        if config.placement == "pre":
            self.final_norm = Norm(dim, config.norm, policy=policy)
        if config.pool.by != "none":
            self.pool = Pooling(config, policy=policy, key=pool)
        if config.pool.num_classes:
            width = config.pool.dim or dim
            self.head = Linear(width, config.pool.num_classes, std=INIT_STD, policy=policy, key=head, bias=True)
        self.config = config
        self.policy = policy

    def __call__(
        self,
        inputs: Int[Array, "batch seq"] | Float[Array, "batch height width channels"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        token_types: Int[Array, "batch seq"] | None = None,
        num_segments: int | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Encoded:
        """Encode.

        Args:
            inputs: Token ids, of which one outside `[0, vocab_size)` makes its document NaN; or pictures, channels
                last, scaled as the model was trained.
            segment_ids: Of text: the document of each token, from 1, and 0 at padding, which reaches nobody; a token
                sees the tokens with its own id. A mask of ones and zeros is such. `None` means no padding.
            positions: Of text; `None` counts from 0 in each document. One beyond the model's `max_len` gives NaN.
            token_types: Of text, if the model has types; `None` means all 0.
            num_segments: Pool the documents 1, 2, ... up to this, each by itself; a document that is not in the row
                has a vector that means nothing. `None` pools all tokens that are not padding.
            rngs: Turns dropout on; gives one `dropout` key.

        Raises:
            UserError: Shapes do not fit; all problems are listed.
        """
        if num_segments is not None and (num_segments < 1 or segment_ids is None):
            raise UserError(f"num_segments: expected 1 or more, and segment_ids beside it, got {num_segments}")
        config, batch = self.config, len(inputs)
        x = self.input(inputs, positions=positions, segment_ids=segment_ids, token_types=token_types)
        shape, real = x.shape, None if segment_ids is None else (segment_ids != 0)
        # Whatever stands at padding, even an id that is none, reaches nobody, nor does its gradient.
        x = _real_only(x, real)
        x = self.embed_norm(x) if config.embed_norm else x
        key = rngs.dropout() if rngs is not None and config.dropout else None
        embed_key = None if key is None else jax.random.fold_in(key, config.num_layers)
        x = rows(dropout(x, config.dropout, embed_key))
        x = self._run(x, mask=segment_mask(shape[1], segment_ids), batch=batch, key=key)
        x = self.final_norm(x) if config.placement == "pre" else x
        x = _real_only(x.reshape(shape), real)
        pooled = self._pooled(x, segment_ids, num_segments)
        out = self.policy.output_dtype
        logits = None
        if config.pool.num_classes:
            found = x if pooled is None else pooled
            logits = self.head(found.astype(self.policy.compute_dtype)).astype(out)
        return Encoded(x.astype(out), None if pooled is None else pooled.astype(out), logits)

    def _run(self, x: Array, *, mask: Any, batch: int, key: Any) -> Array:
        def step(block: Any, turn: Turn, x: Any, part: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
            return block(x, mask=mask, batch=batch, layer=turn.layer, key=key), part, None, {}

        (stacks, segments), parts, remat = self.config.plan, (None,), remat_of(self.config.remat, x)
        if scans(self.config.scan, remat, x):
            return run_scanned(step, segments, (self.layers,), x, parts, remat=remat)[0]
        return run_unrolled(step, stacks, unstack(self.layers), x, parts, remat=remat)[0]

    def _pooled(self, x: Array, segment_ids: Array | None, num_segments: int | None) -> Array | None:
        if self.config.pool.by == "none":
            return None
        if num_segments is not None and segment_ids is not None:
            return self.pool(x, segment_ids[:, None, :] == jnp.arange(1, num_segments + 1)[None, :, None])
        members = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids != 0
        return self.pool(x, members[:, None])[:, 0]


def _real_only(x: Float[Array, "batch seq embed"], real: Bool[Array, "batch seq"] | None) -> Array:
    return x if real is None else jnp.where(real[..., None], x, 0)
