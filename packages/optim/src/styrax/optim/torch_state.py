"""Go on in JAX where a run with `torch.optim.AdamW` stopped: its moments and its count, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from styrax.core.errors import UserError, nearest
from styrax.core.tree import flatten, unflatten
from styrax.optim.adamw import AdamWState

Change: TypeAlias = bool | Sequence[int] | Callable[[np.ndarray], np.ndarray] | None


class Place(NamedTuple):
    """Where a parameter of torch is in ours.

    Attributes:
        path: Our path.
        change: What to do with the array: `True` reverses the axes (torch keeps the kernel of a linear layer as
            `[out, in]`), integers are the axes in their new order, a function takes the array and gives another; it is
            called for both moments, so it may move elements but not compute with them. `None` or `False` is nothing.
        index: Position along the first axis of ours, where layers are stacked and each is a parameter in torch.
    """

    path: str
    change: Change = None
    index: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]


def from_torch_adamw(
    state_dict: Mapping[str, Any],
    key_map: Mapping[str, str | tuple[Any, ...] | None],
    opt_state: Any,
    *,
    names: Iterable[str] | None = None,
) -> Any:
    """Fill the state of `adamw` with that of `torch.optim.AdamW`.

        mu = exp_avg,   nu = exp_avg_sq,   count = step

    The updates go on as torch's would with the same `b1`, `b2`, `eps`, weight decay and learning rate, which are no
    part of our state: they stand in `state_dict["param_groups"]` and go to `adamw(...)`. Both add `eps` after the root
    and both multiply the decay by the learning rate.

    Args:
        state_dict: Of the optimizer, as `torch.load` gives it: `{"state": {index: {"exp_avg", "exp_avg_sq", "step"}},
            "param_groups": [{"params": [index, ...], ...}, ...]}`. The arrays may be tensors on any device, numpy
            arrays or anything with `__array__`; torch is not imported.
        key_map: Name in torch -> our path, or `(path, change)` or `(path, change, index)`, see `Place`; `None` for one
            that we do not have.
        opt_state: State that `init` made for the parameters: an `AdamWState`, or one that holds some (`guard`,
            `groups`, `precision`). All else stays as it is. Leaves may be `jax.ShapeDtypeStruct`s with a sharding.
        names: Names of torch's parameters in the order in which the optimizer has them: `named_parameters()`, or group
            by group if there are several. Not needed if the optimizer was made from names and so knows them
            (`param_names` in `param_groups`, since torch 2.6).

    Returns:
        A state like `opt_state`, every filled array with the sharding of the one in its place.

    Raises:
        UserError: Names that are too many or too few or missing in `key_map`, parameters that the state lacks or has
            not, shapes that do not fit, unequal steps, an `amsgrad` or `maximize` run; all in one message, by path.

    Source: `torch/optim/adamw.py`; Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.

    Example:
        >>> import jax.numpy as jnp
        >>> from styrax.optim import adamw
        >>> state = adamw(1e-3).init({"dense": {"kernel": jnp.zeros((2, 3))}})
        >>> slot = {"exp_avg": np.full((3, 2), 0.5), "exp_avg_sq": np.ones((3, 2)), "step": 10}
        >>> theirs = {"state": {0: slot}, "param_groups": [{"params": [0]}]}
        >>> state = from_torch_adamw(theirs, {"fc.weight": ("dense/kernel", True)}, state, names=["fc.weight"])
        >>> int(state.count), state.mu["dense"]["kernel"].shape
        (10, (2, 3))
    """
    problems: list[str] = []
    slots = _by_name(state_dict, names, problems)
    parts = [part for part in jax.tree.leaves(opt_state, is_leaf=_is_part) if _is_part(part)]
    if not parts:
        raise UserError(
            f"from_torch_adamw: no AdamWState in {type(opt_state).__name__}; give it the state of adamw(...)"
        )
    shapes = {path: tuple(leaf.shape) for part in parts for path, leaf in flatten(part.mu).items()}
    places = _places(key_map, shapes, problems)
    problems += [
        f"{name!r} of torch is not in key_map{nearest(name, key_map)}; map it to a path, or to None to leave it out"
        for name in slots
        if name not in key_map
    ]
    found: dict[str, dict[int | None, tuple[str, dict[str, Any]]]] = {}
    for name, place in places.items():
        if name not in slots:
            problems.append(f"{place.path!r}: torch has no state for {name!r}{nearest(name, slots)}")
        elif arrays := _arrays(name, place, slots[name], shapes[place.path], problems):
            found.setdefault(place.path, {})[place.index] = (name, arrays)
    counts = [_count(flatten(part.mu), found, problems) for part in parts]
    if problems:
        raise UserError("\n  ".join(["from_torch_adamw:", *problems]))
    filled = iter([_fill(part, count, found) for part, count in zip(parts, counts)])
    return jax.tree.map(lambda node: next(filled) if _is_part(node) else node, opt_state, is_leaf=_is_part)


def _is_part(node: Any) -> bool:
    return isinstance(node, AdamWState)


def _by_name(state_dict: Mapping[str, Any], names: Iterable[str] | None, problems: list[str]) -> dict[str, Any]:
    """Give each name the state that torch has for it; one without is left out."""
    lacks = [key for key in ("state", "param_groups") if key not in state_dict]
    if lacks:
        raise UserError(
            f"from_torch_adamw: no {' and no '.join(map(repr, lacks))} in the state_dict, which has "
            f"{', '.join(map(repr, list(state_dict)[:5]))}; give it `optimizer.state_dict()`"
        )
    groups = state_dict["param_groups"]
    for number, group in enumerate(groups):
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                problems.append(f"group {number} has {flag}=True, which adamw has not")
    if names is None:
        if not all("param_names" in group for group in groups):
            raise UserError("from_torch_adamw: the state_dict has no names; give `names`, in the optimizer's order")
        names = [name for group in groups for name in group["param_names"]]
    names, indices = list(names), [index for group in groups for index in group["params"]]
    if len(names) != len(indices):
        raise UserError(
            f"from_torch_adamw: {len(names)} names, but the state_dict has {len(indices)} parameters; give those "
            "of the parameters that the optimizer was given, in its order"
        )
    return {name: state_dict["state"][index] for name, index in zip(names, indices) if index in state_dict["state"]}


def _places(key_map: Mapping[str, Any], shapes: Mapping[str, Any], problems: list[str]) -> dict[str, Place]:
    """Read the map, and hold it to the paths that there are."""
    places: dict[str, Place] = {}
    taken: dict[str, dict[int | None, str]] = {path: {} for path in shapes}
    for name, given in key_map.items():
        if given is None:
            continue
        if not isinstance(given, str) and not (isinstance(given, tuple) and 1 <= len(given) <= 3):
            problems.append(f"{name!r}: expected a path, (path, change) or (path, change, index), got {given!r}")
            continue
        place = Place(given) if isinstance(given, str) else Place(*given)
        if place.path not in shapes:
            problems.append(f"{place.path!r}: adamw has no state for it (for {name!r}){nearest(place.path, shapes)}")
            continue
        there = taken[place.path]
        other = there.get(place.index) or there.get(None) or (place.index is None and next(iter(there.values()), None))
        if other:
            problems.append(f"{place.path!r}: {other!r} and {name!r} cannot both go there")
        else:
            there[place.index], places[name] = name, place
    for path, there in taken.items():
        if not there:
            problems.append(f"{path!r}: missing, key_map has no name for it")
        elif None not in there and (lacking := set(range(shapes[path][0] if shapes[path] else 0)) - set(there)):
            problems.append(
                f"{path!r}: nothing for {', '.join(map(str, sorted(lacking)))} of its {shapes[path][0]} copies"
            )
    return places


def _arrays(
    name: str, place: Place, slot: Mapping[str, Any], shape: tuple[int, ...], problems: list[str]
) -> dict[str, Any] | None:
    lacks = [key for key in ("exp_avg", "exp_avg_sq", "step") if key not in slot]
    if lacks:
        problems.append(f"{place.path!r}: the state of {name!r} lacks {', '.join(lacks)}")
        return None
    if place.index is not None and not (shape and 0 <= place.index < shape[0]):
        problems.append(f"{place.path!r}: no place {place.index} (of {name!r}) along the first axis of {shape}")
        return None
    wanted = shape if place.index is None else shape[1:]
    made: dict[str, Any] = {"step": int(_array(slot["step"]).item())}
    for key in ("exp_avg", "exp_avg_sq"):
        before = _array(slot[key])
        try:
            after = np.asarray(_changed(before, place.change), np.float32)
        except (ValueError, TypeError) as error:
            problems.append(f"{place.path!r}: cannot change {key} of {name!r}, {before.shape}: {error}")
            return None
        if after.shape != wanted:
            hint = "; transpose it?" if before.shape[::-1] == wanted and not place.change else ""
            problems.append(f"{place.path!r}: {key} of {name!r} has shape {after.shape}, expected {wanted}{hint}")
            return None
        made[key] = after
    return made


def _array(given: Any) -> np.ndarray:
    # A tensor may be on a device, may be a parameter, and may have a dtype that numpy has not.
    return np.asarray(given.detach().float().cpu() if hasattr(given, "detach") else given)


def _changed(array: np.ndarray, change: Change) -> np.ndarray:
    if change is None or isinstance(change, bool):
        return array.T if change else array
    return change(array) if callable(change) else array.transpose(tuple(change))


def _count(paths: Iterable[str], found: Mapping[str, Any], problems: list[str]) -> int:
    steps = {name: arrays["step"] for path in paths for name, arrays in found.get(path, {}).values()}
    first = next(iter(steps), None)
    other = next((name for name, step in steps.items() if step != steps[first]), None) if first else None
    if first is None:
        return 0
    if other:
        problems.append(
            f"one count for all, but {first!r} has step {steps[first]} and {other!r} has step {steps[other]}; put such "
            "parameters into groups of their own"
        )
    return steps[first]


def _fill(part: Any, count: int, found: Mapping[str, Any]) -> AdamWState:
    trees = []
    for key, tree in (("exp_avg", part.mu), ("exp_avg_sq", part.nu)):
        leaves = {}
        for path, old in flatten(tree).items():
            pieces = {index: arrays[key] for index, (_, arrays) in found[path].items()}
            whole = pieces[None] if None in pieces else np.stack([pieces[i] for i in range(len(pieces))])
            leaves[path] = _put(whole, old)
        trees.append(unflatten(tree, leaves))
    counts = {path: _put(np.asarray(count), old) for path, old in flatten(part.count).items()}
    return part._replace(count=unflatten(part.count, counts), mu=trees[0], nu=trees[1])


def _put(value: np.ndarray, old: Any) -> Any:
    return jax.device_put(value.astype(old.dtype), getattr(old, "sharding", None))
