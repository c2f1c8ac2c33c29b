"""``styrax mesh show``: what lives where."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from styrax.core import UsageError
from styrax.core.config import find_schema, read_config

HELP = "show which parameters are split over which devices, and which are not and why"
_MOST = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", metavar="NAME|FILE.toml", help="a recipe or a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="overrides; values are TOML")
    parser.add_argument("--on", metavar="TOPOLOGY", help="v5p:8x8x8, cpu:8, ... (default: the CPUs here)")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="so many of them (default: 1)")
    parser.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary, if the data cannot tell it yet")
    parser.add_argument("--all", action="store_true", help="list every parameter")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Show it; nothing is allocated or compiled."""
    from styrax.train.plan.topology import of_here, parse, prepare

    if args.slices < 1:
        raise UsageError(f"--slices: expected 1 or more, got {args.slices}")
    resolved = read_config(find_schema("train"), args.config, args.overrides).check()
    topology = parse(args.on, slices=args.slices) if args.on else None
    if topology is not None:
        prepare(topology)
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        topology = of_here(args.slices)

    from styrax.train.meshes.placement import placements, used
    from styrax.train.plan.make import case_of

    case = case_of(resolved, topology, vocab_size=args.vocab, compile=False)
    mesh = case.program.mesh
    axes = resolved.sections["model"].logical_axes()
    places = placements(case.program.state.params, axes, case.program.rules)
    record: dict[str, Any] = {
        "config": args.config,
        "devices": mesh.size,
        "axes": used(places, mesh),
        "notes": list(case.notes),
        "bytes": sum(place.bytes for place in places),
        "bytes_per_device": sum(place.share for place in places),
        "whole": [{"path": place.path, "bytes": place.bytes, "why": place.reason} for place in places if place.reason],
        "parameters": [{**vars(place), "spec": [list(part) for part in place.spec]} for place in places],
    }
    if args.json:
        print(json.dumps(record))
        return 0
    _print(record, case.program, everything=args.all)
    return 0


def _print(record: dict[str, Any], program: Any, *, everything: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table("axis", "devices", "splits", "bytes of parameters", box=None, title="Mesh", title_justify="left")
    for name, axis in record["axes"].items():
        table.add_row(name, str(axis["size"]), ", ".join(axis["splits"]) or "nothing", f"{axis['bytes']:,}")
    console.print(table)
    total, each = record["bytes"], record["bytes_per_device"]
    console.print(f"{total:,} bytes of parameters, {each:,} on each of {record['devices']} devices")
    for note in record["notes"]:
        console.print(f"note: {note}")
    _draw(console, program)
    whole = sorted(record["whole"], key=lambda place: -place["bytes"])
    share = 100 * sum(place["bytes"] for place in whole) / max(total, 1)
    console.print(f"\nWhole on every device: {len(whole)} arrays, {share:.2f} % of the bytes")
    for place in whole if everything else whole[:10]:
        console.print(f"  {place['path']}  {place['bytes']:,} bytes: {place['why']}", highlight=False)
    if everything:
        table = Table(
            "path", "shape", "split over", "bytes on each", box=None, title="Parameters", title_justify="left"
        )
        for place in record["parameters"]:
            over = ", ".join("+".join(part) if part else "-" for part in place["spec"])
            table.add_row(place["path"], str(list(place["shape"])), over, f"{place['share']:,}")
        console.print(table)


def _draw(console: Any, program: Any) -> None:
    """Say of the first devices where on the mesh they are, and which rows of a batch they hold."""
    from rich.table import Table

    mesh, rows = program.mesh, program.rows
    names = [name for name, size in mesh.shape.items() if size > 1]
    ways = {name: mesh.shape[name] for name in program.rules["batch"] if mesh.shape.get(name, 1) > 1}
    table = Table("device", *names, "rows of a batch", box=None, title="Devices", title_justify="left")
    shape = tuple(mesh.shape.values())
    for number in range(min(mesh.size, _MOST)):
        place = dict(zip(mesh.shape, map(int, np.unravel_index(number, shape)), strict=True))
        part = 0
        for name, size in ways.items():
            part = part * size + place[name]
        each = rows // int(np.prod(list(ways.values()) or [1]))
        table.add_row(str(number), *(str(place[name]) for name in names), f"{part * each} to {(part + 1) * each - 1}")
    console.print(table)
    if mesh.size > _MOST:
        console.print(f"... and {mesh.size - _MOST} more")
