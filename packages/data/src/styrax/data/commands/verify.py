"""`styrax data verify`: compare every byte of a store with its checksums."""

from __future__ import annotations

import argparse
import json

HELP = "compare every byte with its checksum"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("store", metavar="DIR", help="a token store: a folder or a URL")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read everything; an error names what is damaged."""
    from styrax.data.store.remote import open_store

    store = open_store(args.store)
    store.verify()
    report = {"store": str(store.path), "fingerprint": store.fingerprint, "verified": True}
    print(json.dumps(report) if args.json else f"{store.path}: verified, {store.num_tokens:,} tokens are as written")
    return 0
