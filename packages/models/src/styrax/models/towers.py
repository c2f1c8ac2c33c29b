"""Two encoders, and how alike what they make is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from styrax.models.encoder_pool import normalise

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from styrax.core import Policy
    from styrax.models.towers_config import TowersConfig


class Towers(nnx.Module):
    r"""$z_{ij} = e^t \cos(v_i, w_j) + b$ for the vectors $v$ of pictures and $w$ of texts.

    Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023), algorithm 1.

    Attributes:
        image: The encoder of pictures.
        text: The encoder of texts.
        logit_scale: $t$, `[1]`, initially $\ln 10$.
        logit_bias: $b$, `[1]`, initially -10.
        config: What it was built from.

    Example:
        >>> from styrax.models.encoder_config import EncoderConfig, Image, Pool, Text
        >>> from styrax.models.towers_config import TowersConfig
        >>> sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "pool": Pool(by="mean")}
        >>> image = EncoderConfig(input=Image(height=8, width=8, patch=4), **sizes)
        >>> config = TowersConfig(image=image, text=EncoderConfig(input=Text(vocab_size=9), **sizes))
        >>> config.build(rngs=nnx.Rngs(0))(jnp.zeros((2, 8, 8, 3)), jnp.zeros((3, 4), int)).shape
        (2, 3)
    """

    def __init__(self, config: TowersConfig, *, rngs: nnx.Rngs, policy: Policy):
        self.image = config.image.build(rngs=rngs, policy=policy)
        self.text = config.text.build(rngs=rngs, policy=policy)
        self.logit_scale = nnx.Param(jnp.full(1, math.log(10), policy.param_dtype))
        self.logit_bias = nnx.Param(jnp.full(1, -10, policy.param_dtype))
        self.config = config

    def __call__(
        self,
        images: Float[Array, "images height width channels"],
        tokens: Int[Array, "texts seq"],
        *,
        segment_ids: Int[Array, "texts seq"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "images texts"]:
        """Compare every picture with every text.

        Args:
            images: Channels last, scaled as the model was trained.
            tokens: Token ids.
            segment_ids: 1 at tokens, 0 at padding; `None` lets padding take part, as models of this kind are trained.
            rngs: Turns dropout on.

        Returns:
            Logits in float32: the sigmoid of one is how likely the two belong together.
        """
        seen = self.image(images, rngs=rngs).pooled
        read = self.text(tokens, segment_ids=segment_ids, rngs=rngs).pooled
        assert seen is not None  # the config refused towers that do not pool
        assert read is not None
        seen, read = normalise(seen.astype("float32")), normalise(read.astype("float32"))
        scale, bias = (each[...].astype("float32") for each in (self.logit_scale, self.logit_bias))
        return jnp.exp(scale) * jnp.einsum("id,td->it", seen, read, precision="highest") + bias
