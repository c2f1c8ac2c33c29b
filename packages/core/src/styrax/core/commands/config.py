"""`styrax config show`: a configuration, resolved."""

import argparse
import json

from styrax.core.config import add_arguments as add_config
from styrax.core.config import from_arguments
from styrax.core.registry import names, resolve

HELP = "show a recipe or a file, resolved and checked; list the recipes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `show` and `list`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{show,list}")
    show = actions.add_parser("show", help="print what differs from the defaults, as TOML")
    add_config(show, optional=True)
    show.add_argument("--all", action="store_true", help="print every key")
    show.add_argument("--json", action="store_true", help="print JSON")
    recipes = actions.add_parser("list", help="list the recipes that are installed")
    recipes.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    if args.action == "list":
        return _list(args)
    resolved = from_arguments(args).check()
    if args.json:
        print(json.dumps(resolved.to_dict() if args.all else resolved.diff(), indent=2, allow_nan=False))
    else:
        print(resolved.to_toml(all=args.all) or "# nothing differs from the defaults\n", end="")
    return 0


def _list(args: argparse.Namespace) -> int:
    recipes = {name: resolve("styrax.recipes", name).doc for name in names("styrax.recipes")}
    if args.json:
        print(json.dumps(recipes, indent=2))
    else:
        for name, doc in recipes.items():
            print(f"{name}  {doc}")
    return 0
