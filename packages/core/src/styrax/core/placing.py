"""Where arrays go that belong to other arrays, such as an optimizer's state to parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from styrax.core import tree

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec


def follow(abstract_tree: Any, params: Any, where: Any, default: Any) -> Any:
    """Give the arrays that belong to parameters, such as an optimizer's moments, shardings that fit those.

    An array belongs to the parameter with whose path its own ends. The longest such path of a parameter with its
    shape counts, or else the longest of one whose shape it can come from:

    - The parameter's shape: it lies as the parameter.
    - As many axes, none longer (means with axes of 1, one number for each block): each axis is split as the
      parameter's if it can be divided so.
    - Fewer axes, the rest of the parameter's in order (rows, columns): as those. Where more than one choice of axes
      fits, what all choices agree on.
    - Anything below a field that is named in the `stacked_fields` of its named tuple, `[copies, ...]`, such as a
      square matrix for each copy: see `over_copies`.

    Everything else takes the default, as does what is not shaped like a parameter that has another kind of sharding
    than `NamedSharding`.

    Args:
        abstract_tree: A tree of arrays or `jax.ShapeDtypeStruct`, such as an optimizer's state.
        params: The parameters, in the same form.
        where: A sharding for each parameter, a tree like `params`.
        default: The sharding of everything else.

    Returns:
        A tree of shardings with the structure of `abstract_tree`.

    Example:
        >>> import jax
        >>> w, step = jax.ShapeDtypeStruct((4, 2), "float32"), jax.ShapeDtypeStruct((), "int32")
        >>> follow({"mu": {"w": w}, "count": step}, {"w": w}, {"w": "as w"}, "replicated")
        {'count': 'replicated', 'mu': {'w': 'as w'}}
    """
    from jax.sharding import NamedSharding

    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(params).items()}
    places = tree.flatten(where)
    stacked = tuple(_stacked(abstract_tree))

    def place(path: str, leaf: Any) -> Any:
        shape = tuple(leaf.shape)
        segments = path.split("/")
        owners = ["/".join(segments[start:]) for start in range(len(segments) + 1)]
        owners = [owner for owner in owners if owner in shapes]
        in_stack = f"{path}/".startswith(stacked)
        if not in_stack:
            for owner in owners:
                if shapes[owner] == shape:
                    return places[owner]
        for owner in owners:
            there = places[owner]
            if isinstance(there, NamedSharding):
                if in_stack:
                    return NamedSharding(there.mesh, over_copies(shape, there.mesh))
                partition = _surviving(shape, shapes[owner], there)
                if partition is not None:
                    return NamedSharding(there.mesh, partition)
        return default

    return tree.map_with_path(place, abstract_tree)


def over_copies(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Split copies over as many devices as their number allows, and the axis after them over what devices are left.

    So devices have whole copies if there are enough, and in any case no more than their part of the bytes if the
    numbers divide.

    Args:
        shape: `[copies, ...]`.
        mesh: Where they go; axes that are manual are left out.

    Example:
        >>> from styrax.core import MeshConfig
        >>> mesh = MeshConfig(axes={"data": 4, "tensor": 2}).abstract(8)
        >>> [tuple(over_copies(shape, mesh)) for shape in ((16, 3, 3), (6, 8, 8), (1, 8, 8), (1, 3, 3))]
        [(('data', 'tensor'),), ('tensor', 'data'), (None, ('data', 'tensor')), ()]
    """
    from jax.sharding import AxisType, PartitionSpec

    free = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Manual]
    entries: list[Any] = []
    for size in shape[:2]:
        names = dividing(size, free, mesh)
        free = [name for name in free if name not in names]
        entries.append(names if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*_trimmed(entries))


def dividing(size: int, names: Sequence[str], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Choose those mesh axes of more than one device that together split a size into most parts.

    Example:
        >>> from styrax.core import MeshConfig
        >>> mesh = MeshConfig(axes={"data": 4, "tensor": 2}).abstract(8)
        >>> dividing(12, ("data", "tensor"), mesh), dividing(8, ("data", "tensor"), mesh)
        (('data',), ('data', 'tensor'))
    """
    names = [name for name in names if mesh.shape[name] > 1]
    choices = [choice for n in range(len(names) + 1) for choice in itertools.combinations(names, n)]
    ways = {choice: math.prod(mesh.shape[name] for name in choice) for choice in choices}
    return max((choice for choice in choices if size % ways[choice] == 0), key=ways.__getitem__)


def ways_of(entry: str | tuple[str, ...] | None, mesh: Mesh | AbstractMesh) -> int:
    """Count the parts that an axis of an array is split into.

    Args:
        entry: Of a `PartitionSpec`.
        mesh: Whose axes it names.

    Example:
        >>> from styrax.core import MeshConfig
        >>> ways_of(("data", "tensor"), MeshConfig(axes={"data": 4, "tensor": 2}).abstract(8))
        8
    """
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh.shape[name] for name in names)


def _stacked(node: Any, prefix: str = "") -> Iterator[str]:
    # Paths of the fields that hold copies, each with a slash at its end.
    import jax

    def is_state(x: Any) -> bool:
        return bool(getattr(type(x), "stacked_fields", ()))

    if is_state(node):
        for name in node._fields:
            if name in node.stacked_fields:
                yield f"{prefix}{name}/"
            else:
                yield from _stacked(getattr(node, name), f"{prefix}{name}/")
        return
    for keys, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=is_state)[0]:
        if is_state(child):
            yield from _stacked(child, f"{prefix}{tree.path_str(keys)}/" if keys else prefix)


def _surviving(shape: tuple[int, ...], whole: tuple[int, ...], there: Any) -> PartitionSpec | None:
    from jax.sharding import PartitionSpec

    entries = (*there.spec, *(None,) * (len(whole) - len(there.spec)))
    if len(shape) == len(whole):
        if any(n > m for n, m in zip(shape, whole)):
            return None
        kept = [entries]
    else:
        choices = itertools.combinations(range(len(whole)), len(shape))
        chosen = [axes for axes in choices if tuple(whole[axis] for axis in axes) == shape]
        kept = [tuple(entries[axis] for axis in axes) for axes in chosen]
        if not kept:
            return None
    agreed = [same[0] if len(set(same)) == 1 else None for same in zip(*kept)]
    split = [entry if n % ways_of(entry, there.mesh) == 0 else None for n, entry in zip(shape, agreed)]
    return PartitionSpec(*_trimmed(split))


def _trimmed(entries: list[Any]) -> list[Any]:
    last = max((number for number, entry in enumerate(entries) if entry is not None), default=-1)
    return entries[: last + 1]
