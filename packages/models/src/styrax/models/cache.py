"""What the layers keep of the tokens seen so far, so that the next one costs a single position."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from styrax.core import UserError
from styrax.models.arch import Attn, Latent
from styrax.models.layers.fence import on_cpu
from styrax.models.layers.mask import Mask

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Shaped

    from styrax.models.config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Keys and values of equal layers. Head-major, because a step reads all slots of one head after another.

    Values are always finite, so that a step need not leave out those of slots that it does not read: of a token with
    a number that is not, the key is NaN, which whoever sees it becomes too, and the value 0.

    Attributes:
        keys: `[layers, batch, kv_heads, slots, head_dim]`, rotated, in the compute dtype.
        values: The same shape.
        ring: Whether there are fewer slots than places, which layers with a window have no need of: what is at
            place $p$ of a row stands in slot $p$ modulo their number, until a later one takes it.
    """

    keys: Float[Array, "layers batch kv_heads slots head_dim"]
    values: Float[Array, "layers batch kv_heads slots head_dim"]
    ring: bool = field(default=False, metadata={"static": True})

    def extend(
        self,
        index: int | Int[Array, ""],
        slots: Int[Array, "batch seq"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
    ) -> tuple[Slots, Float[Array, "batch kv_heads keys head_dim"], Float[Array, "batch kv_heads keys head_dim"]]:
        """Put one layer's new keys and values into their slots, and give all that the new tokens may see.

        Args:
            index: Which of the layers.
            slots: From `KVCache.slots`; what has none, or one past the end, is dropped.
            key: Rotated.
            value: As projected.

        Returns:
            The new cache, and keys and values in the order of `KVCache.mask`.
        """
        key, value = _poisoned(key, value)
        held, into = self.keys.shape[3], slots
        if self.ring:
            # Of tokens that would take the same slot, the last one; a scatter does not say which one wins.
            last = slots.max(axis=1, keepdims=True)
            into = jnp.where((slots >= 0) & (slots > last - held), slots % held, -1)
        at = (index, jnp.arange(slots.shape[0])[:, None], slice(None), into)
        new = replace(self, keys=_put(self.keys, at, key), values=_put(self.values, at, value))
        if not self.ring or slots.shape[1] == 1:
            return new, new.keys[index], new.values[index]
        # The first of several tokens sees what the last one overwrites.
        both = (self.keys[index], key), (self.values[index], value)
        keys, values = (jnp.concatenate([old, now.swapaxes(1, 2)], axis=2) for old, now in both)
        return new, keys, values


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latents:
    """Latents of equal layers of latent attention.

    Latents are always finite, as the values of `Slots` are.

    Attributes:
        latents: `[layers, batch, slots, kv_rank]`, normalised, in the compute dtype.
        shared: `[layers, batch, slots, rope_dim]`, the part of the keys that all heads share, rotated.
    """

    latents: Float[Array, "layers batch slots kv_rank"]
    shared: Float[Array, "layers batch slots rope_dim"]

    def extend(
        self,
        index: int | Int[Array, ""],
        slots: Int[Array, "batch seq"],
        latent: Float[Array, "batch seq kv_rank"],
        shared: Float[Array, "batch seq rope_dim"],
    ) -> tuple[Latents, Float[Array, "batch slots kv_rank"], Float[Array, "batch slots rope_dim"]]:
        """Put one layer's new latents into their slots, and give all of them.

        Args:
            index: Which of the layers.
            slots: From `KVCache.slots`; what has none, or one past the end, is dropped.
            latent: Normalised.
            shared: Rotated.
        """
        shared, latent = _poisoned(shared, latent)
        at = (index, jnp.arange(slots.shape[0])[:, None], slots)
        new = Latents(_put(self.latents, at, latent), _put(self.shared, at, shared))
        return new, new.latents[index], new.shared[index]


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
    """What each layer keeps. Every row has a length of its own; its places are filled from the left.

    Attributes:
        parts: One for each stack of layers, as in the config's `plan`; `None` for layers that use the keys and values
            of others.
        lengths: `[batch]`, how many places are filled.
        capacity: Places per row; as many slots, but in a ring.
    """

    parts: tuple[Slots | Latents | States | None, ...]
    lengths: Int[Array, " batch"]
    capacity: int = field(metadata={"static": True})

    def slots(
        self, tokens: Int[Array, "batch seq"], segment_ids: Int[Array, "batch seq"] | None
    ) -> Int[Array, "batch seq"]:
        """Give each token the next free place of its row, and padding the place -1, which does not exist.

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

    def mask(self, slots: Int[Array, "batch seq"], *, window: int | None = None, chunk: int | None = None) -> Mask:
        """Allow each query the places up to its own, in the order in which `Slots.extend` gives keys.

        Args:
            slots: From `slots`.
            window: Of the layers that it is for, if they have one; they may keep a ring.
            chunk: The same.
        """
        held = slots_for(self.capacity, window or chunk)
        places = jnp.arange(held)[None]
        if held < self.capacity:
            alone = slots.shape[1] == 1  # written before it is read
            last = (self.advance(slots) if alone else self).lengths[:, None] - 1
            places = last - (last - places) % held
            places = places if alone else jnp.concatenate([places, slots], axis=1)
        allowed = (places >= 0)[:, None] & (places[:, None] <= slots[:, :, None])
        # Whatever no query sees is finite, or at least its value is: nothing has to be left out at each step.
        every = jnp.ones((1, places.shape[1]), bool)
        mask = Mask(allowed=allowed, queries=slots >= 0, keys=every)
        return mask.within(slots, places, window=window, chunk=chunk)

    def advance(self, slots: Int[Array, "batch seq"]) -> KVCache:
        """Count the tokens of a call as seen, once all layers have written them.

        Args:
            slots: From `slots`.
        """
        return replace(self, lengths=self.lengths + (slots >= 0).sum(1, dtype=self.lengths.dtype))


def slots_for(capacity: int, most: int | None) -> int:
    """Count the slots of a row of a layer that sees at most so many tokens.

    Args:
        capacity: Places of the row.
        most: A window, or the length of a chunk; `None` for neither.

    Example:
        >>> slots_for(1000, 128), slots_for(100, 128), slots_for(1000, None)
        (128, 100, 1000)
    """
    return capacity if most is None else min(capacity, most)


def _poisoned(key: Float[Array, "..."], value: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Make the key of each token NaN and its value 0, if either holds a number that is not finite."""
    fine = jnp.isfinite(key).all(-1, keepdims=True) & jnp.isfinite(value).all(-1, keepdims=True)
    return jnp.where(fine, key, jnp.nan), jnp.where(fine, value, 0)


def as_bits(cache: KVCache) -> KVCache:
    """Give numbers of 16 bits as the integers that they lie as, if on a CPU; see `as_numbers`.

    XLA:CPU writes integers in place, but widens a whole array of such numbers, and narrows it again, to write a few.
    A loop that hands on integers does neither.

    Args:
        cache: Of numbers.
    """

    def bits(leaf: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return jax.lax.bitcast_convert_type(leaf, "uint16") if _lies_as_bits(leaf) else leaf

    return jax.tree.map(bits, cache)


def as_numbers(cache: KVCache, dtype: Any) -> KVCache:
    """Give what `as_bits` got.

    Args:
        cache: From `as_bits`.
        dtype: What the integers are.
    """

    def numbers(leaf: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return jax.lax.bitcast_convert_type(leaf, dtype) if leaf.dtype == jnp.uint16 else leaf

    return jax.tree.map(numbers, cache)


def _lies_as_bits(leaf: Shaped[Array, "..."]) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2 and on_cpu(leaf)


def _put(into: Shaped[Array, "..."], at: tuple, values: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    kind, values = into.dtype, values.astype(into.dtype)
    if _lies_as_bits(into):
        into, values = (jax.lax.bitcast_convert_type(each, "uint16") for each in (into, values))
    new = into.at[at].set(values, mode="drop", wrap_negative_indices=False)
    return new if new.dtype == kind else jax.lax.bitcast_convert_type(new, kind)


def empty_cache(config: DecoderConfig, batch: int, length: int, dtype: Any) -> KVCache:
    """Make a cache in which nothing is yet.

    Args:
        config: Of the model.
        batch: Rows.
        length: Tokens that a row has room for.
        dtype: Of keys, values and what is like them; the state of a recurrence is in float32.

    Raises:
        UserError: There is no room for anything.
    """
    if batch < 1 or length < 1:
        raise UserError(f"init_cache: expected batch and length of 1 or more, got {batch} and {length}")
    parts = tuple(
        None if each.kind.role == "shared" else _part(config, each.kind.mixer, (len(each.layers), batch), length, dtype)
        for each in config.plan[0]
    )
    return KVCache(parts, jnp.zeros(batch, "int32"), length)


def _part(config: DecoderConfig, mixer: str, rows: tuple[int, int], length: int, dtype: Any) -> Any:
    """The part of a stack of layers; `rows` are layers and rows."""
    part = getattr(config.arch, mixer)
    if isinstance(part, Attn):
        held = slots_for(length, part.window or part.chunk)
        shape = (*rows, config.kv_heads_of(part), held, config.head_width_of(part))
        return Slots(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring=held < length)
    if isinstance(part, Latent):
        shape = (*rows, length)
        return Latents(jnp.zeros((*shape, part.kv_rank), dtype), jnp.zeros((*shape, part.rope_dim), dtype))
    channels = 2 * part.num_k_heads * part.k_dim + part.num_v_heads * part.v_dim
    recent = jnp.zeros((*rows, part.conv - 1, channels), dtype)
    return States(recent, jnp.zeros((*rows, part.num_v_heads, part.k_dim, part.v_dim), "float32"))
