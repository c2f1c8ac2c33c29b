"""The sizes of a decoder that its memory follows from, read from a model's configuration by their names."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from styrax.core import rules_in_force, tree


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What one block makes of a token, and how often; all of one device, so divided by the mesh axes that split it.

    Attributes:
        layers: Blocks.
        embed: Width of the residual stream.
        heads: Width of all queries together, and of what attention gives.
        kv: Width of all keys together, and of all values.
        mlp: Hidden width that a token goes through: of its MLP, or of its experts together.
        vocab: Logits a token.
        block_numbers: Parameters of the largest block, gathered over what splits them for storage alone.
        head_numbers: Of the head (or the embedding, where that is the head), likewise.
        gated: Whether the MLP has a gate.
        remat: "none", "dots" or "block".
        head: Width of a head; 0 where it is not known.
        fenced: The program is for a CPU, where a block keeps more; see `styrax.train.plan.blocks`.
        alone: There is one device.
    """

    layers: int
    embed: int
    heads: float
    kv: float
    mlp: float
    vocab: float
    block_numbers: float
    head_numbers: float
    gated: bool
    remat: str
    head: float = 0.0
    fenced: bool = False
    alone: bool = False


_NEEDED = ("num_layers", "embed_dim", "num_heads", "kv_heads", "head_width", "mlp_width", "remat", "arch")


def widths_of(
    config: Any,
    params: Any,
    vocab_size: int | None,
    mesh: Mapping[str, int],
    platform: str,
    rules: Mapping[str, tuple[str, ...]] | None = None,
) -> Widths | None:
    """Read them; None for a model that is described by other names, of which nothing is guessed.

    Args:
        config: Such as ``styrax.models.DecoderConfig``.
        params: Abstract.
        vocab_size: Logits a token.
        mesh: Mesh axis -> devices along it.
        platform: What it runs on: "auto" recomputes everywhere but on a CPU.
        rules: Logical axis -> mesh axes; None means those in force.
    """
    if vocab_size is None or any(not hasattr(config, name) for name in _NEEDED):
        return None
    rules = rules_in_force() if rules is None else rules

    def ways(name: str, without: Collection[str] = ()) -> int:
        return math.prod(mesh.get(axis, 1) for axis in rules.get(name, ()) if axis not in without)

    # What splits tokens does not split what is made of one; parameters that lie over it are gathered.
    tokens = (*rules.get("batch", ()), *rules.get("seq", ()))
    # Devices along an axis of experts that does not split tokens share what those are in experts.
    experts, sharing = ways("expert"), ways("expert", tokens)
    width, heads, kv, vocab = (ways(name, tokens) for name in ("mlp", "heads", "kv_heads", "vocab"))
    moe = getattr(config.arch, "moe", None)
    mlp = float(config.mlp_width)
    if moe is not None:
        room = moe.capacity_factor if moe.dispatch == "capacity" else 1.0
        chosen = moe.num_experts if moe.dispatch == "dense" else moe.experts_per_token * room
        mlp = chosen * moe.expert_dim / sharing + (moe.shared.dim if moe.shared is not None else 0)
        mlp += config.mlp_width if moe.beside_mlp else 0
    blocks = expert_numbers = head = 0.0
    for path, leaf in tree.flatten(params).items():
        numbers = math.prod(leaf.shape)
        if "layers/" in f"{path}/" and leaf.ndim > 1:
            if "/experts/" in path:
                expert_numbers += numbers / leaf.shape[0]
            else:
                blocks += numbers / leaf.shape[0]
        elif path == ("embed/embedding" if getattr(config, "tied", False) else "head/kernel"):
            head = numbers
    remat = config.remat
    if remat == "auto":
        remat = "none" if platform == "cpu" else "block"
    return Widths(
        layers=config.num_layers,
        embed=config.embed_dim,
        heads=config.num_heads * config.head_width / heads,
        kv=config.kv_heads * config.head_width / kv,
        mlp=mlp / width,
        vocab=vocab_size / vocab,
        block_numbers=blocks / width + expert_numbers / experts / width,
        head_numbers=head / vocab,
        gated=bool(getattr(getattr(config.arch, "mlp", None), "gated", True)),
        remat=remat,
        head=config.head_width,
        fenced=platform == "cpu",
        alone=math.prod(mesh.values()) == 1,
    )


def held(abstract: Any) -> int:
    """Bytes of a tree that one device holds.

    >>> from jax.sharding import SingleDeviceSharding
    >>> where = SingleDeviceSharding(jax.devices()[0])
    >>> held({"w": jax.ShapeDtypeStruct((3, 4), "bfloat16", sharding=where)})
    24
    """
    return sum(_held(leaf) for leaf in jax.tree.leaves(abstract))


def _held(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), leaf.dtype))
        return math.prod(shape) * math.prod(data.shape) * data.dtype.itemsize
    return math.prod(shape) * leaf.dtype.itemsize
