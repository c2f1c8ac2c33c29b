"""What enters the first block of an encoder: token ids or pictures as vectors, with their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.core import UserError
from styrax.models.encoder_block import INIT_STD
from styrax.models.layers.embed import Embed
from styrax.models.layers.linear import Linear, normal
from styrax.models.layers.mask import document_positions

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models.encoder_config import Image, Text


class TextInput(nnx.Module):
    """The sum of a token's vector, its position's and its type's.

    Attributes:
        tokens: The token embedding.
        positions: One vector for each place in a document.
        types: One vector for each type, if there are types.
    """

    def __init__(self, config: Text, dim: int, *, policy: Policy, key: Key[Array, ""]):
        tokens, positions, types = jax.random.split(key, 3)
        self.tokens = Embed(config.vocab_size, dim, std=INIT_STD, policy=policy, key=tokens)
        self.positions = Embed(config.max_len, dim, std=INIT_STD, policy=policy, key=positions)
        if config.num_types:
            self.types = Embed(config.num_types, dim, std=INIT_STD, policy=policy, key=types)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None,
        segment_ids: Int[Array, "batch seq"] | None,
        token_types: Int[Array, "batch seq"] | None,
    ) -> Float[Array, "batch seq dim"]:
        """Look up and add; see `Encoder`.

        Raises:
            UserError: Shapes or dtypes do not fit, or a row is longer than there are positions; all are listed.
        """
        given = {"positions": positions, "segment_ids": segment_ids, "token_types": token_types}
        problems = _misfits(tokens, given)
        if token_types is not None and not self.config.num_types:
            problems.append("token_types: expected none, for the model has no token types (input.num_types = 0)")
        longest = tokens.shape[-1] if tokens.ndim == 2 else 0
        if positions is None and segment_ids is None and longest > self.config.max_len:
            problems.append(f"tokens: expected at most max_len = {self.config.max_len} a row, got {longest}; cut them")
        if problems:
            raise UserError("\n".join(problems))
        place = document_positions(tokens.shape[1], segment_ids) if positions is None else positions
        x = self.tokens(tokens)
        if self.config.num_types:
            x = x + self.types(jnp.zeros_like(tokens) if token_types is None else token_types)
        return x + self.positions(place)


class ImageInput(nnx.Module):
    r"""The projections of a picture's patches, row by row, behind a class token if there is one; plus positions.

    A patch of $P \times P$ pixels is one row of $C P^2$ values, channel by channel, and so a convolution whose steps
    are as long as its kernel is one matrix product.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), equation 1.

    Attributes:
        patches: `[channels * patch * patch, dim]`.
        class_token: `[dim]`, if the config asks for it.
        positions: One vector for each token.
    """

    def __init__(self, config: Image, dim: int, *, policy: Policy, key: Key[Array, ""]):
        patches, positions, first = jax.random.split(key, 3)
        values = config.channels * config.patch**2
        self.patches = Linear(values, dim, std=INIT_STD, policy=policy, key=patches, bias=config.patch_bias)
        if config.class_token:
            self.class_token = nnx.Param(normal(first, (dim,), INIT_STD, policy))
        self.positions = Embed(config.tokens, dim, std=INIT_STD, policy=policy, key=positions)
        self.config = config
        self.policy = policy

    def __call__(
        self, images: Float[Array, "batch height width channels"], **others: Int[Array, "batch seq"] | None
    ) -> Float[Array, "batch seq dim"]:
        """Cut, project and add; see `Encoder`.

        Raises:
            UserError: The pictures are of another size or dtype, or something is given that only text has.
        """
        config, dtype = self.config, self.policy.compute_dtype
        size = (config.height, config.width, config.channels)
        problems = [f"{name}: expected none beside images" for name, each in others.items() if each is not None]
        if images.ndim != 4 or not images.shape[0] or images.shape[1:] != size:
            problems.append(f"images: expected [batch, {', '.join(map(str, size))}], got {list(images.shape)}")
        if not jnp.issubdtype(images.dtype, jnp.floating):
            problems.append(f"images: expected a floating dtype, got {images.dtype}; scale them as in training")
        if problems:
            raise UserError("\n".join(problems))
        x = self.patches(patch_rows(images, config.patch).astype(dtype))
        if config.class_token:
            first = jnp.broadcast_to(self.class_token[...].astype(dtype), (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([first, x], axis=1)
        return x + self.positions.embedding[...].astype(dtype)


def patch_rows(images: Float[Array, "batch height width channels"], patch: int) -> Float[Array, "batch patches values"]:
    """Cut pictures into patches, row by row, each as the values of its channels one after another.

    Args:
        images: Their sides are multiples of `patch`.
        patch: Side of a patch.

    Example:
        >>> patch_rows(jnp.arange(8).reshape(1, 2, 4, 1), 2).tolist()
        [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    """
    batch, height, width, channels = images.shape
    tiles = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return tiles.transpose(0, 1, 3, 5, 2, 4).reshape(batch, -1, channels * patch * patch)


def _misfits(tokens: Array, others: dict[str, Array | None]) -> list[str]:
    problems = []
    if tokens.ndim != 2 or not tokens.size:
        problems.append(f"tokens: expected [batch, seq], neither of them 0, got {list(tokens.shape)}")
    for name, array in {"tokens": tokens, **others}.items():
        if array is None:
            continue
        if not jnp.issubdtype(array.dtype, jnp.integer):
            problems.append(f"{name}: expected an integer dtype, got {array.dtype}")
        if tokens.ndim == 2 and array.shape != tokens.shape:
            problems.append(f"{name}: expected the shape of tokens, {list(tokens.shape)}, got {list(array.shape)}")
    return problems
