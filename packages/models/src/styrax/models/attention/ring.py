"""Causal attention over a sequence that is split over devices: keys and values go round a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from styrax.core import rules_in_force
from styrax.models.attention.reference import grouped
from styrax.models.layers.meshes import mesh_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.attention.call import Call
    from styrax.models.layers.mask import Mask

Over = tuple[str, ...]
"""The mesh axes that a sequence is split over."""

_LEAST = jnp.finfo("float32").min


class Sums(NamedTuple):
    """What a softmax over some of the keys leaves to go on from.

    Attributes:
        peak: `[batch, kv_heads, group, seq]`, the largest score.
        weight: The same shape, the sum of exponentials of scores below it.
        total: `[batch, kv_heads, group, seq, value_dim]`, values, so weighed.
    """

    peak: Array
    weight: Array
    total: Array


class Half(NamedTuple):
    """Half of what a device holds of a sequence.

    Attributes:
        place: `[seq]`, in the whole row.
        groups: `[batch, seq]`, what may see each other, 0 at padding; `None` if all may.
        arrays: Queries, or keys and values.
    """

    place: Array
    groups: Array | None
    arrays: tuple[Array, ...]


def supports(call: Call) -> list[str]:
    """Say what it cannot do of a call.

    Args:
        call: What is asked for.
    """
    problems = call.expects(causal=[True]) + call.needs_pattern()
    if call.context < 2:
        axes = " or ".join(map(repr, rules_in_force().get("seq", ()))) or "that a rule gives for 'seq'"
        problems.append(f"mesh: expected an axis {axes} of 2 devices or more, got {call.context}")
    elif call.seq % (2 * call.context) or call.seq != call.keys:
        problems.append(f"seq: expected a multiple of {2 * call.context}, and as many keys, got {call.seq}")
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
) -> Float[Array, "batch seq heads value_dim"]:
    r"""Attend; see `styrax.models.layers.attend.attend`.

    Of $2n$ parts of the row, device $i$ of $n$ works on the $i$-th and the $(2n - 1 - i)$-th, so that all have the
    same work in spite of the causal mask. Keys and values then go round, and a device adds to its softmax what it sees
    of each part. No device ever holds all keys. The ring is along the axes that the rules in force name for `seq`
    (`styrax.core.use_rules`), in their order.

    Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Brandon et al., "Striped Attention"
    (2023), for the even load; its parts here are those of Llama 3's training.

    Args:
        query: And the others: as there.
    """
    pattern = mask.pattern
    assert pattern is not None, "see supports"
    here, groups = mesh_of(query), pattern.groups()
    over = here.named("batch", "seq")[1]
    if groups is not None:
        groups = jnp.broadcast_to(groups, (len(query), groups.shape[1]))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": pattern.window}
    options |= {"over": over, "ways": here.ways(over)}

    def local(query: Array, key: Array, value: Array, groups: Array | None, sinks: Array | None) -> Array:
        return _ring(query, key, value, groups, sinks, **options)

    rows, heads = PartitionSpec(None, over), PartitionSpec(None, None, over)
    specs = rows, heads, heads, None if groups is None else rows, None if sinks is None else PartitionSpec()
    run = jax.shard_map(local, mesh=here.mesh, in_specs=specs, out_specs=rows, axis_names=set(over), check_vma=False)
    return run(query, key, value, groups, sinks)


def _ring(
    query: Array,
    key: Array,
    value: Array,
    groups: Array | None,
    sinks: Array | None,
    *,
    over: Over,
    ways: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Array:
    me = jax.lax.axis_index(over)
    part = query.shape[1] // 2
    query = grouped(query, key)
    queries, held = [], []
    for number, arrays in enumerate(
        zip(
            _spread(query, 1, over, ways),
            _spread(key, 2, over, ways),
            _spread(value, 2, over, ways),
            (None, None) if groups is None else _spread(groups, 1, over, ways),
            strict=True,
        )
    ):
        place = (me if number == 0 else 2 * ways - 1 - me) * part + jnp.arange(part)
        queries.append(Half(place, arrays[3], arrays[:1]))
        held.append(Half(place, arrays[3], arrays[1:3]))
    (near, far), options = queries, {"scale": scale, "softcap": softcap, "window": window}

    def add(sums: Sums, query: Half, held: Half) -> Sums:
        return _add(sums, query, held, **options)

    sums = [_nothing(half.arrays[0], value.shape[-1]) for half in queries]
    sums = [add(sums[0], near, held[0]), add(add(sums[1], far, held[0]), far, held[1])]

    @jax.checkpoint
    def step(state: Any, turn: Array) -> tuple[Any, None]:
        (first, second), held = state
        ring = [(source, (source + 1) % ways) for source in range(ways)]
        low, high = jax.tree.map(lambda each: jax.lax.ppermute(each, over, ring), held)
        # The far half sees all of what comes first; of the rest, just one pair of halves is not masked as a whole.
        second = add(second, far, low)
        before = (me - turn) % ways < me
        pick = lambda one, other: jax.tree.map(lambda a, b: jnp.where(before, a, b), one, other)  # noqa: E731
        more = add(pick(first, second), pick(near, far), pick(low, high))
        return ((pick(more, first), pick(second, more)), (low, high)), None

    (sums, _), _ = jax.lax.scan(step, (tuple(sums), tuple(held)), jnp.arange(1, ways))
    out = [_result(each, sinks, query.dtype) for each in sums]
    out = _gathered(out[0], out[1], 1, over, ways)
    return out.reshape(*out.shape[:2], -1, value.shape[-1])


def _nothing(query: Array, value_dim: int) -> Sums:
    batch, seq, heads, group, _ = query.shape
    shape = batch, heads, group, seq
    return Sums(jnp.full(shape, _LEAST), jnp.zeros(shape), jnp.zeros((*shape, value_dim)))


def _add(sums: Sums, query: Half, held: Half, *, scale: float, softcap: float | None, window: int | None) -> Sums:
    (q,), (k, v) = query.arrays, held.arrays
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if q.dtype == jnp.bfloat16 else None
    wide: dict[str, Any] = {"precision": precision, "preferred_element_type": "float32"}
    scores = jnp.einsum("btkgd,bksd->bkgts", q, k, **wide) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = query.place[:, None] - held.place
    allowed = (distance >= 0)[None] if window is None else ((distance >= 0) & (distance < window))[None]
    if query.groups is not None and held.groups is not None:
        same = query.groups[:, :, None] == held.groups[:, None, :]
        allowed = allowed & same & (query.groups != 0)[:, :, None]
    allowed = allowed[:, None, None]
    scores = jnp.where(allowed, scores, _LEAST)
    peak = jnp.maximum(sums.peak, jax.lax.stop_gradient(scores.max(-1)))
    weights = jnp.where(allowed, jnp.exp(scores - peak[..., None]), 0)
    kept = jnp.exp(sums.peak - peak)
    total = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v, **wide)
    return Sums(peak, kept * sums.weight + weights.sum(-1), kept[..., None] * sums.total + total)


def _result(sums: Sums, sinks: Array | None, dtype: Any) -> Array:
    weight, total = sums.weight, sums.total
    if sinks is not None:
        sink = sinks.astype("float32").reshape(1, *weight.shape[1:3], 1)
        peak = jnp.maximum(sums.peak, jax.lax.stop_gradient(sink))
        kept = jnp.exp(sums.peak - peak)
        weight, total = kept * weight + jnp.exp(sink - peak), kept[..., None] * total
    seen = weight > 0
    out = jnp.where(seen[..., None], total, 0) / jnp.where(seen, weight, 1)[..., None]
    return jnp.moveaxis(out, 3, 1).astype(dtype)


def _owners(ways: int, odd: int) -> list[tuple[int, int]]:
    """From which device to which one the even parts go, or the odd ones."""
    return [(i, part if part < ways else 2 * ways - 1 - part) for i in range(ways) for part in (2 * i + odd,)]


def _spread(x: Array, axis: int, over: Over, ways: int) -> tuple[Array, Array]:
    """Exchange halves, so that a device has an early part and a late one."""
    even, odd = (
        jax.lax.ppermute(half, over, _owners(ways, number)) for number, half in enumerate(jnp.split(x, 2, axis))
    )
    first = jax.lax.axis_index(over) % 2 == 0
    return jnp.where(first, even, odd), jnp.where(first, odd, even)


def _gathered(low: Array, high: Array, axis: int, over: Over, ways: int) -> Array:
    """Undo `_spread`."""
    first = jax.lax.axis_index(over) % 2 == 0
    halves = jnp.where(first, low, high), jnp.where(first, high, low)
    back = [
        jax.lax.ppermute(half, over, [(target, source) for source, target in _owners(ways, number)])
        for number, half in enumerate(halves)
    ]
    return jnp.concatenate(back, axis)
