"""What the algorithms for matrices share: which leaves they take, batches of equal shapes, where the batches lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from styrax.core.errors import UserError, nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.adamw import adamw
from styrax.optim.elementwise import Common, Leaf, Now
from styrax.optim.guard import FusedTransformation, Verdict
from styrax.optim.specs import ParamSpec, need_axes

if TYPE_CHECKING:
    from jaxtyping import Array


def matrix_paths(leaves: Mapping[str, Any], specs: Mapping[str, ParamSpec], what: str) -> list[str]:
    """Name the parameters whose role is `matrix`.

    Args:
        leaves: Path -> parameter.
        specs: Path -> description; more names than parameters are fine.
        what: The algorithm, for error messages.

    Raises:
        UserError: A parameter has no description, or is a matrix whose axes nobody gave or that lacks inputs or
            outputs; all are listed.
    """
    missing = [path for path in leaves if path not in specs]
    if missing:
        lines = [f"  {path!r}{nearest(path, specs)}" for path in missing]
        raise UserError("\n".join([f"{what}: specs has nothing for:", *lines, "make it by styrax.optim.specs"]))
    found = [path for path in leaves if specs[path].role == "matrix"]
    need_axes(specs, found, what)
    flat = [path for path in found if not specs[path].in_axes or not specs[path].out_axes]
    if flat:
        lines = [f"  {path!r}: axes {specs[path].axes!r}" for path in flat]
        advice = "give axes with both letters, or another role"
        raise UserError("\n".join([f"{what}: matrices need inputs (i) and outputs (o); {advice}:", *lines]))
    return found


def stack_shape(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Give the shape that `spec.to_matrices` makes of a parameter's.

    Example:
        >>> stack_shape(ParamSpec("matrix", "sio", heads=2), (3, 4, 6))
        (6, 4, 3)
    """
    copies = math.prod(shape[axis] for axis in spec.stack_axes)
    return copies * spec.heads, spec.fan_in(shape), spec.fan_out(shape) // spec.heads


def hollow(tree: Any, keep: Collection[str]) -> Any:
    """Replace all leaves but some by `optax.MaskedNode`, which has no leaves.

    Example:
        >>> flatten(hollow({"a": 1, "b": {"c": 2}}, ["b/c"]))
        {'b/c': 2}
    """
    leaves = [leaf if path in keep else optax.MaskedNode() for path, leaf in flatten(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def batched(f: Callable[..., Any], matrices: Mapping[str, Sequence[Any]], *, wide: bool = False) -> dict[str, Any]:
    """Apply a function of stacked matrices to many stacks, all of one shape in one call.

    Args:
        f: Takes as many arrays as a stack has, each `[copies, ...]`; gives one such or a tuple of them.
        matrices: Path -> arrays, each `[copies, ...]`; those of equal shapes make a group.
        wide: Lay matrices with more inputs than outputs on their side, so that they fall into the group of the
            others; for a function of one array with `f(X^T) = f(X)^T`.

    Returns:
        Path -> result.

    Example:
        >>> done = batched(lambda x: 2 * x, {"a": (jnp.ones((3, 2, 4)),), "b": (jnp.ones((1, 4, 2)),)}, wide=True)
        >>> done["a"].shape, done["b"].shape
        ((3, 2, 4), (1, 4, 2))
    """
    turned = {path for path, arrays in matrices.items() if wide and arrays[0].shape[1] > arrays[0].shape[2]}
    groups: dict[Any, dict[str, Sequence[Any]]] = {}
    for path, arrays in matrices.items():
        laid = tuple(jnp.swapaxes(x, 1, 2) for x in arrays) if path in turned else arrays
        groups.setdefault(tuple(x.shape[1:] for x in laid), {})[path] = laid
    done = {}
    for group in groups.values():
        columns = [list(arrays) for arrays in zip(*group.values())]
        result = f(*(jnp.concatenate(xs) if len(xs) > 1 else xs[0] for xs in columns))
        start = 0
        for path, arrays in group.items():
            end = start + arrays[0].shape[0]
            part = jax.tree.map(lambda x, rows=slice(start, end): x[rows], result)
            done[path] = jnp.swapaxes(part, 1, 2) if path in turned else part
            start = end
    return {path: done[path] for path in matrices}


def spread(
    f: Callable[[Array], Array], mesh: Mesh | AbstractMesh | None = None, axes: Collection[str] | None = None
) -> Callable[[Array], Array]:
    """Let the devices of a mesh share the matrices of a batch, each taking whole ones.

    Left to itself, the compiler splits each matrix as its parameter is split and communicates at every product.
    With whole matrices on each device, it moves the batch there and back by an all-to-all each.

    Args:
        f: Takes a batch `[copies, ...]` and gives one, each copy for itself; zeros are added to make the number
            of copies a multiple of the devices.
        mesh: The mesh if `jax.set_mesh` has set none.
        axes: Mesh axes to spread over; `None` for all.

    Returns:
        `f`, constrained if there is a mesh. It raises `UserError` if the mesh has no such axis.
    """

    def on_mesh(x: Array) -> Array:
        context = jax.sharding.get_abstract_mesh()
        used = mesh if context.empty else context
        if used is None:
            return f(x)
        if unknown := [name for name in axes or () if name not in used.axis_names]:
            raise UserError(f"stack_axes: the mesh has no {', '.join(unknown)}; it has {', '.join(used.axis_names)}")
        kinds = zip(used.axis_names, used.axis_types)
        names = tuple(n for n, kind in kinds if kind != AxisType.Manual and (axes is None or n in axes))
        devices = math.prod(used.shape[name] for name in names)
        if devices == 1:
            return f(x)
        copies = x.shape[0]
        if extra := -copies % devices:
            x = jnp.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1))
        whole = NamedSharding(used, PartitionSpec(names))
        x = jax.lax.with_sharding_constraint(_divided(x), whole)
        return _divided(jax.lax.with_sharding_constraint(f(x), whole)[:copies])

    return on_mesh


def _divided(x: Array) -> Array:
    # The compiler carries a constraint over to whatever an array is computed from or used for, and would move the
    # gradient, the momentum and the weights instead of the one array that they make. It does not carry one along an
    # axis that is concatenated.
    return jnp.concatenate([x[:1], x[1:]]) if x.shape[0] > 1 else x


def automatic(f: Callable[..., Any], arrays: tuple[Any, ...], like: Any) -> Any:
    """Call a function with its arrays on automatic axes, where a mesh has explicit ones.

    The types of explicit axes forbid to reshape split axes, as one does to lay parameters out as matrices.

    Args:
        f: Takes `arrays`.
        arrays: Trees of arrays; `f` must close over none.
        like: Arrays that those of the result lie as, a tree like the result.
    """
    where = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    if not any(AxisType.Explicit in s.mesh.axis_types for s in jax.tree.leaves(where) if not s.mesh.empty):
        return f(*arrays)
    on_automatic_axes: Any = jax.sharding.auto_axes(f, out_sharding=where)
    return on_automatic_axes(*arrays)


def on_stacks(
    specs: Mapping[str, ParamSpec],
    f: Callable[..., tuple[Any, ...]],
    now: Now,
    grads: Mapping[str, Any],
    slots: tuple[Mapping[str, Any], ...],
    whole: int,
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """Apply a function of stacked matrices to gradients and state, on any mesh; for the `step` of `matrixwise`.

    Args:
        specs: Path -> axes.
        f: Takes what holds for all and, as stacks, a gradient and its part of every slot that has one; gives the
            direction and the new slots, in the same order.
        now: What holds for all.
        grads: Path -> gradient.
        slots: Path -> array for each slot.
        whole: The first so many slots are shaped like the parameters, the others are stacks already.

    Returns:
        Path -> direction, and the slots with what is new.
    """
    given = tuple({path: slot[path] for path in grads if path in slot} for slot in slots)

    def all_at_once(now: Now, grads: dict[str, Any], slots: tuple[dict[str, Any], ...]) -> Any:
        stacks = {}
        for path in grads:
            laid = [specs[path].to_matrices(tree[path]) for tree in (grads, *slots[:whole])]
            stacks[path] = laid + [slot[path] for slot in slots[whole:] if path in slot]
        directions, new = {}, tuple({} for _ in slots)
        for path, results in batched(lambda *arrays: f(now, *arrays), stacks).items():
            shape = grads[path].shape
            back = [specs[path].from_matrices(x, shape) for x in results[: whole + 1]]
            directions[path] = back[0]
            homes = [home for home, slot in zip(new, slots) if path in slot]
            for home, x in zip(homes, (*back[1:], *results[whole + 1 :]), strict=True):
                home[path] = x
        return directions, new

    directions, new = automatic(all_at_once, (now, dict(grads), given), (dict(grads), given))
    return directions, tuple({**slot, **fresh} for slot, fresh in zip(slots, new))


def side_slots(specs: Mapping[str, ParamSpec], leaves: Mapping[str, Any], limit: int) -> tuple[dict[str, Any], ...]:
    """Make the state of preconditioners with a square matrix for each side that is not too long.

    Returns:
        For the inputs and for the outputs, path -> float32 zeros `[copies, side, side]`; then the same with identities.
    """
    shapes = {path: stack_shape(specs[path], w.shape) for path, w in leaves.items()}
    zeros = [
        {path: jnp.zeros((s[0], s[axis], s[axis]), jnp.float32) for path, s in shapes.items() if s[axis] <= limit}
        for axis in (1, 2)
    ]
    return *zeros, *({path: x + jnp.eye(x.shape[-1]) for path, x in side.items()} for side in zeros)


ADAM = ("learning_rate", "b1", "b2", "eps", "weight_decay")


def matrixwise(
    common: Common,
    state_type: Callable[..., Any],
    specs: Mapping[str, ParamSpec],
    adam: Mapping[str, Any],
    begin: Callable[[dict[str, Any]], tuple[dict[str, Any] | None, ...]],
    step: Callable[[Now, dict[str, Any], tuple[Any, ...]], tuple[dict[str, Any], tuple[Any, ...], Any]],
) -> FusedTransformation:
    """Make a transformation that has its way with the parameters whose role is `matrix` and leaves AdamW the rest.

    Args:
        common: The shared arguments, checked; they hold for both.
        state_type: Takes the count, the learning rate, a tree for each slot and the state of AdamW.
        specs: Path -> role and axes.
        adam: Arguments of AdamW other than those in `common`; `learning_rate` and `weight_decay` in place of those.
        begin: Takes path -> matrix parameter; gives for each slot path -> array, not necessarily for all paths, or
            `None` for a slot that is not used. The first slot has all paths and the shapes of the parameters.
        step: Takes what holds for all parameters, path -> gradient (float32, with the verdict's scale; some may be
            missing) and the slots; gives path -> direction to go against, the new slots (every array selected by
            `Now.keep`), and whether the parameters change in this step (`True` or a traced boolean).

    Raises:
        UserError: AdamW has no such argument, or one is out of range.
    """
    _check_adam(common, adam)
    rest = adamw(
        **{"learning_rate": common.learning_rate, "weight_decay": common.weight_decay, **adam},
        schedule=common.schedule,
        lr_multipliers=common.lr_multipliers,
    )

    def init(params: Any) -> Any:
        leaves = common.leaves(params)
        paths = matrix_paths(leaves, specs, common.name)
        slots = begin({path: leaves[path] for path in paths})
        trees = (None if slot is None else unflatten(hollow(params, slot.keys()), slot) for slot in slots)
        count = jnp.zeros((), jnp.int32)
        others = rest.init(hollow(params, leaves.keys() - set(paths)))
        return state_type(count, common.rate(count), *trees, others)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        trees = state[2:-1]
        grads, weights, *slots = (flatten(tree) for tree in (updates, params, *trees))
        others = {path for path in grads if path not in specs or specs[path].role != "matrix"}
        adam_rate = learning_rate
        if learning_rate is not None and "learning_rate" in adam:
            adam_rate = learning_rate * (adam["learning_rate"] / common.learning_rate)
        steps, adam_state = rest.update(
            hollow(updates, others),
            state[-1],
            None if params is None else hollow(params, weights.keys() - slots[0].keys()),
            learning_rate=adam_rate,
            verdict=verdict,
            **extra,
        )
        steps = flatten(steps)
        grads = {path: g for path, g in grads.items() if path not in others}
        common.check_update(grads, slots[0], weights, needs_params=False)
        now = common.now(state, learning_rate, verdict)
        directions, slots, moves = step(now, {path: now.gradient(g) for path, g in grads.items()}, tuple(slots))
        for path, direction in directions.items():
            change = common.update(now, Leaf(path, grads[path], weights.get(path), ()), direction)
            steps[path] = change if moves is True else jnp.where(moves, change, jnp.float32(-0.0))
        count, rate = common.advance(now, state)
        trees = (None if tree is None else unflatten(tree, slot) for tree, slot in zip(trees, slots, strict=True))
        return unflatten(updates, steps), state_type(count, rate, *trees, adam_state)

    return FusedTransformation(init, update)


def _check_adam(common: Common, adam: Mapping[str, Any]) -> None:
    problems = [f"adam.{key}: expected one of {', '.join(ADAM)}{nearest(key, ADAM)}" for key in adam if key not in ADAM]
    if "learning_rate" in adam and isinstance(common.learning_rate, int | float) and common.learning_rate == 0:
        problems.append("learning_rate: expected more than 0, for adam.learning_rate is kept in proportion to it")
    if problems:
        raise UserError("\n  ".join([f"{common.name}:", *problems]))
