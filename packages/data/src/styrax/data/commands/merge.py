"""`styrax data merge`: several stores of one tokenizer as one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "make one store of several that one tokenizer made"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("stores", nargs="+", type=Path, metavar="DIR", help="token stores, in the order wanted")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the store to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a store at DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Merge them."""
    from styrax.data.store.merge import merge_stores

    store = merge_stores(args.stores, args.out, overwrite=args.overwrite)
    report = {"store": str(store.path), "documents": len(store), "tokens": store.num_tokens}
    report |= {"fingerprint": store.fingerprint}
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{store.path}: {len(store):,} documents, {store.num_tokens:,} tokens of {len(args.stores)} stores")
    return 0
