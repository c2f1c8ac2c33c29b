"""`styrax models verify`: whether a folder holds the model that its config.json says, and sound numbers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core import Policy, UserError, tree

HELP = "check a folder: files whole, tensors as config.json says, every number finite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="with config.json and safetensors")
    parser.add_argument("--against", metavar="OTHER", help="also compare every tensor with this folder's, bit by bit")


def run(args: argparse.Namespace) -> int:
    """Check it; gives 1 if something is wrong."""
    from styrax.models.cost import abstract
    from styrax.models.hf.load import read_json
    from styrax.models.hf.plan import fit
    from styrax.models.hf.tensors import open_tensors
    from styrax.models.registry import family_of, read_table

    folder = Path(args.folder)
    table = read_json(folder / "config.json")
    family, inner = family_of(table)
    config = read_table(table)
    empty = abstract(config, vocab_size=inner["vocab_size"], policy=Policy())
    with open_tensors(folder) as tensors:
        fit(family.rules(config), config, tree.flatten(empty), tensors, where=str(folder))
        problems = [text for tensor in tensors.values() if (text := _problem(tensor))]
        if args.against:
            with open_tensors(args.against) as others:
                problems += _differences(tensors, others)
        count, nbytes = len(tensors), tensors.nbytes
    if problems:
        raise UserError("\n  ".join([f"{folder}: {len(problems)} problem(s):", *problems]))
    same = f", the same as in {args.against}" if args.against else ""
    print(f"{folder}: {family.model_type}, {count} tensors, {nbytes:,} bytes, as config.json says, all finite{same}")
    return 0


def _problem(tensor: Any) -> str | None:
    data = tensor.read()
    if data.dtype.kind in "biu":
        return None
    finite = np.isfinite(data if data.dtype.itemsize > 1 else data.astype("float32"))
    bad = data.size - int(np.count_nonzero(finite))
    tensor.drop()
    return f"{tensor.name}: {bad} of {data.size} numbers are not finite" if bad else None


def _differences(ours: Any, theirs: Any) -> list[str]:
    texts = [f"{name}: only in one of them" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name], theirs[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            texts.append(f"{name}: {one.dtype}{list(one.shape)} here, {other.dtype}{list(other.shape)} there")
        elif one.read().tobytes() != other.read().tobytes():
            texts.append(f"{name}: other numbers")
        one.drop()
        other.drop()
    return texts
