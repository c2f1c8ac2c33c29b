"""What each parameter is for (matrix, embed, head, vector, scalar), decided from its path and shape.

The role decides weight decay and learning rate multipliers here, and later which algorithm applies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from styrax.core import UserError, nearest
from styrax.core.tree import flatten, match
from styrax.optim.columns import columns

Role = Literal["matrix", "embed", "head", "vector", "scalar"]
ROLES: tuple[str, ...] = get_args(Role)

DEFAULT_RULES: Mapping[str, Role] = {
    "**/*bias": "vector",
    "**/scale": "vector",
    "**/*norm*/**": "vector",
    "**/ln*/**": "vector",
    "**/head/**": "head",
    "**/lm_head/**": "head",
    "**/unembed*/**": "head",
    "**/*embed*/**": "embed",
    "**/wte/**": "embed",
    "**/wpe/**": "embed",
    "**": "matrix",
}
"""Pattern -> role, the first that fits; then an array of one axis is a vector and of none a scalar."""

DECAY_ROLES: tuple[Role, ...] = ("matrix", "head")
"""Roles with weight decay: arrays that multiply a dense activation, embedding tables not included."""


def roles(
    params: Any,
    rules: Mapping[str, Role] | None = None,
    *,
    defaults: Mapping[str, Role] = DEFAULT_RULES,
    stacked: Collection[str] = ("layers",),
) -> dict[str, Role]:
    """Give every parameter its role.

    The first of `rules` that fits a path decides. Otherwise the first of `defaults` does, and then shape has
    a say: one axis makes a vector, none a scalar. Layers stacked for a scan have one axis more than the
    layer: `layers/norm/scale` of shape `[12, 64]` is a vector. A path counts as stacked if it goes through a
    segment named in `stacked` that is not followed by an index, as in `layers/0/norm/scale`.

    Args:
        params: Tree of arrays, or of anything with a shape.
        rules: Path pattern -> role, see `styrax.core.tree.match`; each must decide some parameter.
        defaults: What holds for the rest. `{}` asks for a rule for every parameter.
        stacked: Names of the path segments below which parameters have a leading axis of layers.

    Returns:
        Path -> role.

    Raises:
        UserError: A rule decides nothing or names no role, or a parameter fits no rule; all are listed.

    Example:
        >>> import numpy as np
        >>> params = {"embed": {"embedding": np.ones((8, 4))},
        ...           "layers": {"mlp": {"kernel": np.ones((2, 4, 4))}, "norm": {"scale": np.ones((2, 4))}}}
        >>> list(roles(params).values())
        ['embed', 'matrix', 'vector']
        >>> roles(params, {"layers/norms/scale": "matrix"})
        Traceback (most recent call last):
        styrax.core.errors.UserError: parameter roles:
          rule 'layers/norms/scale' fits no parameter (did you mean 'layers/norm/scale'?)
    """
    rules = dict(rules or {})
    leaves = flatten(params)
    problems = [
        f"rule {pattern!r} gives {role!r}, which is no role{nearest(role, ROLES)}; roles: {', '.join(ROLES)}"
        for pattern, role in {**defaults, **rules}.items()
        if role not in ROLES
    ]
    winners: dict[str, str | None] = {path: _first(rules, path) for path in leaves}
    for pattern in rules:
        fits = [path for path in leaves if match(pattern, path)]
        if not fits:
            problems.append(f"rule {pattern!r} fits no parameter{nearest(pattern, leaves)}")
        elif pattern not in winners.values():
            earlier = sorted({repr(winners[path]) for path in fits})
            problems.append(f"rule {pattern!r} decides nothing: before it, {', '.join(earlier)} takes all it fits")
    found: dict[str, Role] = {}
    for path, leaf in leaves.items():
        default = _first(defaults, path)
        if (pattern := winners[path]) is not None:
            found[path] = rules[pattern]
        elif default is not None:
            found[path] = _by_shape(defaults[default], len(shape_of(leaf)) - is_stacked(path, stacked))
        else:
            problems.append(f"no rule fits {path!r}{nearest(path, rules)}")
    if problems:
        raise UserError("\n  ".join(["parameter roles:", *problems]))
    return found


class Row(NamedTuple):
    """How one parameter is treated.

    Attributes:
        path: Its path.
        shape: Its shape.
        role: Its role.
        lr: Multiplier on the learning rate.
        decay: Weight decay, before the learning rate.
        bytes: Of the parameter itself.
        group: The group that it belongs to, empty without groups.
    """

    path: str
    shape: tuple[int, ...]
    role: Role
    lr: float
    decay: float
    bytes: int = 0
    group: str = ""


class Table(tuple[Row, ...]):
    """Rows that print as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Lay the rows out in columns, with the totals below."""
        grouped = len({row.group for row in self}) > 1
        head = ("path", "shape", "role", *(["group"] if grouped else []), "lr x", "decay", "bytes")
        rows = [
            (r.path, str(r.shape), r.role, *([r.group] if grouped else []), f"{r.lr:g}", f"{r.decay:g}", f"{r.bytes:,}")
            for r in self
        ]
        size, decayed = _size(self), _size(row for row in self if row.decay)
        total = sum(row.bytes for row in self)
        below = f"{len(self)} arrays, {size:,} parameters, {decayed:,} with weight decay, {total:,} bytes"
        return columns(head, rows, right=("bytes",)) + "\n" + below


def describe(
    params: Any,
    rules: Mapping[str, Role] | None = None,
    *,
    weight_decay: float = 0.1,
    decay_roles: Collection[Role] = DECAY_ROLES,
    lr_multipliers: Mapping[Role, float] | None = None,
    stacked: Collection[str] = ("layers",),
) -> Table:
    """Tell for every parameter its role, its learning rate multiplier and its weight decay.

    Args:
        params: Tree of arrays, or of anything with a shape.
        rules: As for `roles`.
        weight_decay: Decay of the parameters that have one.
        decay_roles: Roles that have one.
        lr_multipliers: Role -> multiplier on the learning rate; 1 where nothing is said.
        stacked: As for `roles`.

    Returns:
        One row a parameter, in the order of the tree. `print` it.

    Example:
        >>> import numpy as np
        >>> print(describe({"dense": {"kernel": np.ones((4, 2), "f4"), "bias": np.ones(2, "f4")}}))
        path           shape    role     lr x   decay   bytes
        -----------------------------------------------------
        dense/bias     (2,)     vector   1      0           8
        dense/kernel   (4, 2)   matrix   1      0.1        32
        2 arrays, 10 parameters, 8 with weight decay, 40 bytes
    """
    multipliers = lr_multipliers or {}
    found = roles(params, rules, stacked=stacked)
    return Table(
        Row(
            path,
            shape_of(leaf),
            found[path],
            multipliers.get(found[path], 1.0),
            weight_decay if found[path] in decay_roles else 0.0,
            math.prod(shape_of(leaf)) * getattr(getattr(leaf, "dtype", None), "itemsize", 0),
        )
        for path, leaf in flatten(params).items()
    )


def _first(rules: Mapping[str, Role], path: str) -> str | None:
    return next((pattern for pattern in rules if match(pattern, path)), None)


def _by_shape(role: Role, ndim: int) -> Role:
    if ndim <= 0:
        return "scalar"
    return "vector" if ndim == 1 else role


def is_stacked(path: str, stacked: Collection[str]) -> bool:
    """Tell whether a path goes through a segment named in `stacked` without an index after it."""
    segments = path.split("/")
    return any(a in stacked and not b.isdigit() for a, b in itertools.pairwise(segments))


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Give the shape of an array, or of anything that says one."""
    return tuple(getattr(leaf, "shape", ()))


def _size(rows: Iterable[Row]) -> int:
    return sum(math.prod(row.shape) for row in rows)
