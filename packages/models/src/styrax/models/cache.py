"""What the layers keep of the tokens seen so far, so that the next one costs a single position."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from styrax.core import UserError
from styrax.models.layers.mask import Mask

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Keys and values of equal layers. Head-major, because a step reads all slots of one head after another.

    Attributes:
        keys: `[layers, batch, kv_heads, slots, head_dim]`, rotated, in the compute dtype.
        values: The same shape.
    """

    keys: Float[Array, "layers batch kv_heads slots head_dim"]
    values: Float[Array, "layers batch kv_heads slots head_dim"]

    def write(
        self,
        index: int | Int[Array, ""],
        slots: Int[Array, "batch seq"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
    ) -> Slots:
        """Put one layer's new keys and values into their slots.

        Args:
            index: Which of the layers.
            slots: From `KVCache.slots`; what has none, or one past the end, is dropped.
            key: Rotated.
            value: As projected.
        """
        row = jnp.arange(slots.shape[0])[:, None]
        at = (index, row, slice(None), slots)
        return Slots(_put(self.keys, at, key), _put(self.values, at, value))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latents:
    """Latents of equal layers of latent attention.

    Attributes:
        latents: `[layers, batch, slots, kv_rank]`, normalised, in the compute dtype.
        shared: `[layers, batch, slots, rope_dim]`, the part of the keys that all heads share, rotated.
    """

    latents: Float[Array, "layers batch slots kv_rank"]
    shared: Float[Array, "layers batch slots rope_dim"]

    def write(
        self,
        index: int | Int[Array, ""],
        slots: Int[Array, "batch seq"],
        latent: Float[Array, "batch seq kv_rank"],
        shared: Float[Array, "batch seq rope_dim"],
    ) -> Latents:
        """Put one layer's new latents into their slots.

        Args:
            index: Which of the layers.
            slots: From `KVCache.slots`; what has none, or one past the end, is dropped.
            latent: Normalised.
            shared: Rotated.
        """
        at = (index, jnp.arange(slots.shape[0])[:, None], slots)
        return Latents(_put(self.latents, at, latent), _put(self.shared, at, shared))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class States:
    """States of equal recurrent layers; their size does not depend on the number of tokens.

    Attributes:
        recent: `[layers, batch, conv - 1, channels]`, the last inputs of the convolution.
        memory: `[layers, batch, heads, k_dim, v_dim]`, float32.
    """

    recent: Float[Array, "layers batch before channels"]
    memory: Float[Array, "layers batch heads k_dim v_dim"]

    def write(
        self,
        index: int | Int[Array, ""],
        recent: Float[Array, "batch before channels"],
        memory: Float[Array, "batch heads k_dim v_dim"],
    ) -> States:
        """Put one layer's new state in the place of its old one.

        Args:
            index: Which of the layers.
            recent: The last inputs of the convolution.
            memory: After the last token.
        """
        return States(self.recent.at[index].set(recent), self.memory.at[index].set(memory))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What each layer keeps. Every row has a length of its own; its slots are filled from the left.

    Attributes:
        parts: One for each stack of layers, as in the config's `stacks`.
        lengths: `[batch]`, how many slots are filled.
        capacity: Slots per row.
    """

    parts: tuple[Slots | Latents | States, ...]
    lengths: Int[Array, " batch"]
    capacity: int = field(metadata={"static": True})

    def slots(
        self, tokens: Int[Array, "batch seq"], segment_ids: Int[Array, "batch seq"] | None
    ) -> Int[Array, "batch seq"]:
        """Give each token the next free slot of its row, and padding the slot -1, which does not exist.

        Args:
            tokens: Of this call.
            segment_ids: 0 at padding, anywhere in the row; `None` when there is none.

        Raises:
            UserError: The row count differs, or the tokens cannot fit: there are more than slots, or, outside
                of `jax.jit`, than free slots.
        """
        batch, seq = tokens.shape
        if batch != self.lengths.shape[0]:
            raise UserError(
                f"the cache has {self.lengths.shape[0]} rows, the tokens have {batch}; use init_cache({batch}, ...)"
            )
        real = jnp.ones_like(tokens, bool) if segment_ids is None else segment_ids != 0
        self._check_room(seq, real, padded=segment_ids is not None)
        index = self.lengths[:, None] + jnp.cumsum(real, axis=1) - 1
        return jnp.where(real, index, -1)

    def _check_room(self, seq: int, real: Array, *, padded: bool) -> None:
        known = not isinstance(self.lengths, Tracer) and not isinstance(real, Tracer)
        used = np.asarray(self.lengths) if known else np.zeros(1, int)
        new = np.asarray(real).sum(1) if known else np.asarray(0 if padded else seq)
        if (used + new).max() > self.capacity:
            raise UserError(
                f"the cache has {self.capacity} slots per row, {used.max()} of them filled, and got {new.max()} more "
                "tokens; make it longer with init_cache(batch, length), or drop old tokens and start again"
            )

    def mask(self, slots: Int[Array, "batch seq"]) -> Mask:
        """Allow each query the filled slots up to its own.

        Args:
            slots: From `slots`.
        """
        place = jnp.arange(self.capacity)
        return Mask(
            allowed=place <= slots[:, :, None],
            queries=slots >= 0,
            keys=place < self.advance(slots).lengths[:, None],
        )

    def advance(self, slots: Int[Array, "batch seq"]) -> KVCache:
        """Count the tokens of a call as seen, once all layers have written them.

        Args:
            slots: From `slots`.
        """
        return replace(self, lengths=self.lengths + (slots >= 0).sum(1, dtype=self.lengths.dtype))


def _put(into: Shaped[Array, "..."], at: tuple, values: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return into.at[at].set(values, mode="drop", wrap_negative_indices=False)
