"""What the algorithms for matrices share: which leaves they take, batches of equal shapes, one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from styrax.core.errors import UserError, nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.adamw import adamw
from styrax.optim.elementwise import Common, Leaf, Now
from styrax.optim.guard import FusedTransformation, Verdict
from styrax.optim.specs import ParamSpec, need_axes
from styrax.optim.spreading import automatic, mesh_of, settled
from styrax.optim.together import Together, together


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
    # There is nothing to make of a matrix without elements.
    found = [path for path, leaf in leaves.items() if specs[path].role == "matrix" and 0 not in leaf.shape]
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


def on_stacks(
    specs: Mapping[str, ParamSpec],
    f: Callable[..., tuple[Any, ...]],
    grads: Mapping[str, Any],
    slots: tuple[Mapping[str, Any], ...],
    whole: int,
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """Apply a function of stacked matrices to gradients and state; for the `step` of `matrixwise`.

    Args:
        specs: Path -> axes.
        f: Takes, as stacks, a gradient and its part of every slot that has one; gives the direction and the new slots,
            in the same order.
        grads: Path -> gradient.
        slots: Path -> array for each slot.
        whole: The first so many slots are shaped like the parameters, the others are stacks already.

    Returns:
        Path -> direction, and path -> array for each slot.
    """
    stacks = {}
    for path in grads:
        laid = [specs[path].to_matrices(tree[path]) for tree in (grads, *slots[:whole])]
        stacks[path] = laid + [slot[path] for slot in slots[whole:] if path in slot]
    # On a mesh the devices have whole matrices of each stack, and to append one to another would move both.
    every = [stacks] if mesh_of(jax.tree.leaves(stacks)) is None else [{path: xs} for path, xs in stacks.items()]
    directions, new = {}, tuple({} for _ in slots)
    for path, results in ((path, done) for some in every for path, done in batched(f, some).items()):
        back = [specs[path].from_matrices(x, grads[path].shape) for x in results[: whole + 1]]
        directions[path] = back[0]
        homes = [home for home, slot in zip(new, slots) if path in slot]
        for home, x in zip(homes, (*back[1:], *results[whole + 1 :]), strict=True):
            home[path] = x
    return directions, new


def moments(leaves: Mapping[str, Any], number: int) -> tuple[dict[str, Any], ...]:
    """Make slots of float32 zeros, shaped like the parameters."""
    return tuple({path: jnp.zeros_like(w, jnp.float32) for path, w in leaves.items()} for _ in range(number))


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


def gram_products(g: Any, axes: Collection[int]) -> list[Any]:
    """Give `g g^T` of stacked matrices for axis 1, of the inputs, and `g^T g` for axis 2."""
    return [jnp.einsum("nij,nkj->nik" if axis == 1 else "nji,njk->nik", g, g, precision=EXACT) for axis in axes]


EXACT = jax.lax.Precision.HIGHEST
"""Of products that make statistics, bases and roots: a basis from coarse products is not orthogonal, and small
eigenvalues of coarse products are noise."""

ADAM = ("learning_rate", "b1", "b2", "eps", "weight_decay")

MatrixStep: TypeAlias = Callable[
    [Now, Together, dict[str, Any], tuple[dict[str, Any], ...]], tuple[dict[str, Any], tuple[dict[str, Any], ...], Any]
]
"""The `step` of `matrixwise`."""


def matrixwise(
    common: Common,
    state_type: Any,
    specs: Mapping[str, ParamSpec],
    adam: Mapping[str, Any],
    begin: Callable[[dict[str, Any]], tuple[dict[str, Any] | None, ...]],
    step: MatrixStep,
) -> FusedTransformation:
    """Make a transformation that has its way with the parameters whose role is `matrix` and leaves AdamW the rest.

    Args:
        common: The shared arguments, checked; they hold for both.
        state_type: Named tuple of the count, the learning rate, a tree for each slot and the state of AdamW. Its
            `stacked_fields` name the slots that are `[copies, ...]`; the rest is shaped like the parameters, perhaps
            with axes of 1.
        specs: Path -> role and axes.
        adam: Arguments of AdamW other than those in `common`; `learning_rate` and `weight_decay` in place of those.
        begin: Takes path -> matrix parameter; gives for each slot path -> array, not necessarily for all paths, or
            `None` for a slot that is not used. The first slot has all paths and the shapes of the parameters.
        step: Takes what holds for all parameters, which of them are laid together (their paths and axes), path ->
            gradient (float32, with the verdict's scale) and the slots of these; gives path -> direction to go against,
            the new slots (every array selected by `Now.keep`), and whether the parameters change in this step (`True`
            or a traced boolean). It runs on automatic axes.

    Raises:
        UserError: AdamW has no such argument, or one is out of range.
    """
    _check_adam(common, adam)
    stacked = tuple(name in getattr(state_type, "stacked_fields", ()) for name in state_type._fields[2:-1])
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
        others = {path for path in grads if path not in slots[0]}
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
        weights = {path: weights[path] for path in grads if common.decay(path)}
        given = tuple({path: slot[path] for path in grads if path in slot} for slot in slots)

        def alike(path: str) -> Any:
            held = [tree[path] for tree in (grads, weights, *given) if path in tree]
            numbers = common.decay(path), common.multiplier(path), *(path in slot for slot in given)
            return numbers, *(jax.typeof(x) for x in held)

        mesh = mesh_of((*grads.values(), *slots[0].values()))
        same = together(specs, grads, alike, on_mesh=mesh is not None)

        def go(now: Now, grads: dict[str, Any], weights: dict[str, Any], given: tuple[dict[str, Any], ...]) -> Any:
            laid = {path: now.gradient(g) for path, g in same.lay(grads).items()}
            heavy = same.lay(weights)
            held = tuple(same.lay(slot, stacked=is_stack) for slot, is_stack in zip(given, stacked))
            directions, new, moves = step(now, same, laid, held)
            changes = {}
            for path, direction in directions.items():
                change = common.update(now, Leaf(path, laid[path], heavy.get(path), ()), direction)
                changes[path] = change if moves is True else jnp.where(moves, change, jnp.float32(-0.0))
            parted = (same.part(slot, stacked=is_stack) for slot, is_stack in zip(new, stacked, strict=True))
            return same.part(changes), tuple(parted)

        changes, new = automatic(go, (now, grads, weights, given), (grads, given))
        for slot, fresh, is_stack in zip(slots, new, stacked, strict=True):
            slot.update({path: settled(x, mesh) for path, x in fresh.items()} if is_stack else fresh)
        steps.update(changes)
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
