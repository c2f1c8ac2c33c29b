"""What every optimizer that goes over the arrays one by one has in common: rate, decay, verdict and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from styrax.core.config import Fraction, NonNegativeFloat, PositiveFloat, mistakes
from styrax.core.errors import UserError, nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.guard import FusedTransformation, Verdict, check_floating
from styrax.optim.specs import ParamSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Schedule: TypeAlias = Callable[[Any], Any]
ByPath: TypeAlias = float | Mapping[str, float]


class Now(NamedTuple):
    """One update, as a rule sees it.

    Attributes:
        count: Updates applied before this one.
        t: The number of this update, counting from 1, as float32.
        rate: Learning rate of this update.
        verdict: What the guard says; `None` without one.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    t: Float[Array, ""]
    rate: Float[Array, ""]
    verdict: Verdict | None

    def keep(self, new: Any, old: Any) -> Any:
        """Take the new value if the step is applied, the old one's bits if it is skipped."""
        return new if self.verdict is None else jnp.where(self.verdict.apply, new, old)

    def gradient(self, g: Any) -> Float[Array, " ..."]:
        """Give a gradient in float32, with the verdict's scale."""
        g = jnp.asarray(g).astype(jnp.float32)
        return g if self.verdict is None else g * self.verdict.scale


class Leaf(NamedTuple):
    """One parameter, as a rule sees it.

    Attributes:
        path: Its path.
        g: Its gradient, float32, scaled by the verdict.
        w: Its value as given, or `None` if `params` was not given. Use `weight` for float32.
        slots: Its part of the state, one array for each slot.
    """

    path: str
    g: Float[Array, " ..."]
    w: Any
    slots: tuple[Any, ...]

    @property
    def weight(self) -> Float[Array, " ..."]:
        """Its value in float32."""
        return jnp.asarray(self.w).astype(jnp.float32)


Step: TypeAlias = Callable[[Leaf], tuple[Any, tuple[Any, ...]]]
"""A leaf to the direction to go against and the new slots; the caller multiplies by the rate and adds the decay."""


@dataclass(frozen=True)
class Common:
    """The arguments that all algorithms share, and what is done with them.

    Attributes:
        name: Of the algorithm, for error messages.
        learning_rate: Peak.
        schedule: Multiple of the peak as a function of the updates applied so far; `None` is always 1.
        weight_decay: Decay of every parameter, or one by path.
        lr_multipliers: Multiplier on the rate of every parameter, or one by path.
        eps: Added to the root of every second moment, or one number by path; for algorithms that have one.
    """

    name: str
    learning_rate: Any
    schedule: Schedule | None
    weight_decay: ByPath
    lr_multipliers: ByPath
    eps: ByPath = 1.0

    def check(self, *others: str, **limits: tuple[Any, Any]) -> None:
        """Refuse constants that are out of range; `BELOW_ONE` as an annotation is `[0, 1)`.

        Args:
            others: What else is wrong; empty lines are dropped.
            limits: Name -> annotation and value, as for `styrax.core.config.mistakes`.

        Raises:
            UserError: Lists every wrong one.
        """
        below = {name: value for name, (limit, value) in limits.items() if limit is BELOW_ONE}
        limits = {name: (Fraction if name in below else limit, value) for name, (limit, value) in limits.items()}
        if not isinstance(self.learning_rate, jax.Array):  # an array may be a traced one, whose value is not known
            limits["learning_rate"] = (NonNegativeFloat, self.learning_rate)
        for name, limit in (
            ("weight_decay", NonNegativeFloat),
            ("lr_multipliers", NonNegativeFloat),
            ("eps", ABOVE_ZERO),
        ):
            given = getattr(self, name)
            limits.setdefault(name, (dict[str, limit] if isinstance(given, Mapping) else limit, given))
        problems = mistakes(limits) + [f"{name} must be below 1, got {b}" for name, b in below.items() if b == 1]
        problems += [line for line in others if line]
        if problems:
            raise UserError("\n  ".join([f"{self.name}:", *problems]))

    def rate(self, count: Any, peak: Any = None) -> Float[Array, ""]:
        """Give the learning rate after so many applied updates, with another peak if one is given."""
        if isinstance(peak, Mapping):
            raise UserError("learning_rate: expected a number, got a table; rates by group are for groups(...)")
        rate = jnp.asarray(self.learning_rate if peak is None else peak, jnp.float32)
        return rate if self.schedule is None else rate * jnp.asarray(self.schedule(count), jnp.float32)

    def decay(self, path: str) -> float:
        """Give a parameter's weight decay."""
        return _at(self.weight_decay, path)

    def multiplier(self, path: str) -> float:
        """Give a parameter's multiplier on the learning rate."""
        return _at(self.lr_multipliers, path)

    def epsilon(self, path: str) -> float:
        """Give what is added to the root of a parameter's second moment."""
        return _at(self.eps, path)

    def leaves(self, params: Any) -> dict[str, Any]:
        """Flatten the parameters for `init`.

        Raises:
            ValueError: Some are not real floating arrays, or a mapping by path lacks some; all are listed.
        """
        leaves = flatten(params)
        check_floating(leaves, "parameter")
        # More names than parameters are fine: `optax.masked` hides some of those that a recipe was built for.
        lines = [
            f"  {name} has nothing for {path!r}{nearest(path, value)}"
            for name in ("weight_decay", "lr_multipliers", "eps")
            for value in (getattr(self, name),)
            if isinstance(value, Mapping)
            for path in leaves
            if path not in value
        ]
        if lines:
            raise ValueError("\n".join([f"{self.name}: the numbers by path do not fit the parameters:", *lines]))
        return leaves

    def check_update(
        self,
        grads: Mapping[str, Any],
        slot: Mapping[str, Any],
        weights: Mapping[str, Any],
        *,
        needs_params: bool,
        reduced: bool = False,
    ) -> None:
        """Hold the gradient to the state.

        Args:
            grads: Path -> gradient.
            slot: Path -> an array of the state with the shape of the parameter.
            weights: Path -> parameter.
            needs_params: Whether the algorithm cannot do without the parameters even where there is no decay.
            reduced: Whether axes of `slot` may have become 1.

        Raises:
            ValueError: Lists every gradient without a state, with another shape, or without a parameter to decay.
        """
        lines = []
        for path, g in grads.items():
            if path not in slot:
                lines.append(f"  {path!r} has a gradient but no state{nearest(path, slot)}")
            elif not _fits(jnp.shape(g), jnp.shape(slot[path]), reduced):
                lines.append(f"  {path!r}: gradient {jnp.shape(g)}, state {jnp.shape(slot[path])}")
            elif path not in weights and (needs_params or self.decay(path)):
                why = "needs its parameter" if needs_params else "has weight decay"
                lines.append(f"  {path!r} {why}, but `params` was not given or lacks it")
        if lines:
            raise ValueError("\n".join([f"{self.name}: the gradient does not fit the state:", *lines]))

    def now(self, state: Any, learning_rate: Any, verdict: Verdict | None) -> Now:
        """Say which update this is; `state` has a `count`."""
        rate = self.rate(state.count, learning_rate)
        return Now(state.count, (state.count + 1).astype(jnp.float32), rate, verdict)

    def update(self, now: Now, leaf: Leaf, direction: Any) -> Any:
        """Make the update of one parameter: `-k eta (direction + d w)`."""
        if decay := self.decay(leaf.path):
            direction = direction + decay * leaf.weight
        # Adding a negative zero changes no bit of any weight; adding a positive one turns -0 into 0.
        return now.keep(-(self.multiplier(leaf.path) * now.rate) * direction, jnp.float32(-0.0))

    def advance(self, now: Now, state: Any) -> tuple[Any, Any]:
        """Give the count and the learning rate that the state has after this update."""
        return now.keep(optax.safe_increment(state.count), state.count), now.keep(now.rate, state.learning_rate)


def elementwise(
    common: Common,
    state_type: Callable[..., Any],
    slots: int,
    rule: Callable[[Now], Step],
    *,
    make: Callable[[str, Any], tuple[Any, ...]] | None = None,
    needs_params: bool = False,
    reduced: bool = False,
) -> FusedTransformation:
    """Make a transformation that treats every parameter alike and alone.

        update = -k eta ( direction + d w ),   where the rule gives the direction

    Args:
        common: The shared arguments, checked.
        state_type: Takes the count, the learning rate and as many trees as there are slots.
        slots: Number of slots.
        rule: Called once in an update with what holds for all parameters; gives what is called for each. A rule
            selects first (`now.keep`) and computes the direction from the result: a direction from the values before
            the select would keep the old moments alive past their replacement, and XLA would copy them.
        make: A parameter's slots at the beginning, the first of its shape; by default float32 zeros of its shape.
        needs_params: Whether the rule reads the weights.
        reduced: Whether axes of the first slot may have become 1.

    Returns:
        A transformation whose state has the same structure, shapes and dtypes at all times.
    """

    def zeros(path: str, w: Any) -> tuple[Any, ...]:
        return tuple(jnp.zeros_like(w, jnp.float32) for _ in range(slots))

    def init(params: Any) -> Any:
        leaves = common.leaves(params)
        count = jnp.zeros((), jnp.int32)
        made = {path: (make or zeros)(path, w) for path, w in leaves.items()}
        trees = (unflatten(params, {path: made[path][i] for path in made}) for i in range(slots))
        return state_type(count, common.rate(count), *trees)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del extra
        trees = state[2 : 2 + slots]
        grads, weights, *held = (flatten(tree) for tree in (updates, params, *trees))
        common.check_update(grads, held[0], weights, needs_params=needs_params, reduced=reduced)
        now = common.now(state, learning_rate, verdict)
        step = rule(now)
        steps = {}
        for path, g in grads.items():
            leaf = Leaf(path, now.gradient(g), weights.get(path), tuple(slot[path] for slot in held))
            direction, new = step(leaf)
            for slot, value in zip(held, new, strict=True):
                slot[path] = value
            steps[path] = common.update(now, leaf, direction)
        count, rate = common.advance(now, state)
        trees = (unflatten(tree, slot) for tree, slot in zip(trees, held))
        return unflatten(updates, steps), state_type(count, rate, *trees)

    return FusedTransformation(init, update)


def debias(b: float, t: Float[Array, ""]) -> Float[Array, ""]:
    """Give `1 / (1 - b^t)` without the cancellation in float32, which at `b = 0.999` costs three digits.

    Example:
        >>> round(float(debias(0.9, jnp.float32(1.0))), 4)
        10.0
    """
    return jnp.ones((), jnp.float32) if b == 0 else -1.0 / jnp.expm1(t * math.log(b))


def layer_axes(specs: Mapping[str, ParamSpec] | None, path: str, ndim: int) -> tuple[int, ...]:
    """Give the axes of one layer's tensor: all but the stacked ones, of which there are none without `specs`."""
    stacked = specs[path].stack_axes if specs else ()
    return tuple(axis for axis in range(ndim) if axis not in stacked)


BELOW_ONE: Any = "[0, 1)"
"""Annotation for `Common.check`: a decay of an average."""

ABOVE_ZERO: Any = PositiveFloat
"""Annotation for `Common.check`: such as `eps`."""


def as_it_lies(new: Array, old: Array) -> Array:
    """Give a new part of the state the sharding of the old one, where shardings are a part of the type.

    On a mesh with explicit axes a sum over an axis, or a product with a sharded array, has a sharding of its own, and a
    state that changes it cannot be carried through `jax.lax.scan`. Elsewhere this does nothing.
    """
    where = jax.typeof(old).sharding
    if not _explicit(where) or jax.typeof(new).sharding == where:
        return new
    return jax.sharding.reshard(new, where)


def gathered(x: Array) -> Array:
    """Give an array whole on every device of a mesh with explicit axes, for a reshape that its sharding forbids."""
    where = jax.typeof(x).sharding
    return jax.sharding.reshard(x, NamedSharding(where.mesh, PartitionSpec())) if _explicit(where) else x


def shared_out(f: Callable[..., Any], place: Callable[[PartitionSpec], Any], x: Array, *rest: Array) -> Any:
    """Call `f(x, *rest)` and let the compiler find the shardings inside, also on a mesh with explicit axes.

    Args:
        f: Reshapes and gathers that explicit axes forbid or want spelled out.
        place: From the spec of `x`, as long as it has axes, to those of what `f` returns.
        x: Its mesh is what counts.
        rest: More arguments.
    """
    where = jax.typeof(x).sharding
    if not _explicit(where):
        return f(x, *rest)
    spec = PartitionSpec(*where.spec, *(None,) * (x.ndim - len(where.spec)))
    out = jax.tree.map(
        lambda s: NamedSharding(where.mesh, s), place(spec), is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
    return jax.sharding.auto_axes(f, out_sharding=out)(x, *rest)


def _explicit(where: Any) -> bool:
    mesh = getattr(where, "mesh", None)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def _fits(shape: tuple[int, ...], slot: tuple[int, ...], reduced: bool) -> bool:
    if not reduced:
        return shape == slot
    return len(shape) == len(slot) and all(n in (1, m) for m, n in zip(shape, slot))


def _at(value: ByPath, path: str) -> float:
    return value[path] if isinstance(value, Mapping) else value
