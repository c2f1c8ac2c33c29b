"""What an optimizer's state weighs, before anything is allocated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from styrax.core.tree import flatten
from styrax.optim.columns import columns
from styrax.optim.sharding import state_shardings


class Slot(NamedTuple):
    """One kind of array in a state, such as all first moments.

    Attributes:
        name: Its path in the state, without the paths of parameters.
        dtype: Its dtypes, one after another.
        arrays: How many arrays there are.
        bytes: Of all of them together.
        device_bytes: Of what the fullest device holds; `None` if the parameters have no sharding.
    """

    name: str
    dtype: str
    arrays: int
    bytes: int
    device_bytes: int | None


class MemoryTable(tuple[Slot, ...]):
    """The slots of a state, that print as a table.

    Attributes:
        parameters: Bytes of the parameters.
    """

    parameters: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(slot.bytes for slot in self)

    @property
    def device_bytes(self) -> int | None:
        """Bytes of the state on the fullest device; `None` if that is not known."""
        found = [slot.device_bytes for slot in self]
        return None if None in found else sum(n for n in found if n is not None)

    def __str__(self) -> str:
        """Lay the slots out in columns, with the totals below."""
        spread = self.device_bytes is not None
        head = ("slot", "dtype", "arrays", "bytes", *(["bytes a device"] if spread else []))
        rows = [
            (s.name, s.dtype, f"{s.arrays:,}", f"{s.bytes:,}", *([f"{s.device_bytes:,}"] if spread else []))
            for s in self
        ]
        share = f"{self.bytes / self.parameters:.2f}" if self.parameters else "n/a"
        total = f"state {self.bytes:,} bytes, {share} of the parameters' {self.parameters:,}"
        return columns(head, rows, right=("arrays", "bytes", "bytes a device")) + "\n" + total


def memory_table(tx: Any, params: Any) -> MemoryTable:
    """Count the bytes of an optimizer's state, slot by slot, without making it.

    Args:
        tx: Any optax transformation.
        params: Tree of arrays or of `jax.ShapeDtypeStruct`s; where they have shardings, those of the state are derived
            by `state_shardings` and the bytes of one device are told too.

    Returns:
        One row for each slot, in the order of the state. `print` it.

    Example:
        >>> import optax
        >>> print(memory_table(optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((4, 8), "float32")}))
        slot      dtype     arrays   bytes
        ----------------------------------
        0/count   int32          1       4
        0/mu      float32        1     128
        0/nu      float32        1     128
        state 260 bytes, 2.03 of the parameters' 128
    """
    owners = flatten(params)
    state = flatten(jax.eval_shape(tx.init, params))
    placed = all(getattr(leaf, "sharding", None) is not None for leaf in owners.values())
    where = flatten(state_shardings(tx, params)) if placed else {}
    slots: dict[str, list[tuple[str, Any]]] = {}
    for path, leaf in state.items():
        slots.setdefault(_slot(path, owners), []).append((path, leaf))
    table = MemoryTable(
        Slot(
            name,
            ", ".join(dict.fromkeys(str(leaf.dtype) for _, leaf in found)),
            len(found),
            sum(_bytes(leaf.shape, leaf.dtype) for _, leaf in found),
            sum(_bytes(where[path].shard_shape(leaf.shape), leaf.dtype) for path, leaf in found) if where else None,
        )
        for name, found in slots.items()
    )
    table.parameters = sum(_bytes(leaf.shape, leaf.dtype) for leaf in owners.values())
    return table


def _slot(path: str, owners: dict[str, Any]) -> str:
    segments = path.split("/")
    cuts = (cut for cut in range(len(segments)) if "/".join(segments[cut:]) in owners)
    return "/".join(segments[: next(cuts, len(segments))])


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    # Typed keys and the like have an itemsize too.
    return math.prod(shape) * dtype.itemsize
