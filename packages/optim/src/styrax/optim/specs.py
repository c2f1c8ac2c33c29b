"""What the axes of each parameter are: inputs, outputs, stacked layers, heads. One description, many users."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from styrax.core import UserError, nearest
from styrax.core.tree import flatten, is_variable, match, path_str
from styrax.optim.roles import DEFAULT_RULES, Role, is_stacked, roles, shape_of

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped

KINDS = {"s": "stacked", "i": "input", "o": "output"}


@dataclass(frozen=True)
class ParamSpec:
    """What a parameter is for, and what its axes are.

    Attributes:
        role: See `styrax.optim.roles`.
        axes: A letter for each axis: `s` for layers, experts and other copies that are stacked, `i` for inputs, `o`
            for outputs; `None` if nobody said and the shape does not tell.
        heads: Into how many blocks the outputs are divided, each a map of its own.

    Example:
        >>> spec = ParamSpec("matrix", "sioo")
        >>> spec.stack_axes, spec.in_axes, spec.out_axes, spec.fan_in((12, 64, 4, 16)), spec.fan_out((12, 64, 4, 16))
        ((0,), (1,), (2, 3), 64, 64)
    """

    role: Role
    axes: str | None
    heads: int = 1

    @property
    def stack_axes(self) -> tuple[int, ...]:
        """Axes of copies."""
        return self._which("s")

    @property
    def in_axes(self) -> tuple[int, ...]:
        """Axes that a dense input is summed over."""
        return self._which("i")

    @property
    def out_axes(self) -> tuple[int, ...]:
        """Axes of the result."""
        return self._which("o")

    def fan_in(self, shape: tuple[int, ...]) -> int:
        """How many inputs one output has."""
        return math.prod(shape[axis] for axis in self.in_axes)

    def fan_out(self, shape: tuple[int, ...]) -> int:
        """How many outputs there are, in all heads."""
        return math.prod(shape[axis] for axis in self.out_axes)

    def to_matrices(self, x: Shaped[Array, " ..."]) -> Shaped[Array, "stack inputs outputs"]:
        """Lay an array out as matrices, one for each copy and head.

        Example:
            >>> import numpy as np
            >>> ParamSpec("matrix", "sio", heads=2).to_matrices(np.zeros((3, 4, 6))).shape
            (6, 4, 3)
        """
        import jax.numpy as jnp

        shape = x.shape
        x = jnp.transpose(x, (*self.stack_axes, *self.in_axes, *self.out_axes))
        copies, inputs = math.prod(shape[axis] for axis in self.stack_axes), self.fan_in(shape)
        x = x.reshape(copies, inputs, self.heads, self.fan_out(shape) // self.heads)
        return jnp.swapaxes(x, 1, 2).reshape(copies * self.heads, inputs, self.fan_out(shape) // self.heads)

    def from_matrices(
        self, matrices: Shaped[Array, "stack inputs outputs"], shape: tuple[int, ...]
    ) -> Shaped[Array, " ..."]:
        """Undo `to_matrices` for an array of this shape."""
        import jax.numpy as jnp

        order = (*self.stack_axes, *self.in_axes, *self.out_axes)
        inputs = matrices.shape[1]
        x = matrices.reshape(matrices.shape[0] // self.heads, self.heads, inputs, matrices.shape[2])
        x = jnp.swapaxes(x, 1, 2).reshape([shape[axis] for axis in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        return jnp.transpose(x, back)

    def _which(self, kind: str) -> tuple[int, ...]:
        return tuple(axis for axis, letter in enumerate(self.axes or "") if letter == kind)


def specs(
    params: Any,
    *,
    roles_by_path: Mapping[str, Role] | None = None,
    axes: Mapping[str, str] | None = None,
    heads: Mapping[str, int] | None = None,
    logical: Mapping[str | tuple[str | None, ...], str] | None = None,
    defaults: Mapping[str, Role] = DEFAULT_RULES,
    stacked: Collection[str] = ("layers",),
) -> dict[str, ParamSpec]:
    """Describe every parameter.

    Without a rule, an array with a leading axis of layers (see `roles`) begins with `s`, and what is left of a matrix,
    an embedding or a head is `io` if it has two axes. With more, `axes` stays `None`: an algorithm that needs them
    then refuses the parameter by name, and never treats it as something else in silence. All axes but the stacked
    ones of vectors are `o`.

    Args:
        params: Tree of arrays, or of anything with a shape.
        roles_by_path: Path pattern -> role, as the `rules` of `roles`.
        axes: Path pattern -> letters, such as `{"**/conv/kernel": "iiio"}`; the first that fits counts.
        heads: Path pattern -> number of heads, such as `{"**/q/kernel": 12}`.
        logical: For `flax.nnx` variables with names of axes in their metadata (`nnx.with_partitioning`), where no rule
            of `axes` fits: name -> letter, such as `{"layers": "s", "embed": "i", "mlp": "o"}`; or the names of all
            axes -> letters, which count first, such as `{("mlp", "embed"): "io"}`. A parameter with a name that has
            no letter is left to its shape; inputs of vectors count as outputs.
        defaults: As for `roles`.
        stacked: As for `roles`.

    Returns:
        Path -> description.

    Raises:
        UserError: A rule fits nothing, a name in `logical` that no parameter has, letters that are none or are not as
            many as the axes, heads that do not divide the outputs; all in one message.

    Example:
        >>> import numpy as np
        >>> params = {"layers": {"q": {"kernel": np.ones((2, 8, 4, 2))}}, "dense": {"kernel": np.ones((8, 3))}}
        >>> found = specs(params, axes={"layers/*/kernel": "sioo"})
        >>> {path: spec.axes for path, spec in found.items()}
        {'dense/kernel': 'io', 'layers/q/kernel': 'sioo'}
    """
    leaves = {path: shape_of(leaf) for path, leaf in flatten(params).items()}
    found_roles = roles(params, roles_by_path, defaults=defaults, stacked=stacked)
    axes, heads = dict(axes or {}), dict(heads or {})
    problems = [
        f"{name} rule {pattern!r} fits no parameter{nearest(pattern, leaves)}"
        for name, rules in (("axes", axes), ("heads", heads))
        for pattern in rules
        if not any(match(pattern, path) for path in leaves)
    ]
    names = axis_names(params) if logical else {}
    seen = {*names.values(), *(name for axes_of_one in names.values() for name in axes_of_one)}
    problems += [f"logical axes {key!r}: no parameter has them" for key in logical or () if key not in seen]
    found = {}
    for path, shape in leaves.items():
        letters = next((letters for pattern, letters in axes.items() if match(pattern, path)), None)
        number = next((number for pattern, number in heads.items() if match(pattern, path)), 1)
        if letters is None and path in names:
            letters = _named_axes(found_roles[path], names[path], logical or {})
        if letters is None:
            letters = _default_axes(found_roles[path], len(shape), is_stacked(path, stacked))
        elif set(letters) - set(KINDS) or len(letters) != len(shape):
            kinds = ", ".join(f"{letter} ({kind})" for letter, kind in KINDS.items())
            problems.append(f"axes {letters!r} of {path!r}: expected {len(shape)} letters of {kinds}")
            continue
        spec = found[path] = ParamSpec(found_roles[path], letters, number)
        if number != 1 and (number < 1 or spec.axes is None or spec.fan_out(shape) % number):
            problems.append(f"heads {number} of {path!r}: expected a divisor of its outputs, shape {shape}")
    if problems:
        raise UserError("\n  ".join(["parameter axes:", *problems]))
    return found


def axis_names(params: Any) -> dict[str, tuple[Any, ...]]:
    """Read the names of axes in the metadata of `flax.nnx` variables.

    Args:
        params: A state or a tree of variables; other leaves have no names.

    Returns:
        Path -> a name or `None` for each axis, for those that have any.
    """
    import jax

    found = {}
    for keys, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)[0]:
        metadata = node.get_metadata() if is_variable(node) else {}
        # The first since flax 0.12, the others before it.
        kinds = ("out_sharding", "sharding_names", "sharding")
        named = next((metadata[kind] for kind in kinds if isinstance(metadata.get(kind), tuple)), None)
        if named:
            found[path_str(keys)] = tuple(named)
    return found


def need_axes(found: Mapping[str, ParamSpec], paths: Collection[str], what: str) -> None:
    """Refuse parameters whose axes nobody gave.

    Args:
        found: From `specs`.
        paths: Those that need them.
        what: What needs them.

    Raises:
        UserError: Lists every such parameter, with the rule to write.
    """
    lines = [f"  {path!r}: axes = {{{path!r}: ...}}" for path in paths if found[path].axes is None]
    if lines:
        kinds = ", ".join(f"{letter} for {kind}" for letter, kind in KINDS.items())
        raise UserError(f"{what} must know which axes are inputs and which outputs; give a letter each ({kinds}):\n"
                        + "\n".join(lines))  # fmt: skip


def _named_axes(role: Role, names: tuple[Any, ...], logical: Mapping[Any, str]) -> str | None:
    letters = logical.get(names)
    if letters is None:
        if any(name not in logical for name in names):
            return None
        letters = "".join(logical[name] for name in names)
    return letters.replace("i", "o") if role in ("vector", "scalar") else letters


def _default_axes(role: Role, ndim: int, stacked: bool) -> str | None:
    stack = "s" * stacked
    if role in ("vector", "scalar"):
        return stack + "o" * (ndim - stacked)
    return stack + "io" if ndim - stacked == 2 else None
