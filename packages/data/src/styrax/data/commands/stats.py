"""`styrax data stats`: what a store or a mixture holds, and how much of a row would be padding."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.data.commands.select import add_arguments as add_data
from styrax.data.commands.select import chosen

if TYPE_CHECKING:
    from styrax.data.dataset import LMData

HELP = "count documents, tokens, duplicates, padding; show lengths as a picture"
QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)
WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_data(parser)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    data = chosen(args)
    report = {
        "seq_len": data.block,
        "batch_size": data.batch_size,
        "pack": data.pack,
        "rows_per_epoch": data.num_rows,
        "steps_per_epoch": data.steps_per_epoch,
        "pad_fraction": _pad(data, range(len(data.stores))),
        "held_out_batches": len(data.held_out()),
        "sources": {name: _source(data, number) for number, name in enumerate(data.mixture.names)},
    }
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _show(report)
    return 0


def _pad(data: LMData, sources: Any) -> float:
    lines = [data.lines[number] for number in sources]
    return 1 - sum(line.targets for line in lines) / sum(line.places for line in lines)


def _source(data: LMData, number: int) -> dict[str, Any]:
    store, lengths = data.stores[number], data.stores[number].docs["tokens"]
    edges = [0, *(1 << np.arange(int(lengths.max()).bit_length())).tolist()]
    counts, _ = np.histogram(lengths, [*edges, int(lengths.max()) + 1 if edges[-1] <= lengths.max() else edges[-1] + 1])
    duplicates, repeated = _duplicates(store)
    known = store.num_bytes > 0
    return {
        "store": str(store.path),
        "fingerprint": store.fingerprint,
        "tokenizer": store.meta["tokenizer"]["fingerprint"],
        "vocab_size": store.meta["tokenizer"]["vocab_size"],
        "documents": len(store),
        "tokens": store.num_tokens,
        "bytes": store.num_bytes if known else None,
        "bytes_per_token": store.num_bytes / max(1, store.num_tokens - len(store)) if known else None,
        "tokens_with_loss": store.num_tokens if store.mask is None else int(store.mask[:].sum(dtype=np.int64)),
        "document_tokens": {
            f"{q:g}": float(value) for q, value in zip(QUANTILES, np.quantile(lengths, QUANTILES), strict=True)
        },
        "histogram": {f"{low}-{high - 1}": int(n) for low, high, n in _bins(edges, lengths, counts)},
        "longer_than_a_row": int((lengths > data.block).sum()),
        "duplicate_documents": duplicates,
        "duplicate_tokens": repeated,
        "held_out_documents": len(data._held[number]),
        "pad_fraction": _pad(data, [number]),
        "epochs_per_1000_steps": data.epochs(1000)[data.mixture.names[number]] if data.num_steps is None else None,
    }


def _bins(edges: list[int], lengths: np.ndarray, counts: np.ndarray) -> list[tuple[int, int, int]]:
    ends = [*edges[1:], int(lengths.max()) + 1]
    rows = [(low, high, int(n)) for low, high, n in zip(edges, ends, counts, strict=False) if high > low]
    while rows and rows[0][2] == 0:
        rows.pop(0)
    return rows


def _duplicates(store: Any) -> tuple[int, int]:
    """Count documents, and their tokens, that are the same as an earlier one."""
    import hashlib

    seen: set[bytes] = set()
    documents = tokens = 0
    for index in range(len(store)):
        ids = store[index]
        mark = hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=16).digest()
        if mark in seen:
            documents, tokens = documents + 1, tokens + len(ids)
        seen.add(mark)
    return documents, tokens


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, source in report["sources"].items():
        table = Table(title=f"{name}: {source['store']}", title_justify="left", box=None, show_header=False)
        for key, value in source.items():
            if key not in ("store", "histogram"):
                table.add_row(key.replace("_", " "), _text(value))
        console.print(table)
        most = max(source["histogram"].values(), default=1) or 1
        picture = Table("tokens", "documents", "", title="lengths", title_justify="left", box=None)
        for span, count in source["histogram"].items():
            picture.add_row(span, f"{count:,}", "█" * -(-WIDTH * count // most))
        console.print(picture)
    table = Table(title="in rows", title_justify="left", box=None, show_header=False)
    for key, value in report.items():
        if key != "sources":
            table.add_row(key.replace("_", " "), _text(value))
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, dict):
        return "  ".join(f"{key}: {entry:g}" for key, entry in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
