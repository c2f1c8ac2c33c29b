"""What a model costs, from its config alone: parameters, memory, arithmetic; nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from styrax.core import Policy, tree
from styrax.models.arch import Attn, Delta, Latent

if TYPE_CHECKING:
    from styrax.models.config import DecoderConfig
    from styrax.models.layout import Kind


@dataclass(frozen=True)
class Cost:
    """Sizes and arithmetic of a decoder.

    Attributes:
        parameters: Numbers in all parameters.
        active: Numbers that one token meets in matrix products, the head included, the embedding not.
        bytes: Of all parameters.
        cache_bytes_per_token: What one more token of one row takes in the cache, in layers that keep all.
        cache_bytes_near: The same, of the layers that keep only the last ones: (most tokens kept, bytes of each).
        cache_bytes_per_row: What a row takes there whatever its length: states of recurrent layers.
        attention_flops_per_pair: Of one query and one key that it sees, over all layers without a window or chunk.
        window_flops_per_pair: The same, of the layers with one: (most keys that a query sees, flops).
        recurrence_flops: Of one token in all recurrences.
        further: Of what only training uses, to predict tokens beyond the next one; `parameters` and `bytes` of the
            whole include it, and the others do not. None means that there is nothing.
    """

    parameters: int
    active: int
    bytes: int
    cache_bytes_per_token: int
    cache_bytes_near: tuple[tuple[int, int], ...]
    cache_bytes_per_row: int
    attention_flops_per_pair: int
    window_flops_per_pair: tuple[tuple[int, int], ...]
    recurrence_flops: int
    further: Cost | None = None

    def forward_flops(self, length: int) -> float:
        r"""Count the arithmetic of a forward pass, per token: $2 N + \mathrm{pairs}$.

        A product of matrices costs two operations for each pair of numbers. Of attention, only pairs of tokens that
        see one another count, on average $(T + 1) / 2$ keys per query. Norms, activations and softmaxes are left out.

        Args:
            length: $T$, tokens per document.

        Example:
            >>> from styrax.models import DecoderConfig
            >>> cost = cost_of(DecoderConfig(num_layers=1, embed_dim=64, num_heads=1, mlp_dim=64), vocab_size=100)
            >>> cost.active, cost.forward_flops(1)
            (35072, 70400.0)
        """
        pairs = self.attention_flops_per_pair * (length + 1) / 2
        for most, flops in self.window_flops_per_pair:
            pairs += flops * _keys(length, most)
        return 2 * self.active + pairs + self.recurrence_flops

    def train_flops(self, length: int) -> float:
        """Count the arithmetic of a training step, per token: the backward pass costs twice the forward pass.

        Args:
            length: Tokens per document.
        """
        return 3 * (self.forward_flops(length) + (self.further.forward_flops(length) if self.further else 0))

    def cache_bytes(self, batch: int, length: int) -> int:
        """Give the size of a cache.

        Args:
            batch: Rows.
            length: Places per row.
        """
        near = sum(min(length, most) * size for most, size in self.cache_bytes_near)
        return batch * (length * self.cache_bytes_per_token + near + self.cache_bytes_per_row)


def cost_of(config: DecoderConfig, *, vocab_size: int, policy: Policy | None = None) -> Cost:
    """Work out what a decoder costs.

    Args:
        config: Of the model.
        vocab_size: Rows of the embedding.
        policy: Dtypes; none means float32 for all.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> cost_of(DecoderConfig(num_layers=2, embed_dim=64, num_heads=2), vocab_size=100).parameters
        113216
    """
    policy = policy or Policy()
    shapes = tree.flatten(abstract(config, vocab_size=vocab_size, policy=policy))
    size = policy.compute_dtype.itemsize
    head, parts = config.arch.head, {True: {}, False: {}}
    for path, leaf in shapes.items():
        parts[path.startswith("mtp/")][path] = leaf
    further = None
    if head.mtp:
        further = _cost(config, (config.kinds[-1],) * head.mtp, parts[True], size)
        further = replace(further, active=further.active + head.mtp * config.embed_dim * vocab_size)
    found = _cost(config, config.kinds, parts[False], size)
    tied = config.embed_dim * vocab_size if config.tied else 0
    every = {
        "parameters": found.parameters + (further.parameters if further else 0),
        "bytes": found.bytes + (further.bytes if further else 0),
    }
    return replace(found, active=found.active + tied, further=further, **every)


def _cost(config: DecoderConfig, kinds: Sequence[Kind], shapes: Mapping[str, Any], size: int) -> Cost:
    """Work out what layers of these kinds cost, with these parameters."""
    per_token = per_row = full = recurrence = 0
    near: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    for kind in kinds:
        part = getattr(config.arch, kind.mixer)
        if isinstance(part, Attn):
            width, heads = config.head_width_of(part), config.num_heads
            held = 0 if kind.role == "shared" else 2 * config.kv_heads_of(part) * width * size
            flops, most = 4 * heads * width, part.window or part.chunk
            if most is None:
                per_token += held
                full += flops
            else:
                near.append((most, flops))
                kept += [(most, held)] if held else []
        elif isinstance(part, Latent):
            per_token += (part.kv_rank + part.rope_dim) * size
            full += 2 * config.num_heads * (part.nope_dim + part.rope_dim + part.v_dim)
        elif isinstance(part, Delta):
            state = part.num_v_heads * part.k_dim * part.v_dim
            channels = 2 * part.num_k_heads * part.k_dim + part.num_v_heads * part.v_dim
            per_row += 4 * state + (part.conv - 1) * channels * size
            recurrence += 6 * state + 2 * part.conv * channels
    return Cost(
        parameters=sum(math.prod(leaf.shape) for leaf in shapes.values()),
        active=_active(config, shapes),
        bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes.values()),
        cache_bytes_per_token=per_token,
        cache_bytes_near=tuple(kept),
        cache_bytes_per_row=per_row,
        attention_flops_per_pair=full,
        window_flops_per_pair=tuple(near),
        recurrence_flops=recurrence,
    )


def abstract(config: DecoderConfig, *, vocab_size: int, policy: Policy) -> Any:
    """Make a model of shapes and dtypes only.

    Args:
        config: Of the model.
        vocab_size: Rows of the embedding.
        policy: Dtypes.
    """
    from flax import nnx

    return nnx.eval_shape(lambda: config.build(vocab_size=vocab_size, rngs=nnx.Rngs(0), policy=policy))


def _active(config: DecoderConfig, shapes: Mapping[str, Any]) -> int:
    moe, total = config.arch.moe, 0
    for path, leaf in shapes.items():
        numbers = math.prod(leaf.shape)
        if not path.endswith("kernel"):
            continue
        if "/experts/" in path and moe is not None:
            numbers = numbers * moe.experts_per_token // moe.num_experts
        total += numbers
    return total


def _keys(length: int, most: int) -> float:
    """Give the keys that a query sees on average, if it sees at most so many."""
    if length <= most:
        return (length + 1) / 2
    return (most * (most + 1) / 2 + (length - most) * most) / length
