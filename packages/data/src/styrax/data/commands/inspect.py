"""`styrax data inspect`: a document, or the rows of a step with boundaries and sources."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UsageError
from styrax.data.commands.select import add_arguments as add_data
from styrax.data.commands.select import chosen

if TYPE_CHECKING:
    from styrax.data.dataset import LMData, Span

HELP = "show a document, or the rows of a step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_data(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--doc", type=int, metavar="I", help="the document's index")
    what.add_argument("--id", metavar="ID", help="the document's id")
    what.add_argument("--step", type=int, metavar="N", help="the step's rows, as a run with these settings sees them")
    parser.add_argument("--row", type=int, metavar="R", help="only this row of the step")
    parser.add_argument("--source", metavar="NAME", help="with a mixture: the source of the document")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    if args.row is not None and args.step is None:
        raise UsageError("--row is a row of a step; give --step N too")
    data = chosen(args)
    return _document(args, data) if args.step is None else _rows(args, data)


def _document(args: argparse.Namespace, data: LMData) -> int:
    names = data.mixture.names
    if args.source is not None and args.source not in names:
        raise UsageError(f"--source {args.source}: expected one of {', '.join(names)}")
    store = data.stores[names.index(args.source) if args.source is not None else 0]
    index = args.doc or 0
    if args.id is not None:
        if args.id not in store.ids:
            from styrax.core.errors import nearest

            raise UsageError(f"no document {args.id!r} in {store.path}{nearest(args.id, store.ids)}")
        index = store.ids.index(args.id)
    if not 0 <= index < len(store):
        raise UsageError(f"--doc {index}: expected 0 to {len(store) - 1}, the documents of {store.path}")
    ids, size = store[index].tolist(), int(store.docs["bytes"][index])
    report: dict[str, Any] = {"document": store.ids[index], "index": index, "bytes": size, "tokens": ids}
    report["text"] = store.text(index)
    if store.mask is not None:
        start = int(store.docs["start"][index])
        report["loss_mask"] = np.asarray(store.mask[start : start + len(ids)]).tolist()
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(f"document {index}: {report['document']}, {size} bytes, {len(ids)} tokens with the end")
        print(report["text"])
    return 0


def _rows(args: argparse.Namespace, data: LMData) -> int:
    rows = range(data.shape(args.step)[0]) if args.row is None else [args.row]
    reports = [
        {"row": row, "segments": [_segment(data, span) for span in data.provenance(args.step, row)]} for row in rows
    ]
    if args.json:
        print(json.dumps({"step": args.step, "rows": reports}, ensure_ascii=False))
        return 0
    several = len(data.mixture.names) > 1
    for report in reports:
        print(f"step {args.step}, row {report['row']}")
        for segment in report["segments"]:
            first, last = segment["column"], segment["column"] + segment["length"] - 1
            source = f"{segment['source']}: " if several else ""
            print(f"  columns {first}-{last}: {source}{segment['document']}, targets from {segment['start']}")
            print("    " + json.dumps(segment["text"], ensure_ascii=False))
    return 0


def _segment(data: LMData, span: Span) -> dict[str, Any]:
    store = data.stores[data.mixture.names.index(span.source)]
    ids = store[span.index][span.start : span.start + span.length].tolist()
    return {**dataclasses.asdict(span), "text": store.tokenizer.decode(ids)}
