"""Attention by JAX's splash kernel, for TPUs: no table of pairs or scores is ever in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as kernels
from jax.sharding import PartitionSpec

from styrax.models.layers.meshes import mesh_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.attention.call import Call
    from styrax.models.layers.mask import Mask, Pattern

_BLOCK = 128
_LARGEST_BLOCK = 512


def supports(call: Call) -> list[str]:
    """Say what it cannot do of a call.

    Args:
        call: What is asked for.
    """
    problems = call.expects(platform=["tpu"], dtype=["bfloat16", "float32"]) + call.needs_pattern()
    if call.seq != call.keys:
        problems.append(f"keys: expected as many as queries, {call.seq}, got {call.keys}")
    if call.seq % _BLOCK:
        problems.append(f"seq: expected a multiple of {_BLOCK}, got {call.seq}")
    return problems


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_heads seq head_dim"],
    value: Float[Array, "batch kv_heads seq value_dim"],
    mask: Mask,
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attend; see `styrax.models.layers.attend.attend`.

    On a mesh each device computes its part of the batch and of the heads, as far as those divide by the axes that
    the rules in force name for them (`styrax.core.use_rules`); a kernel cannot be split by the compiler.

    Args:
        query: And the others: as there.
        interpret: Run the kernel step by step, as tests on a CPU do.
    """
    pattern = mask.pattern
    assert pattern is not None, "see supports"
    groups = pattern.groups()
    # The kernel has no factor. The product is rounded to the dtype of the queries, as they were.
    query = (query.astype("float32") * scale).astype(query.dtype).swapaxes(1, 2)
    if groups is not None:
        groups = jnp.broadcast_to(groups, (len(query), groups.shape[1]))

    def local(query: Array, key: Array, value: Array, groups: Array | None, sinks: Array | None) -> Array:
        kernel = _kernel(pattern, query.shape[1], query.shape[2], softcap, interpret=interpret)
        # Padding sees padding here, so that no row is empty.
        ids = None if groups is None else kernels.SegmentIds(groups, groups)
        return jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids, sinks))(query, key, value, ids)

    here = mesh_of(query)
    if math.prod(here.free.values()) == 1:
        return local(query, key, value, groups, sinks).swapaxes(1, 2)
    batch, heads = here.split(("batch", "heads"), query.shape[:2])
    ways = here.ways(heads)
    key, value = _repeated(key, query.shape[1], ways), _repeated(value, query.shape[1], ways)
    array, rows = PartitionSpec(batch, heads), PartitionSpec(batch)
    specs = array, array, array, None if groups is None else rows, None if sinks is None else PartitionSpec(heads)
    split = jax.shard_map(
        local, mesh=here.mesh, in_specs=specs, out_specs=array, axis_names=set(here.free), check_vma=False
    )
    return split(query, key, value, groups, sinks).swapaxes(1, 2)


def _kernel(pattern: Pattern, heads: int, seq: int, softcap: float | None, *, interpret: bool) -> Any:
    shape = (seq, seq)
    if pattern.window is not None:
        # It counts the keys before a query, without its own.
        pairs: Any = kernels.LocalMask(shape, (pattern.window - 1, 0 if pattern.causal else None), 0)
    else:
        pairs = kernels.CausalMask(shape) if pattern.causal else kernels.FullMask(shape)
    size = math.gcd(seq, _LARGEST_BLOCK)
    sizes = kernels.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), size)
    )
    return kernels.make_splash_mha(
        kernels.MultiHeadMask([pairs] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _repeated(array: Array, heads: int, ways: int) -> Array:
    """Repeat the heads of keys or values as little as makes them divisible among so many devices."""
    own = array.shape[1]
    times = next(n for n in range(1, heads // own + 1) if heads // own % n == 0 and own * n % ways == 0)
    return array if times == 1 else jnp.repeat(array, times, axis=1)
