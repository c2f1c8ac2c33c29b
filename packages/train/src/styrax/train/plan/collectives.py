"""What devices send one another in a step, read from the compiled program."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from styrax.train.plan import hlo

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All exchanges of one kind over the same mesh axes, in one step of one device.

    Attributes:
        kind: As the compiler calls it, such as "all-gather".
        axes: Mesh axes over which devices exchange, joined by "+"; None where they follow no axes.
        gathers: They are sums with zeros, by which the TPU compiler gathers.
        group: Devices in an exchange.
        count: How many there are; None if a loop around them has no known end.
        bytes: Of the whole arrays, before they are scattered or after they are gathered; None likewise.
        wire_bytes: What a device sends at least, by a ring; None likewise.
    """

    kind: str
    axes: str | None
    gathers: bool
    group: int
    count: int | None
    bytes: int | None
    wire_bytes: int | None


def collectives(text: str, shape: dict[str, int], dcn: Mapping[str, int] | None = None) -> tuple[Collective, ...]:
    """List what a compiled program exchanges, the most bytes first.

    Args:
        text: Of ``compiled.as_text()``.
        shape: Mesh axis -> devices along it, in the order of the mesh.
        dcn: Mesh axis -> ways of it across slices. The program is that of one slice, which reaches the others through
            its hosts.
    """
    module = hlo.parse(text)
    if "_xla_megascale" in text:  # devices are counted within the slice
        shape = {name: size // (dcn or {}).get(name, 1) for name, size in shape.items()}
    sums: dict[tuple[str, str | None, bool, int], list[Any]] = {}
    for run in module.runs():
        computation, times = module.computations[run.name], run.times
        for each in computation.instructions.values():
            kind = each.opcode.removesuffix("-start")
            if kind == "send" and (across := _across(each, dcn or {})) is not None:
                (kind, axes, size), operands = across, each.operands[:1]
            elif kind in KINDS:
                (axes, size), operands = _axes(each, shape), each.operands
            else:
                continue
            if size == 1:
                continue
            for operand in operands:
                source = computation.instructions.get(operand)
                if source is None:
                    continue
                gathers = kind == "all-reduce" and _padded(module, computation, operand, run)
                whole = hlo.shape_bytes(source.shape) * (size if kind == "all-gather" else 1)
                entry = sums.setdefault((kind, axes, gathers, size), [0, 0, 0])
                added = (1 if operand == operands[0] else 0, whole, _wire(kind, whole, size))
                for place, amount in enumerate(added):
                    known = entry[place] is not None and (times is not None or not amount)
                    entry[place] = entry[place] + amount * (times or 0) if known else None
    found = [
        Collective(kind=kind, axes=axes, gathers=gathers, group=size, count=count, bytes=whole, wire_bytes=wire)
        for (kind, axes, gathers, size), (count, whole, wire) in sums.items()
    ]
    return tuple(sorted(found, key=lambda each: -1 if each.wire_bytes is None else each.wire_bytes, reverse=True))


def _across(each: hlo.Instruction, dcn: Mapping[str, int]) -> tuple[str, str | None, int] | None:
    """Kind, axes and slices of an exchange between slices, which the hosts do; None for another kind of send."""
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', each.rest)
    target = re.search(r'_xla_megascale_target="\{([\d,]+)\}', each.rest)
    if kind is None or target is None:
        return None
    slices = len(target[1].split(","))
    names = [name for name, ways in dcn.items() if ways > 1]
    axes = "+".join(names) if math.prod(dcn.values()) == slices else None
    return kind[1].lower().replace("_", "-"), axes or None, slices


def exchange(kind: str, axes: str, group: int, whole: float, times: float) -> Collective:
    """Describe an exchange that is predicted, of arrays of so many bytes each time.

    >>> exchange("all-gather", "fsdp", 4, 80, 3).wire_bytes
    180
    """
    total = round(whole * times)
    return Collective(
        kind=kind, axes=axes, gathers=False, group=group, count=round(times), bytes=total,
        wire_bytes=_wire(kind, total, group),
    )  # fmt: skip


def _wire(kind: str, whole: int, size: int) -> int:
    """Bytes that a device sends by a ring of so many.

    >>> _wire("all-reduce", 80, 8), _wire("all-gather", 80, 8), _wire("collective-permute", 80, 8)
    (140, 70, 80)
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return whole
    return whole * (size - 1) * (2 if kind == "all-reduce" else 1) // size


def _padded(module: hlo.Module, computation: hlo.Computation, name: str, run: hlo.Run | None = None) -> bool:
    """Tell whether an array is a piece put into zeros: the sum of those over devices gathers the pieces."""
    each, _ = hlo.resolve(computation, name)
    if each is None:
        return False
    if each.opcode == "parameter" and run is not None and run.outer is not None and run.site is not None:
        return _padded(module, run.outer, run.site.operands[int(each.operands[0])])
    if each.opcode == "dynamic-update-slice":
        return _zeros(computation, each.operands[0])
    if each.opcode != "fusion" or not each.called("calls"):
        return False
    inner = module.computations.get(each.called("calls")[0])
    root = inner.root if inner else None
    if inner is None or root is None:
        return False
    made, _ = hlo.resolve(inner, root.name)
    if made is None or made.opcode != "dynamic-update-slice":
        return False
    base, _ = hlo.resolve(inner, made.operands[0])
    if base is not None and base.opcode == "parameter":
        return _zeros(computation, each.operands[int(base.operands[0])])
    return _zeros(inner, made.operands[0])


def _zeros(computation: hlo.Computation, name: str) -> bool:
    each, _ = hlo.resolve(computation, name)
    if each is not None and each.opcode == "broadcast":
        each, _ = hlo.resolve(computation, each.operands[0])
        # What a loop body is given from outside is not looked up: the compiler puts only zeros there.
        return each is not None and (each.opcode != "constant" or each.operands[0] in ("0", "false", "-0"))
    return each is not None and each.opcode == "constant" and each.operands[:1] in (("0",), ("false",))


def _axes(each: hlo.Instruction, shape: dict[str, int]) -> tuple[str | None, int]:
    """The mesh axes that the devices of an exchange differ in, and how many devices there are."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", each.rest)
    if pairs:
        ends = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
        names = {name for pair in ends for name in _differ(pair, shape)}
        ordered = [name for name in shape if name in names]
        return "+".join(ordered) or None, max((int(np.prod([shape[n] for n in ordered])), 1)) if ordered else 1
    groups = replica_groups(each.rest, int(np.prod(list(shape.values()) or [1])))
    if not groups:
        return None, 1
    first = groups[0]
    ordered = _differ(first, shape)
    if int(np.prod([shape[name] for name in ordered] or [1])) != len(first):
        return None, len(first)
    return "+".join(ordered) or None, len(first)


def _differ(devices: Sequence[int], shape: dict[str, int]) -> list[str]:
    places = np.array(np.unravel_index(np.asarray(devices), tuple(shape.values())))
    return [name for name, row in zip(shape, places) if len(set(row.tolist())) > 1]


def replica_groups(rest: str, devices: int) -> list[list[int]]:
    """Read which devices exchange with one another, in each form that XLA writes.

    >>> replica_groups("replica_groups={{0,1},{2,3}}", 4)
    [[0, 1], [2, 3]]
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0), x", 4)
    [[0, 2], [1, 3]]
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", 4)
    [[0, 2], [1, 3]]
    >>> replica_groups("replica_groups={}, x", 2)
    [[0, 1]]
    """
    if listed := re.search(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", rest):
        return [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        ids = np.arange(devices).reshape(_numbers(iota[2]))
        ids = ids.transpose(_numbers(iota[3])) if iota[3] else ids
        return ids.reshape(_numbers(iota[1])).tolist()
    if mesh := re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\](.*?) ?\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh[1])}
        order = re.search(r"device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh[2])
        ids = np.arange(int(np.prod(list(sizes.values()))))
        if order:
            ids = ids.reshape(_numbers(order[1]))
            ids = ids.transpose(_numbers(order[2])) if order[2] else ids
        ids = ids.reshape(tuple(sizes.values()))
        over = re.findall(r"'([\w.]+)'", mesh[3])
        kept = [place for place, name in enumerate(sizes) if name not in over]
        moved = [list(sizes).index(name) for name in over]
        return ids.transpose(kept + moved).reshape(-1, int(np.prod([sizes[name] for name in over]))).tolist()
    if re.search(r"replica_groups=\{\}", rest):
        return [list(range(devices))]
    return []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
