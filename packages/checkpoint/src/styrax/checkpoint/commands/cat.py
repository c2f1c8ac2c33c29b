"""`styrax checkpoint cat`: one leaf of a checkpoint, or one value of an item that is JSON."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.checkpoint import leaves
from styrax.checkpoint.commands.arguments import add_json, add_place, print_json, stay_off_devices
from styrax.checkpoint.errors import CheckpointError, sized
from styrax.checkpoint.locate import find_one
from styrax.checkpoint.manifest import Leaf, Manifest, leaf_name, read_manifest
from styrax.checkpoint.schema import describe, value_of
from styrax.core import UsageError, nearest

if TYPE_CHECKING:
    import numpy as np

HELP = "print one leaf, its statistics or its bytes"

_FEW = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_place(parser, steps="?", default="the newest step")
    parser.add_argument("path", metavar="PATH", help="the item and the path in it, as in params/layers/0/kernel")
    parser.add_argument(
        "--limit", metavar="N", type=int, default=1000, help="print the corners of what has more numbers; default: 1000"
    )
    parser.add_argument("--slice", metavar="SLICE", help="a part, in numpy's words, as in '0:4, ::2' or '-1'")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--stats", action="store_true", help="least, greatest, mean and so on in place of the numbers")
    form.add_argument("--raw", action="store_true", help="the bytes, in C order, for a file or another program")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    if args.limit < 1:
        raise UsageError(f"--limit: expected a number, 1 or more, got {args.limit}")
    index = None if args.slice is None else parse_slice(args.slice)
    if args.raw and args.json:
        raise UsageError("--raw and --json cannot be had together")
    if args.raw and sys.stdout.isatty():
        raise UsageError("--raw writes bytes, which a terminal cannot show: send them to a file or another program")
    stay_off_devices()
    checkpoint = find_one(args.directory, args.step)
    manifest = read_manifest(checkpoint)
    item, _, path = args.path.partition("/")
    if item in manifest.items and manifest.items[item].kind != "tree":
        return _document(checkpoint, manifest, item, path, args)
    leaf = _find(manifest, args.path, checkpoint)
    if leaf.kind == "python":
        return _value(leaf, args)
    data = leaves.arrays(checkpoint, item, [leaf])[leaf.path].load()
    if index is not None:
        try:
            data = data[index]
        except IndexError as error:
            raise CheckpointError(f"{args.path} has shape {list(leaf.shape)}, --slice {args.slice}: {error}") from error
    _array(leaf, data, args)
    return 0


def parse_slice(text: str) -> tuple[Any, ...]:
    """Read an index in numpy's words.

    Raises:
        UsageError: It is none.

    Example:
        >>> parse_slice("0:4, ::2, ..., -1")
        (slice(0, 4, None), slice(None, None, 2), Ellipsis, -1)
    """
    found: list[Any] = []
    for part in text.split(","):
        part = part.strip()
        if part == "...":
            found.append(...)
        elif re.fullmatch(r"-?\d+", part):
            found.append(int(part))
        elif re.fullmatch(r"(-?\d+)?(:(-?\d+)?){1,2}", part):
            found.append(slice(*(int(bound) if bound else None for bound in part.split(":"))))
        else:
            raise UsageError(f"--slice: {part!r} is neither a number, nor FIRST:STOP:STEP, nor '...'")
        if isinstance(found[-1], slice) and found[-1].step == 0:
            raise UsageError(f"--slice: {part!r} has a step of 0")
    if found.count(...) > 1:
        raise UsageError("--slice: '...' can stand there once")
    return tuple(found)


def _find(manifest: Manifest, path: str, checkpoint: Path) -> Leaf:
    there = {leaf_name(name, leaf.path): leaf for name, item in manifest.items.items() for leaf in item.leaves}
    if path in there:
        return there[path]
    below = [other for other in there if other.startswith(f"{path}/")]
    if below:
        more = f" and {len(below) - _FEW} more" if len(below) > _FEW else ""
        raise CheckpointError(f"{path} is no leaf; below it are {', '.join(below[:_FEW])}{more}")
    near = nearest(path, [*there, *manifest.items])
    raise CheckpointError(f"no leaf {path!r} in {checkpoint}{near}; `styrax checkpoint show` lists them")


def _document(checkpoint: Path, manifest: Manifest, item: str, path: str, args: argparse.Namespace) -> int:
    if args.stats or args.slice:
        raise UsageError(f"{item} is JSON, which has no slices and no statistics")
    if args.raw and not path:
        sys.stdout.buffer.write(leaves.raw_document(checkpoint, manifest, item))
        return 0
    value, above = leaves.document(checkpoint, manifest, item), item
    for key in filter(None, path.split("/")):
        name = key.replace("%2F", "/").replace("%25", "%")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            keys = list(value) if isinstance(value, dict) else []
            has = f"; it has {', '.join(keys)}" if keys else ""
            raise CheckpointError(f"no {key!r} in {above} of {checkpoint}{nearest(key, keys) or has}")
        above += f"/{key}"
    if args.raw:
        sys.stdout.buffer.write(json.dumps(value).encode())
    else:
        print(json.dumps(value, indent=None if args.json else 2, ensure_ascii=args.json))
    return 0


def _value(leaf: Leaf, args: argparse.Namespace) -> int:
    value = value_of(leaf)
    if args.stats or args.slice:
        raise UsageError(f"{args.path} is a Python {leaf.dtype}, which has no slices and no statistics")
    if args.raw:
        sys.stdout.buffer.write(value if isinstance(value, bytes) else str(value).encode())
    elif args.json:
        plain = value if isinstance(value, (bool, int, float, str)) else repr(value)
        print_json({"path": args.path, "kind": leaf.kind, "dtype": leaf.dtype, "value": plain})
    else:
        print(value)
    return 0


def _array(leaf: Leaf, data: Any, args: argparse.Namespace) -> None:
    import numpy as np

    from styrax.checkpoint.measure import summarize

    data = np.asarray(data)
    if args.raw:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        sys.stdout.buffer.write(flat.data)
        sys.stdout.buffer.flush()
        return
    summary = vars(summarize(data)) if args.stats else {}
    if args.json:
        # What is not all there would be taken for the whole.
        values = _listed(data) if data.size <= args.limit and not args.stats else None
        record = {"path": args.path, "kind": leaf.kind, "dtype": leaf.dtype, "shape": data.shape, "impl": leaf.impl}
        print_json(record | {"digest": leaf.digest} | ({"stats": summary} if args.stats else {"values": values}))
        return
    part = "" if args.slice is None else f"; of it [{args.slice}], {list(data.shape)}"
    print(f"{args.path}: {describe(leaf)}, {sized(leaf.nbytes)}{part}")
    for name, value in summary.items():
        print(f"  {name:<6} {_short(value)}")
    if not args.stats:
        print(_text(data, args.limit))


def _text(data: np.ndarray, limit: int) -> str:
    import numpy as np

    edge = max(1, int(limit ** (1 / max(data.ndim, 1)) / 2))
    width = shutil.get_terminal_size().columns
    return np.array2string(data, threshold=limit, edgeitems=edge, max_line_width=width, floatmode="unique")


def _listed(data: np.ndarray) -> Any:
    values = data.tolist()  # those of ml_dtypes come as numbers too, complex ones as none that JSON has
    return _as_text(values) if data.dtype.kind == "c" else values


def _as_text(value: Any) -> Any:
    return [_as_text(child) for child in value] if isinstance(value, list) else [value.real, value.imag]


def _short(value: float | None) -> str:
    if value is None:
        return "none"
    return str(value) if isinstance(value, int) else f"{value:.6g}"
