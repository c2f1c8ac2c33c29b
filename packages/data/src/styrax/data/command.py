"""`styrax data`: build a token store, look into it, check it."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.core.errors import UsageError

if TYPE_CHECKING:
    from styrax.data.build import Progress
    from styrax.data.dataset import LMData, Span
    from styrax.data.store import TokenStore

HELP = "build, inspect, measure and verify token stores"

QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="make a token store from text")
    build.add_argument("sources", nargs="+", metavar="IN", help="files, folders, quoted globs, or python:stdlib")
    build.add_argument("--out", required=True, type=Path, metavar="DIR", help="the store to make")
    build.add_argument("--tokenizer", default="bpe:4096", help="byte, bpe:N or a tokenizer.json (%(default)s)")
    build.add_argument(
        "--errors", choices=("raise", "replace", "skip"), default="raise", help="for text that is not UTF-8"
    )
    build.add_argument("--split-on", metavar="TEXT", help="cut files into documents after every such text")
    build.add_argument("--max-bytes", type=int, metavar="N", help="take a fixed subset of files of at most N bytes")
    build.add_argument("--overwrite", action="store_true", help="replace a store at DIR")
    inspect = commands.add_parser("inspect", help="show a document, or the rows of a step")
    what = inspect.add_mutually_exclusive_group()
    what.add_argument("--doc", type=int, metavar="I", help="the document's index")
    what.add_argument("--step", type=int, metavar="N", help="the step's rows, as a run with these settings sees them")
    inspect.add_argument("--row", type=int, metavar="R", help="only this row of the step")
    _row_arguments(inspect)
    stats = commands.add_parser("stats", help="count documents, tokens, bytes, padding")
    _row_arguments(stats)
    verify = commands.add_parser("verify", help="compare every byte with its checksum")
    for command in (inspect, stats, verify):
        command.add_argument("store", type=Path, metavar="DIR", help="a token store")
    for command in (build, inspect, stats, verify):
        command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    return {"build": _build, "inspect": _inspect, "stats": _stats, "verify": _verify}[args.data_command](args)


def _row_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per row (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step (%(default)s)")
    parser.add_argument("--pack", choices=("concat", "none"), default="concat", help="how rows are filled")
    parser.add_argument("--seed", type=int, default=0, help="decides the order (%(default)s)")
    parser.add_argument("--held-out", type=float, default=0.01, help="share of documents held out (%(default)s)")


def _build(args: argparse.Namespace) -> int:
    from styrax.data.build import build_store

    with _progress(quiet=args.json) as progress:
        store = build_store(
            args.sources,
            args.out,
            tokenizer=args.tokenizer,
            errors=args.errors,
            split_on=args.split_on,
            max_bytes=args.max_bytes,
            overwrite=args.overwrite,
            progress=progress,
        )
    _print(args, {"store": str(store.path), **_counts(store)})
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from styrax.data.store import TokenStore

    store = TokenStore(args.store)
    if args.step is None:
        index = args.doc or 0
        if not 0 <= index < len(store):
            raise UsageError(f"--doc {index}: expected 0 to {len(store) - 1}, the documents of {store.path}")
        ids = store[index].tolist()
        size = int(store.docs["bytes"][index])
        name, text = store.ids[index], store.text(index)
        if args.json:
            report = {"document": name, "index": index, "bytes": size, "tokens": ids, "text": text}
            print(json.dumps(report, ensure_ascii=False))
        else:
            print(f"document {index}: {name}, {size} bytes, {len(ids)} tokens with the end")
            print(text)
        return 0
    data = _data(args, store)
    rows = range(data.batch_size) if args.row is None else [args.row]
    reports = [
        {"row": row, "segments": [_segment(data, span) for span in data.provenance(args.step, row)]} for row in rows
    ]
    if args.json:
        print(json.dumps({"step": args.step, "rows": reports}, ensure_ascii=False))
        return 0
    for report in reports:
        print(f"step {args.step}, row {report['row']}")
        for segment in report["segments"]:
            first, last = segment["column"], segment["column"] + segment["length"] - 1
            print(f"  columns {first}-{last}: {segment['document']}, targets from {segment['start']}")
            print("    " + json.dumps(segment["text"], ensure_ascii=False))
    return 0


def _stats(args: argparse.Namespace) -> int:
    import numpy as np

    from styrax.data.store import TokenStore

    store = TokenStore(args.store)
    data = _data(args, store)
    held = data.held_out()
    places = data.num_rows * data.seq_len
    trained = int(sum(store.docs["tokens"][data.train_documents]))
    lengths = np.quantile(store.docs["tokens"], QUANTILES)
    _print(
        args,
        {
            "store": str(store.path),
            **_counts(store),
            "document_tokens": {f"{q:g}": float(value) for q, value in zip(QUANTILES, lengths, strict=True)},
            "held_out_documents": len(store) - len(data.train_documents),
            "held_out_batches": len(held),
            "rows_per_epoch": data.num_rows,
            "steps_per_epoch": data.steps_per_epoch,
            "pad_fraction": 1 - trained / places,
        },
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from styrax.data.store import TokenStore

    store = TokenStore(args.store)
    store.verify()
    _print(args, {"store": str(store.path), "fingerprint": store.fingerprint, "verified": True})
    return 0


def _data(args: argparse.Namespace, store: TokenStore) -> LMData:
    from styrax.data.dataset import LMData

    return LMData(
        store,
        seed=args.seed,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        pack=args.pack,
        held_out=args.held_out if len(store) > 1 else 0.0,
    )


def _segment(data: LMData, span: Span) -> dict[str, Any]:
    ids = data.store[span.index][span.start : span.start + span.length].tolist()
    return {"document": span.document, "index": span.index, "start": span.start, "length": span.length,
            "column": span.column, "text": data.tokenizer.decode(ids)}  # fmt: skip


def _counts(store: TokenStore) -> dict[str, Any]:
    return {
        "documents": len(store),
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "bytes_per_token": store.num_bytes / (store.num_tokens - len(store)),
        "vocab_size": store.meta["tokenizer"]["vocab_size"],
        "tokenizer": store.meta["tokenizer"]["fingerprint"],
        "fingerprint": store.fingerprint,
    }


def _print(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
        return
    width = max(map(len, report))
    for name, value in report.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key}: {entry:g}" for key, entry in value.items())
        print(f"{name.replace('_', ' '):<{width}}  {f'{value:.4g}' if isinstance(value, float) else value}")


def _progress(*, quiet: bool) -> AbstractContextManager[Progress | None]:
    """Show a bar with throughput on the terminal's error stream; nothing with `--json` or in a pipe."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from styrax.data.progress import bars

    return bars()
