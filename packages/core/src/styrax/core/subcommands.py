"""A command of several actions, such as `styrax data build`: a module for each, found by its name."""

import argparse
import importlib
import keyword
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def subcommands(
    package: str, names: Iterable[str], *, aliases: Mapping[str, str] | None = None
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """Make the `add_arguments` and `run` of a command whose actions are the modules of a package.

    Each module has `HELP`, `add_arguments(parser)` and `run(args)`, as a command has. The module of an action whose
    name Python keeps for itself ends in an underscore: `import_` for `import`.

    Args:
        package: The package's name.
        names: Of the actions, in the order of the help.
        aliases: Other name -> action.

    Returns:
        The pair to bind as `add_arguments, run` in the command's module. What `run` gives is the exit code.

    Example:
        >>> add_arguments, run = subcommands("styrax.core.commands", ("explain", "doctor"))
        >>> parser = argparse.ArgumentParser("styrax core")
        >>> add_arguments(parser)
        >>> parser.parse_args(["doctor", "--json"]).action
        'doctor'
    """
    names = tuple(names)
    others = {name: [alias for alias, of in (aliases or {}).items() if of == name] for name in names}

    def load(name: str) -> Any:
        return importlib.import_module(f"{package}.{name}{'_' * keyword.iskeyword(name)}")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the actions."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for name in names:
            module = load(name)
            action = actions.add_parser(name, aliases=others[name], help=module.HELP, description=module.HELP)
            module.add_arguments(action)
            action.set_defaults(action=name)

    def run(args: argparse.Namespace) -> int:
        """Run the action that was named; gives the exit code."""
        return int(load(args.action).run(args) or 0)

    return add_arguments, run
