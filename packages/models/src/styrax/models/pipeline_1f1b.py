r"""One forward, one backward: a pipeline that holds as many microbatches as it has stages, however many there are.

Of $S$ stages and $M$ microbatches, stage $s$ sends microbatch $t - s$ forward at tick $t$, and goes back through
microbatch $t - 2(S - 1) + s$. So it holds what entered it for at most $2(S - 1 - s) + 1$ of them; one ring of $2S - 1$
serves all stages. Activations go to the next stage, their cotangents to the one before it, at every tick.

The backward pass of a pipeline begins after the loss, which is outside of it. So the forward pass runs first, as that
of GPipe, and keeps nothing but the batch that was given to it. Everything above happens in the backward pass, which
sends the microbatches forward once more. With $F$ the time of one forward through a stage and $2F$ that of going back:

- Time. The forward pass takes $(M + S - 1) F$. The backward pass has $S - 1$ ticks that only go forward, $M$ that do
  both, and $S - 1$ that only go back; each going back computes the stage once more: $(M + S - 1)(F + F + 2F)$. That is
  $5F$ a tick, where GPipe takes $3F$ without recomputation; each takes one $F$ more if blocks are recomputed. All have
  the same bubble, $(S - 1) / (M + S - 1)$.
- Memory, with $a$ the bytes of one microbatch between two layers and $L$ the layers of a stage: $(2S - 1) a$, the
  activations of one microbatch in one stage, and the batch, its cotangent and that of the result, each $M a / S$
  where rows divide over stages ($M a$ where they do not). GPipe keeps $(M + S - 1) L a$ when blocks are recomputed,
  and all activations of $M + S - 1$ microbatches when not.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), section 3; the same, "Efficient
Large-Scale Language Model Training" (2021), section 2.2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from styrax.models.layers.fence import on_cpu

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from styrax.models.pipeline import Schedule

Layers = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def run(
    layers: Layers,
    parts: Any,
    x: Float[Array, "batch seq embed"],
    given: Any,
    *,
    plan: Schedule,
    mesh: Any,
    over: tuple[str, ...],
    ways: int,
) -> tuple[Float[Array, "batch seq embed"], Any]:
    """Send a batch through layers that are split over stages; its gradient is computed as the file says.

    Args:
        layers: Takes the layers of a stage, what came with one microbatch, the number of the stage, and the
            microbatch; gives the microbatch and a pytree of reports, `[layers of a stage, ...]`.
        parts: Pytree of the layers, `[1, stages, layers of a stage, ...]`.
        x: The residual stream.
        given: Pytree of what else comes with each row, `[microbatches, rows, ...]`.
        plan: Stages and microbatches.
        mesh: With the axes `over`.
        over: Those whose devices are the stages.
        ways: Parts that other axes split the rows into; 0 if rows do not divide over stages too.

    Returns:
        The residual stream after all layers, and the reports, `[1, stages, layers of a stage, microbatches, ...]`.
    """
    floats, others, join = _parted((parts, given))
    rows = Rows(plan.microbatches, plan.stages, over, ways, x.shape)

    def mapped(local: Any, ins: Sequence[PartitionSpec], outs: Any) -> Any:
        specs = {"in_specs": (*ins, PartitionSpec(over)), "out_specs": outs}
        run = jax.shard_map(local, mesh=mesh, axis_names=set(over), check_vma=False, **specs)
        return lambda *each: run(*each, jnp.arange(plan.stages))

    split, same = PartitionSpec(None, over), PartitionSpec()

    def forward(floats: Any, x: Array, others: Any) -> tuple[Array, Any]:
        parts, given = join(floats, others)
        local = mapped(_forward(layers, plan, rows), (split, rows.spec, same), (rows.spec, split))
        out, found = local(parts, rows.cut(x), given)
        return rows.joined(out), found

    def keep(floats: Any, x: Array, others: Any) -> tuple[Any, Any]:
        return forward(floats, x, others), (floats, x, others)

    def backward(kept: Any, cotangents: tuple[Array, Any]) -> tuple[Any, Array, None]:
        floats, x, others = kept
        parts, given = join(floats, others)
        asked = [leaf for leaf in jax.tree.leaves(cotangents[1]) if leaf.dtype != jax.dtypes.float0]
        ins = (split, rows.spec, same, rows.spec, split)
        local = mapped(_backward(layers, plan, rows), ins, (split, same, rows.spec))
        of_parts, of_given, of_x = local(parts, rows.cut(x), given, rows.cut(cotangents[0]), asked)
        return of_parts + of_given, rows.joined(of_x), None

    pipeline = jax.custom_vjp(forward)
    pipeline.defvjp(keep, backward)
    return pipeline(floats, x, others)


def sum_dtype(x: Float[Array, "..."]) -> Any:
    """Tell in which dtype to add up over devices: XLA:CPU ends the process at anything smaller than float32.

    Args:
        x: To be added up.
    """
    return jnp.promote_types(x.dtype, "float32") if on_cpu(x) else x.dtype


class Rows(NamedTuple):
    """How a batch lies: each stage holds its share of the rows of every microbatch, if they divide.

    One microbatch at a time is brought together where it is needed. Parts of other axes come before those of stages,
    as in a batch that is split over both, so that nothing moves at the border.

    Attributes:
        microbatches: Parts of a batch.
        stages: How many.
        over: Their mesh axes.
        ways: Parts of other axes; 0 where rows do not divide, and every stage has them all.
        shape: Of the batch.
    """

    microbatches: int
    stages: int
    over: tuple[str, ...]
    ways: int
    shape: tuple[int, ...]

    @property
    def spec(self) -> PartitionSpec:
        """Where what `cut` gives lies."""
        return PartitionSpec(None, None, self.over) if self.ways else PartitionSpec()

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of a microbatch."""
        return (self.shape[0] // self.microbatches, *self.shape[1:])

    @property
    def apart(self) -> tuple[int, ...]:
        """The same, as parts."""
        each = self.one[0] // (self.ways * self.stages) if self.ways else 0
        return (self.ways, self.stages, each, *self.shape[1:]) if self.ways else self.one

    def cut(self, x: Array) -> Array:
        """Make `[microbatches, *apart]` of `[batch, ...]`."""
        place = len(self.apart) - len(self.shape) + 1
        return jnp.moveaxis(x.reshape(*self.apart[:place], self.microbatches, *self.shape[1:]), place, 0)

    def joined(self, x: Array) -> Array:
        """Undo `cut`."""
        return jnp.moveaxis(x, 0, len(self.apart) - len(self.shape) + 1).reshape(self.shape)

    def read(self, x: Array, number: Array, wait: Callable[[Array], Array] = lambda one: one) -> Array:
        """Bring one microbatch together on all stages; they have to agree on its number."""
        one = wait(x[jnp.clip(number, 0, self.microbatches - 1)])
        return jax.lax.all_gather(one, self.over, axis=1, tiled=True).reshape(self.one) if self.ways else one

    def spread(self, x: Array, is_mine: Array) -> Array:
        """Give every stage its share of the microbatch of one stage."""
        x = jnp.where(is_mine, x, 0)
        if not self.ways:
            return self.total(x)
        added = x.reshape(self.apart).astype(sum_dtype(x))
        return jax.lax.psum_scatter(added, self.over, scatter_dimension=1, tiled=True).astype(x.dtype)

    def total(self, x: Array) -> Array:
        """Add up what stages have."""
        return jax.lax.psum(x.astype(sum_dtype(x)), self.over).astype(x.dtype)


def _forward(layers: Layers, plan: Schedule, rows: Rows) -> Callable[..., Any]:
    stages, count = plan.stages, plan.microbatches
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]

    def local(parts: Any, x: Array, given: Any, stage: Array) -> tuple[Array, Any]:
        held, stage = jax.tree.map(lambda leaf: leaf[0, 0], parts), stage[0]

        def tick(arrived: Array, time: Array) -> tuple[Array, Any]:
            entered = jnp.where(stage == 0, rows.read(x, time), arrived)
            out, found = layers(held, _at(given, jnp.clip(time - stage, 0, count - 1)), stage, entered)
            sent = jax.lax.ppermute(out, rows.over, ring)
            return sent, (rows.spread(_after(out, sent, stage), stage == stages - 1), found)

        _, (out, found) = jax.lax.scan(tick, jnp.zeros(rows.one, x.dtype), jnp.arange(count + stages - 1))
        found = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, stage, count), found)
        return out[stages - 1 :], jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1)[None, None], found)

    return local


def _backward(layers: Layers, plan: Schedule, rows: Rows) -> Callable[..., Any]:
    stages, count = plan.stages, plan.microbatches
    onward = [(stage, (stage + 1) % stages) for stage in range(stages)]
    returning = [(there, here) for here, there in onward]
    slots = 2 * stages - 1

    def local(parts: Any, x: Array, given: Any, dy: Array, asked: Any, stage: Array) -> tuple[Any, Any, Array]:
        held, stage = jax.tree.map(lambda leaf: leaf[0, 0], parts), stage[0]
        asked = [leaf[0, 0] for leaf in asked]
        floats, others, join = _parted(held)
        loose, tight, tie = _parted(given)

        def ahead(arrived: Array, entered: Array, time: Array) -> tuple[Array, Array]:
            """Send a microbatch forward, and note what entered."""
            one = jnp.where(stage == 0, rows.read(x, time), arrived)
            number = jnp.clip(time - stage, 0, count - 1)
            out, _ = layers(held, _at(given, number), stage, one)
            return jax.lax.ppermute(out, rows.over, onward), entered.at[time % slots].set(one)

        def back(came: Array, entered: Array, sums: Any, time: Array, done: Array) -> tuple[Array, Any, Array]:
            """Go back through a microbatch; what it adds to the gradients of layers, and what leaves for before."""
            wait = 2 * (stages - 1 - stage)  # ticks since it went forward here
            number = time - wait - stage
            real = (number >= 0) & (number < count)
            number = jnp.clip(number, 0, count - 1)

            def again(ins: tuple[Any, Any, Array]) -> tuple[Array, list[Array]]:
                out, found = layers(join(ins[0], others), tie(ins[1], _at(tight, number)), stage, ins[2])
                return out, _parted(found)[0]

            last = rows.read(dy, time - (stages - 1), lambda one: _after(one, done, stage))
            _, pull = jax.vjp(again, (floats, _at(loose, number), _after(entered[(time - wait) % slots], last, stage)))
            cotangent = jnp.where(stage == stages - 1, last, came)
            ((of_held, of_given, of_one),) = pull((cotangent, [leaf[:, number] for leaf in asked]))
            # Chosen, not multiplied: of what is no microbatch, a gradient may be anything.
            held_sum = [total + jnp.where(real, new, 0) for total, new in zip(sums[0], of_held, strict=True)]
            given_sum = [
                total.at[number].add(jnp.where(real, new, 0)) for total, new in zip(sums[1], of_given, strict=True)
            ]
            sent = jax.lax.ppermute(of_one, rows.over, returning)
            return sent, (held_sum, given_sum), rows.spread(_after(of_one, sent, stage), stage == 0)

        def fill(state: Any, time: Array) -> tuple[Any, None]:
            arrived, entered = state
            return ahead(arrived, entered, time), None

        def both(state: Any, time: Array) -> tuple[Any, Array]:
            arrived, came, entered, sums = state
            arrived, entered = ahead(arrived, entered, time)
            came, sums, of_x = back(came, entered, sums, time, arrived)
            return (arrived, came, entered, sums), of_x

        def drain(state: Any, time: Array) -> tuple[Any, Array]:
            came, entered, sums = state
            came, sums, of_x = back(came, entered, sums, time, came)
            return (came, entered, sums), of_x

        nothing = jnp.zeros(rows.one, x.dtype)
        times = jnp.arange(count + 2 * (stages - 1))
        start = nothing, jnp.zeros((slots, *rows.one), x.dtype)
        (arrived, entered), _ = jax.lax.scan(fill, start, times[: stages - 1])
        start = arrived, nothing, entered, jax.tree.map(jnp.zeros_like, (floats, loose))
        (_, came, entered, sums), early = jax.lax.scan(both, start, times[stages - 1 : count + stages - 1])
        (_, _, sums), late = jax.lax.scan(drain, (came, entered, sums), times[count + stages - 1 :])
        of_x = jnp.concatenate([early, late])[stages - 1 :]
        return [leaf[None, None] for leaf in sums[0]], [rows.total(leaf) for leaf in sums[1]], of_x

    return local


def _after(x: Array, first: Array, stage: Array) -> Array:
    """Let what is made of `x` wait for `first`, on CPUs.

    XLA:CPU runs exchanges that do not depend on each other in any order, and another one on each device, which then
    wait for each other for ever. So they are made to depend on each other, in a way that it cannot see through.
    """
    return jnp.where(stage < 0, first.reshape(-1)[0].astype(x.dtype), x) if on_cpu(x) else x


def _at(tree: Any, number: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], tree)


def _parted(tree: Any) -> tuple[list[Array], list[Array], Callable[[Any, Any], Any]]:
    """Take a pytree apart into what has a gradient and what has none; and say how to put it together."""
    leaves, treedef = jax.tree.flatten(tree)
    real = np.array([jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves], bool)

    def join(floats: Sequence[Any], others: Sequence[Any]) -> Any:
        ones, rest = iter(floats), iter(others)
        return treedef.unflatten([next(ones) if each else next(rest) for each in real])

    floats = [leaf for leaf, each in zip(leaves, real, strict=True) if each]
    return floats, [leaf for leaf, each in zip(leaves, real, strict=True) if not each], join
