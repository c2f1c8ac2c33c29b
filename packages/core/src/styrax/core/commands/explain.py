"""`styrax explain`: what a config key means."""

import argparse
import dataclasses
import json
import textwrap
from typing import Any

from styrax.core.config import add_arguments as add_config
from styrax.core.config import find_schema, from_arguments
from styrax.core.config.convert import plain
from styrax.core.config.describe import Entry, describe
from styrax.core.config.toml import literal

HELP = "explain a config key: type, default, limits, meaning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the key and the configuration."""
    parser.add_argument("key", nargs="?", default="", help="such as train.steps, or a section; none lists them")
    add_config(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    given = args.config is not None
    resolved = from_arguments(args) if given else None
    entry = describe(find_schema(args.schema), args.key, resolved)
    print(json.dumps(entry.to_dict(), indent=2) if args.json else _page(entry))
    return 0


def _page(entry: Entry) -> str:
    lines = [entry.path] if entry.path else []
    facts = {
        "type": entry.type,
        "default": _text(entry.default),
        "constraint": entry.constraint,
    }
    if entry.value is not dataclasses.MISSING:
        facts["value"] = _text(entry.value)
    lines += [f"  {name:<10} {text}" for name, text in facts.items() if text]
    lines += textwrap.wrap(entry.doc, 96, initial_indent="  ", subsequent_indent="  ")
    if entry.keys:
        width = max(len(key.path) for key in entry.keys)
        lines += [""] if lines else []
        for key in entry.keys:
            value = key.value if key.value is not dataclasses.MISSING else key.default
            shown = f" = {_text(value)}" if value is not dataclasses.MISSING else f": {key.type}"
            lines.append(f"  {key.path:<{width}}{shown}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return "" if value is dataclasses.MISSING else literal(plain(value))
