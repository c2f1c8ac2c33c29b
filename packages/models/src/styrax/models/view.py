"""What a model is made of, for the eye: paths, shapes, bytes and where they lie."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from styrax.core import tree


class Leaf(NamedTuple):
    """One array.

    Attributes:
        path: Its place in the model.
        dtype: Of its numbers.
        shape: Its axes.
        bytes: Of the whole array.
        sharding: Mesh axes that split it, for each of its axes; "n/a" for shapes that no array has been made of.
        share: Bytes on each device that holds a part of it; `None` if that is not known.
        kind: "Param" if it is trained, or another kind of NNX variable.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    sharding: str
    share: int | None
    kind: str


def leaves(model: nnx.Module) -> list[Leaf]:
    """List all arrays of a model, or of the shapes of one.

    Args:
        model: Any NNX module; one from `nnx.eval_shape` has shapes only.
    """
    kinds = {path: type(variable).__name__ for path, variable in _variables(model)}
    return [_leaf(path, leaf, kinds) for path, leaf in tree.flatten(model).items()]


def view(model: nnx.Module, *, width: int = 160) -> str:
    """Draw a table of all arrays of a model, and their sum.

    Args:
        model: As for `leaves`.
        width: Of a line, in characters.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> print(view(model).splitlines()[-1].strip())
        11 arrays, 4,224 numbers, 16,896 bytes, 16,896 of them on each device
    """
    found = leaves(model)
    table = Table(box=None, pad_edge=False)
    for name in ("path", "kind", "dtype", "shape", "bytes", "sharding", "bytes per device"):
        table.add_column(name, justify="right" if name.startswith("bytes") else "left", no_wrap=True)
    for leaf in found:
        share = "n/a" if leaf.share is None else f"{leaf.share:,}"
        shape = "[" + ", ".join(map(str, leaf.shape)) + "]"
        table.add_row(leaf.path, leaf.kind, leaf.dtype, shape, f"{leaf.bytes:,}", leaf.sharding, share)
    console = Console(width=width, file=None, no_color=True)
    with console.capture() as capture:
        console.print(table, markup=False)
    numbers, size = sum(math.prod(leaf.shape) for leaf in found), sum(leaf.bytes for leaf in found)
    shares = [leaf.share for leaf in found]
    known = [share for share in shares if share is not None]
    each = f"{sum(known):,}" if len(known) == len(shares) else "n/a"
    return f"{capture.get()}{len(found)} arrays, {numbers:,} numbers, {size:,} bytes, {each} of them on each device"


def _variables(model: Any) -> list[tuple[str, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(model, is_leaf=tree.is_variable)[0]
    return [(tree.path_str(keys), variable) for keys, variable in flat if tree.is_variable(variable)]


def _leaf(path: str, leaf: Any, kinds: dict[str, str]) -> Leaf:
    size, sharding = leaf.dtype.itemsize, getattr(leaf, "sharding", None)
    where, share = "n/a", None
    if sharding is not None:
        share = math.prod(sharding.shard_shape(leaf.shape)) * size
        spec = getattr(sharding, "spec", None)
        where = "one device" if len(sharding.device_set) == 1 else "every device"
        if spec is not None and any(spec):
            where = ", ".join("-" if part is None else str(part) for part in spec)
    return Leaf(path, leaf.dtype.name, tuple(leaf.shape), math.prod(leaf.shape) * size, where, share, kinds[path])
