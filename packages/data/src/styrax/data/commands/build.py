"""`styrax data build`: a token store from files."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from styrax.data.build import Progress
    from styrax.data.store import TokenStore

HELP = "make a token store from text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="IN",
        help="files, folders, quoted globs, or python:stdlib; .jsonl, .csv, .tsv and .parquet hold one document per "
        "record, other files are one document each; .gz and .zst are decompressed",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="the store to make")
    add("--tokenizer", default="bpe:4096", help="byte, bpe:N or a tokenizer.json (%(default)s)")
    add("--text", default="text", metavar="FIELD", help="the field of a record that holds its text (%(default)s)")
    add("--id", metavar="FIELD", help="the field that holds its id (FILE@NUMBER)")
    add("--errors", choices=("raise", "replace", "skip"), default="raise", help="for text that is not UTF-8")
    add("--split-on", metavar="TEXT", help="cut text files into documents after every such text")
    add("--max-bytes", type=int, metavar="N", help="take a fixed subset of files of at most N bytes")
    add("--filter", action="append", default=[], metavar="MODULE:FUNCTION", help="keeps, changes or drops records; "
        "may be given again")  # fmt: skip
    add("--on-error", choices=("raise", "quarantine"), default="raise", help="for malformed records")
    add("--max-bad", type=float, default=1e-3, metavar="FRACTION", help="how many of all records --on-error quarantine "
        "may refuse (%(default)s)")  # fmt: skip
    add("--dedup", choices=("exact", "minhash"), help="drop documents whose text is that of one before, or nearly so")
    add("--decontaminate", action="append", default=[], metavar="FILE", help="drop documents that share 13 words in a "
        "row with a text in this .jsonl or .txt file; may be given again")  # fmt: skip
    add("--workers", type=int, metavar="N", help="processes (one for each core); changes no byte of the store")
    add("--overwrite", action="store_true", help="replace a store at DIR")
    add("--json", action="store_true", help="print JSON")


def build(args: argparse.Namespace) -> TokenStore:
    """Build the store that the arguments describe.

    Args:
        args: Parsed; with `json` set, nothing is shown.

    Raises:
        UserError: As `build_store` does.
    """
    from styrax.data.build import Quarantine, build_store
    from styrax.data.build.filters import load_filter

    dedup: Any = args.dedup
    if dedup == "minhash":
        from styrax.data.build.minhash import MinHash

        dedup = MinHash()
    contamination = None
    if args.decontaminate:
        from styrax.data.build.decontaminate import Decontaminator

        contamination = Decontaminator.from_files(args.decontaminate)
    with progress_bars(quiet=args.json) as progress:
        return build_store(
            args.sources,
            args.out,
            tokenizer=args.tokenizer,
            text=args.text,
            id=args.id,
            errors=args.errors,
            split_on=args.split_on,
            max_bytes=args.max_bytes,
            filters=[load_filter(name) for name in args.filter],
            on_error=Quarantine(args.max_bad) if args.on_error == "quarantine" else "raise",
            dedup=dedup,
            decontaminate=contamination,
            workers=args.workers,
            overwrite=args.overwrite,
            progress=progress,
        )


def progress_bars(*, quiet: bool) -> AbstractContextManager[Progress | None]:
    """Show a bar with throughput on the terminal's error stream; nothing with `--json` or in a pipe."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from styrax.data.progress import bars

    return bars()


def run(args: argparse.Namespace) -> int:
    """Build, and say what was built."""
    store = build(args)
    report = {
        "store": str(store.path),
        "documents": len(store),
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "bytes_per_token": store.num_bytes / max(1, store.num_tokens - len(store)),
        "vocab_size": store.meta["tokenizer"]["vocab_size"],
        "tokenizer": store.meta["tokenizer"]["fingerprint"],
        "fingerprint": store.fingerprint,
        "dropped": store.meta["report"].get("dropped", {}),
    }
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in report.items():
        if name == "dropped":
            value = ", ".join(f"{reason}: {count:,}" for reason, count in value.items()) or "none"
        shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
    return 0
