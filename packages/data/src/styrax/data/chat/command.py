"""`styrax data chat`: a store of instruction data or of preference pairs."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

HELP = "make a token store of conversations, completions or preference pairs"


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="IN",
        help=".jsonl (.gz, .zst) or .parquet files, folders or quoted globs of these",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="the store to make")
    add("--tokenizer", required=True, metavar="FILE", help="byte, or the model's tokenizer.json")
    add("--template", default="chatml", metavar="FILE", help="chatml, or a file with a chat template: Jinja, a "
        "tokenizer_config.json, or the model's folder (%(default)s)")  # fmt: skip
    add("--train-on", choices=("assistant", "last", "all"), default="assistant", help="what carries loss: all that the "
        "assistant says, the last of it, or all text (%(default)s)")  # fmt: skip
    add("--preference", action="store_true", help="records have 'chosen' and 'rejected': two documents each")
    add("--id", metavar="FIELD", help="the field that holds a record's id (FILE@NUMBER)")
    add("--on-error", choices=("raise", "quarantine"), default="raise", help="for records that cannot be used")
    add("--max-bad", type=float, default=1e-3, metavar="FRACTION", help="how many of all records --on-error quarantine "
        "may refuse (%(default)s)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace a store at DIR")
    add("--json", action="store_true", help="print JSON")


def run_chat(args: argparse.Namespace) -> int:
    """Build the store that the arguments describe, and say what is in it.

    Raises:
        UserError: As `build_chat_store` and `build_preference_store` do.
        UsageError: Options that do not go together.
    """
    from styrax.core.errors import UsageError
    from styrax.data.build.quarantine import Quarantine
    from styrax.data.chat.build import build_chat_store, build_preference_store
    from styrax.data.progress import bars

    if args.preference and args.train_on != "assistant":
        raise UsageError(
            f"--train-on {args.train_on}: of preference pairs, what the assistant says carries loss; leave it away"
        )
    common = {
        "template": args.template,
        "id": args.id,
        "on_error": Quarantine(args.max_bad) if args.on_error == "quarantine" else "raise",
        "overwrite": args.overwrite,
    }
    quiet = args.json or not sys.stderr.isatty()
    with nullcontext() if quiet else bars() as progress:
        if args.preference:
            store = build_preference_store(args.sources, args.out, args.tokenizer, progress=progress, **common)
        else:
            store = build_chat_store(
                args.sources, args.out, args.tokenizer, train_on=args.train_on, progress=progress, **common
            )
    report = store.meta["report"]
    about = {
        "store": str(store.path),
        "records": report["documents"],
        "kept": report["kept"],
        "dropped": report["dropped"],
        "documents": len(store),
        "tokens": store.num_tokens,
        "loss_tokens": report["loss_tokens"],
        "longest": report["longest"],
        "fingerprint": store.fingerprint,
    }
    if args.json:
        print(json.dumps(about, ensure_ascii=False))
        return 0
    width = max(map(len, about))
    for name, value in about.items():
        if isinstance(value, dict):
            value = ", ".join(f"{reason}: {count}" for reason, count in value.items()) or "none"
        print(f"{name.replace('_', ' '):<{width}}  {value}")
    return 0
