"""Keys and values of the tokens seen so far, so that the next one costs a single position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from styrax.core import UserError
from styrax.models.layers.attention import Mask

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """A fixed number of slots per row, filled from the left; every row has a length of its own.

    Head-major, because a decode step reads all slots of one head after another.

    Attributes:
        keys: `[layers, batch, kv_heads, slots, head_dim]`, rotated, in the compute dtype.
        values: The same shape.
        lengths: `[batch]`, how many slots are filled.
    """

    keys: Float[Array, "layers batch kv_heads slots head_dim"]
    values: Float[Array, "layers batch kv_heads slots head_dim"]
    lengths: Int[Array, " batch"]

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.keys.shape[3]

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

    def write(
        self,
        layer: int | Int[Array, ""],
        slots: Int[Array, "batch seq"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
    ) -> KVCache:
        """Put one layer's new keys and values into their slots; lengths stay as they are.

        Args:
            layer: Which layer.
            slots: From `slots`; what has none, or one past the end, is dropped.
            key: Rotated.
            value: As projected.
        """
        row = jnp.arange(slots.shape[0])[:, None]
        keys = self.keys.at[layer, row, :, slots].set(key, mode="drop", wrap_negative_indices=False)
        values = self.values.at[layer, row, :, slots].set(value, mode="drop", wrap_negative_indices=False)
        return replace(self, keys=keys, values=values)

    def advance(self, slots: Int[Array, "batch seq"]) -> KVCache:
        """Count the tokens of a call as seen, once all layers have written them.

        Args:
            slots: From `slots`.
        """
        return replace(self, lengths=self.lengths + (slots >= 0).sum(1, dtype=self.lengths.dtype))
