"""Experts on many devices: every device sends its tokens to the devices of their experts, and gets answers back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from styrax.core.placing import dividing
from styrax.models.layers import dispatch
from styrax.models.layers.fence import platform
from styrax.models.layers.meshes import Here, mesh_of

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int

    from styrax.models.moe_config import MoE

Compute = Callable[[Any, "Array", "dispatch.Layout"], "Array"]
Over = tuple[str, ...]
"""The mesh axes that experts are split over."""


def routed(
    parts: Any,
    compute: Compute,
    x: Float[Array, "batch seq dim"],
    experts: Int[Array, "batch seq k"],
    weights: Float[Array, "batch seq k"],
    config: MoE,
) -> tuple[Float[Array, "batch seq dim"], Float[Array, ""]]:
    """Send each token to its experts and add up what they answer, on whatever mesh this is traced for.

    Every device sorts its own tokens, so that nothing but the exchange crosses devices. Experts are split over the mesh
    axes that the rules in force name for them (`styrax.core.use_rules`), and so are tokens; two exchanges of all with
    all along these axes bring copies to experts and answers back. Where neither batch nor sequence is split over an
    axis of experts, each of its devices takes a share of the rows, or of the tokens of each row, if they divide.
    "dropless" has room for all tokens of all devices on these axes at one of them; TPUs and GPUs send only what there
    is. With "capacity" each device gives every expert the same number of places.

    Source: Lepikhin et al., "GShard" (2020), section 3.1.

    Args:
        parts: The experts' parameters, a pytree whose leaves all have a leading axis of experts.
        compute: `compute(parts, rows, layout)`: what the experts that are in `parts` answer to rows laid out so.
        x: In the compute dtype.
        experts: The experts of each token, `num_experts` at padding.
        weights: Of its experts, float32.
        config: Of the layer.

    Returns:
        The sums, float32, and how many choices found no place, `[]` float32.
    """
    here = mesh_of(x)
    batch, seq, over = _split(here, x.shape[:2], config.num_experts)
    ways, split = here.ways(over), batch + seq

    def local(parts: Any, x: Array, experts: Array, weights: Array) -> tuple[Array, Array]:
        copies = jnp.broadcast_to(x[..., None, :], (*experts.shape, x.shape[-1]))
        copies = weigh(copies, weights, x.dtype) if config.input_scaled else copies
        run = functools.partial(_exchanged, over, ways) if over else _alone
        flat, choices = copies.reshape(-1, x.shape[-1]), experts.reshape(-1)
        answers, dropped = run(parts, compute, flat, choices, config)
        answers = answers.reshape(copies.shape)
        answers = answers if config.input_scaled else weigh(answers, weights, "float32")
        return answers.astype("float32").sum(-2), jax.lax.psum(dropped, split) if split else dropped

    if not split:
        return local(parts, x, experts, weights)

    rows, held = PartitionSpec(batch or None, seq or None), PartitionSpec(over or None)
    run = jax.shard_map(
        local,
        mesh=here.mesh,
        in_specs=(held, rows, rows, rows),
        out_specs=(rows, PartitionSpec()),
        axis_names=set(split),
        check_vma=False,
    )
    return run(parts, x, experts, weights)


def _split(here: Here, shape: tuple[int, ...], num_experts: int) -> tuple[Over, Over, Over]:
    """Name the axes that split rows, the tokens of each row, and experts; the last are among the others."""
    batch, seq = here.split(("batch", "seq"), shape)
    wanted = here.axes("expert", num_experts)
    batch += dividing(shape[0] // here.ways(batch), [axis for axis in wanted if axis not in batch + seq], here.mesh)
    seq += dividing(shape[1] // here.ways(seq), [axis for axis in wanted if axis not in batch + seq], here.mesh)
    return batch, seq, tuple(axis for axis in wanted if axis in batch + seq)


def weigh(x: Float[Array, "... dim"], weights: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "... dim"]:
    """Multiply in float32, and cast.

    Args:
        x: Rows.
        weights: One for each.
        dtype: Of the result.
    """
    return (x.astype("float32") * weights[..., None]).astype(dtype)


def _alone(parts: Any, compute: Compute, flat: Array, choices: Array, config: MoE) -> tuple[Array, Array]:
    if config.dispatch == "capacity":
        layout = dispatch.capacity(choices, config.num_experts, places(config, len(choices)))
    else:
        layout = dispatch.dropless(choices, config.num_experts, on=flat)
    answers = compute(parts, dispatch.move(flat, layout.choice, layout.row), layout)
    return dispatch.move(answers, layout.row, layout.choice), layout.dropped


def places(config: MoE, choices: int) -> int:
    """Give the places that each expert has for so many choices.

    Args:
        config: Of the layer.
        choices: Of all tokens.
    """
    even = config.capacity_factor * choices / config.num_experts
    return min(max(1, int(even)), choices // config.experts_per_token)


def _exchanged(
    over: Over, ways: int, parts: Any, compute: Compute, flat: Array, choices: Array, config: MoE
) -> tuple[Array, Array]:
    own = config.num_experts // ways
    if config.dispatch == "capacity":
        room = places(config, len(choices))
        layout = dispatch.capacity(choices, config.num_experts, room)
        sent = dispatch.move(flat, layout.choice, layout.row)
        # [ways, own, room, dim] by source after the exchange; an expert's rows are to stand together.
        grid = _all_to_all(sent, over).reshape(ways, own, room, -1).swapaxes(0, 1)
        kept = layout._replace(expert=jnp.repeat(jnp.arange(own), ways * room))
        answers = compute(parts, grid.reshape(own * ways * room, -1), kept)
        back = _all_to_all(answers.reshape(own, ways, room, -1).swapaxes(0, 1).reshape(ways * own * room, -1), over)
        return dispatch.move(back, layout.row, layout.choice), layout.dropped
    # Sorted by expert, a device's rows for one other device stand together, and there is a place for every one.
    home = jnp.where(choices < config.num_experts, choices // own, ways)
    whose = choices - jnp.minimum(home, ways - 1) * own
    layout = dispatch.capacity(home, ways, len(choices))
    sent = dispatch.move(flat, layout.choice, layout.row)
    label = whose.at[layout.choice].get(mode="fill", fill_value=own)
    counts = jnp.zeros(ways, "int32").at[home].add(1, mode="drop")
    arrived, labels = _send(sent, counts, over), _send(label[:, None], counts, over, empty=own)[:, 0]
    inner = dispatch.dropless(labels, own, on=arrived)
    answers = compute(parts, dispatch.move(arrived, inner.choice, inner.row), inner)
    answers = dispatch.move(answers, inner.row, inner.choice)
    back = _send(answers, _all_to_all(counts, over), over)
    return dispatch.move(back, layout.row, layout.choice), layout.dropped


def _all_to_all(x: Array, over: Over) -> Array:
    return jax.lax.all_to_all(x, over, split_axis=0, concat_axis=0, tiled=True)


def _send(x: Array, counts: Int[Array, " ways"], over: Over, *, empty: float = 0) -> Array:
    """Exchange equal blocks of rows, of which only the first few count; on a CPU the whole blocks."""
    if platform(x) == "cpu":
        return _all_to_all(x, over)
    block = len(x) // len(counts)
    starts = jnp.arange(len(counts), dtype="int32") * block
    mine = jnp.full(len(counts), jax.lax.axis_index(over) * block, "int32")
    target = jnp.full_like(x, empty)
    return jax.lax.ragged_all_to_all(x, target, starts, counts, mine, _all_to_all(counts, over), axis_name=over)
