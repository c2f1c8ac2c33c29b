"""Stacks of equal blocks: parameters `[layers, ...]`, run by a scan or unrolled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from styrax.models.layers.fence import on_cpu
from styrax.models.layers.meshes import mesh_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int, Key

    from styrax.models.layout import Segment, Stack

Block = TypeVar("Block")


class Turn(NamedTuple):
    """What one layer gets beside its block, the carry and the part of its stack.

    Attributes:
        layer: Its number in the model.
        place: Its number in its stack.
        own: Its row of what all layers together were given.
        lent: What layers before it lent to those after them, by name.
    """

    layer: int | Int[Array, ""]
    place: int | Int[Array, ""]
    own: Any
    lent: Mapping[str, Any]


Step = Callable[[Any, Turn, Any, Any], "tuple[Any, Any, Any, Mapping[str, Any]]"]


def stack(make: Callable[[Key[Array, ""]], Block], num_layers: int, key: Key[Array, ""]) -> Block:
    """Make blocks with independent keys, as one block whose arrays have a leading axis.

    Args:
        make: Makes a block, a pytree, from a key.
        num_layers: Length of the leading axis.
        key: Split into one per block.
    """
    return jax.vmap(make)(jax.random.split(key, num_layers))


def unstack(blocks: Block) -> tuple[Block, ...]:
    """Cut a stack into its blocks.

    One split per array, so that the gradient is one concatenation; that of `array[i]` would be a sum of
    as many arrays of full size as there are layers.

    Args:
        blocks: From `stack`.

    Example:
        >>> [block["w"].tolist() for block in unstack({"w": jnp.array([[1, 2], [3, 4]])})]
        [[1, 2], [3, 4]]
    """
    leaves, treedef = jax.tree.flatten(blocks)
    slices = [[each.reshape(each.shape[1:]) for each in jax.lax.split(leaf, (1,) * len(leaf))] for leaf in leaves]
    return tuple(treedef.unflatten(block) for block in zip(*slices, strict=True))


def in_order(stacks: Sequence[Stack], blocks: Sequence[Any]) -> tuple[Any, ...]:
    """Cut stacks into blocks, and put those in the order of the layers.

    Args:
        stacks: Which layers each holds.
        blocks: One stacked block for each.

    Example:
        >>> from styrax.models.layout import Kind, Stack
        >>> kind = Kind("attn", False)
        >>> in_order([Stack(kind, (0, 2)), Stack(kind, (1,))], [jnp.array([0, 2]), jnp.array([1])])
        (Array(0, dtype=int32), Array(1, dtype=int32), Array(2, dtype=int32))
    """
    placed = {}
    for each, block in zip(stacks, blocks, strict=True):
        placed |= dict(zip(each.layers, unstack(block), strict=True))
    return tuple(placed[layer] for layer in sorted(placed))


def run_unrolled(
    step: Step,
    stacks: Sequence[Stack],
    blocks: Sequence[Any],
    carry: Any,
    parts: Sequence[Any],
    *,
    remat: Any = None,
    rows: Any = None,
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Run single blocks one after another; see `run_scanned`.

    Args:
        step: As there.
        stacks: Say which stack each layer belongs to, and so which part is its.
        blocks: One for each layer.
        carry: As there.
        parts: As there.
        remat: As there.
        rows: As there.
    """
    step = recomputed(step, remat, prevent_cse=True)
    parts, reports, lent = list(parts), {}, {}
    owner = {layer: (number, index) for number, each in enumerate(stacks) for index, layer in enumerate(each.layers)}
    own = unstack(rows) if jax.tree.leaves(rows) else (rows,) * len(blocks)
    for layer, block in enumerate(blocks):
        number, index = owner[layer]
        turn = Turn(layer, index, own[layer], lent)
        carry, parts[number], reports[layer], made = step(block, turn, carry, parts[number])
        lent = {**lent, **made}
    merged = [
        jax.tree.map(lambda *each: jnp.stack(each), *(reports[layer] for layer in kept.layers)) for kept in stacks
    ]
    return carry, tuple(parts), tuple(merged)


def run_scanned(
    step: Step,
    segments: Sequence[Segment],
    blocks: Sequence[Any],
    carry: Any,
    parts: Sequence[Any],
    *,
    remat: Any = None,
    rows: Any = None,
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    r"""Compute $c_{i+1}, p_{s(i)}, r_i, l_i = \mathrm{step}(b_i, t_i, c_i, p_{s(i)})$ for all layers $i$.

    $t_i$ is layer $i$'s `Turn`, $s(i)$ its stack. Each segment is one `jax.lax.scan` over its repeats.

    What is lent is no part of the carry, of which a scan keeps one copy per layer for the backward pass: within a
    segment it is constant, so layers see only what was lent before their segment.

    Args:
        step: Takes a block, its turn, the carry and its stack's part. The last that it gives is $l$, what it lends
            to layers of later segments, by name; most lend nothing, `{}`.
        segments: The runs of layers, in order.
        blocks: One stacked block for each stack.
        carry: $c_0$, a pytree.
        parts: $p$, one pytree for each stack, handed on from layer to layer of the stack.
        remat: Whether each step is recomputed in the backward pass instead of keeping what it computed: `False`,
            `True`, or a policy of `jax.checkpoint_policies` that says what is kept.
        rows: A pytree of arrays `[all layers, ...]`; each layer gets its row, `Turn.own`.

    Returns:
        The last carry, the parts, and for each stack its reports $r$, stacked.

    Example:
        >>> from styrax.models.layout import Kind, plan
        >>> double = lambda block, turn, carry, part: (carry * block["w"] + turn.layer, part, carry, {})
        >>> stacks, segments = plan((Kind("attn", False),) * 2)
        >>> blocks = [{"w": jnp.array([2.0, 3.0])}]
        >>> carry, _, reports = run_scanned(double, segments, blocks, jnp.array(1.0), [None])
        >>> float(carry), reports[0].tolist()
        (7.0, [1.0, 2.0])
        >>> float(run_unrolled(double, stacks, unstack(blocks[0]), jnp.array(1.0), [None], remat=True)[0])
        7.0
    """
    # In a scan nothing outside can be shared with the recomputation, so no barrier is needed against it.
    step = recomputed(step, remat, prevent_cse=False)
    parts, reports, lent = list(parts), [None] * len(parts), {}
    for segment, own in zip(segments, _cut(rows, segments), strict=True):

        def body(state: Any, each: Any, segment: Segment = segment, lent: dict[str, Any] = lent) -> tuple[Any, Any]:
            carry, held = state
            cycle, repeat, own = each
            held, found, made = list(held), [], {}
            for place, block in enumerate(cycle):
                layer = segment.first + repeat * len(cycle) + place
                turn = Turn(layer, repeat, jax.tree.map(lambda row, place=place: row[place], own), lent)
                carry, held[place], report, new = step(block, turn, carry, held[place])
                found.append(report)
                made |= new
            return (carry, tuple(held)), (tuple(found), made)

        state = carry, tuple(parts[number] for number in segment.stacks)
        over = tuple(blocks[number] for number in segment.stacks), jnp.arange(segment.repeats), own
        (carry, held), (found, made) = jax.lax.scan(body, state, over)
        lent = {**lent, **jax.tree.map(lambda each: each[-1], made)}
        for number, part, report in zip(segment.stacks, held, found, strict=True):
            parts[number], reports[number] = part, report
    return carry, tuple(parts), tuple(reports)


def _cut(rows: Any, segments: Sequence[Segment]) -> list[Any]:
    """Give each segment its rows, `[repeats, cycle, ...]`; by one split, as in `unstack`."""
    leaves, treedef = jax.tree.flatten(rows)
    sizes = [len(segment.stacks) * segment.repeats for segment in segments]
    cut = [
        [
            each.reshape(segment.repeats, len(segment.stacks), *leaf.shape[1:])
            for each, segment in zip(jax.lax.split(leaf, sizes), segments, strict=True)
        ]
        for leaf in leaves
    ]
    return [treedef.unflatten([each[number] for each in cut]) for number in range(len(segments))]


def scans(scan: str, remat: Any, *arrays: Array) -> bool:
    """Tell whether layers are looped over: "on", "off", or "auto", which unrolls them on a CPU.

    Unless they are recomputed there: the compiler for CPUs would do that long before the backward pass needs it, and
    keep it until then, so that nothing is saved. On several simulated devices they are unrolled all the same, as there
    exchanges in a loop and beside it may wait for each other.

    Args:
        scan: Of the config.
        remat: From `remat_of`; `False` if nothing is differentiated.
        arrays: Of the model, whose mesh may say what it runs on; see `styrax.models.layers.fence.platform`.
    """
    if scan != "auto" or not on_cpu(*arrays):
        return scan != "off"
    return remat is not None and remat is not False and all(math.prod(mesh_of(x).free.values()) == 1 for x in arrays)


def remat_of(remat: str, *arrays: Array) -> Any:
    """Give what `run_scanned` and `run_unrolled` take for a config's "none", "block", "dots" or "auto".

    Args:
        remat: Of the config.
        arrays: As for `scans`.
    """
    match remat:
        case "auto":  # on a CPU, time runs out before memory does, and recomputing takes a fifth of a step
            return not on_cpu(*arrays)
        case "dots":
            return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        case name:
            return name == "block"


def recomputed(step: Callable[..., Any], remat: Any, *, prevent_cse: bool) -> Callable[..., Any]:
    """Make a function recompute in the backward pass what it computed, if `remat` says so.

    Args:
        step: A block.
        remat: From `remat_of`.
        prevent_cse: Whether the compiler could undo it; not within a scan.
    """
    if remat is None or remat is False:
        return step
    return jax.checkpoint(step, prevent_cse=prevent_cse, policy=None if remat is True else remat)
