"""Imports one entry point in a process of its own and prints, as JSON, what is wrong with it.

    python tools/probe.py GROUP MODULE[:ATTRIBUTE]

A group is an entry-point group of the workspace, `console_scripts`, or `package`: a library's import package,
which must import as cheaply as a command, and hand on every name in its `__all__`.
"""

import dataclasses
import importlib
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Literal

#: `styrax --help` and a mistyped key are answered before any of these is loaded.
HEAVY = ("flax", "grain", "jax", "matplotlib", "optax", "orbax", "tokenizers")


def is_command(found: Any) -> Iterator[str]:
    """Yield what a command module lacks."""
    if not isinstance(found, ModuleType):
        yield "is not a module"
        return
    if not isinstance(getattr(found, "HELP", None), str):
        yield "has no HELP, its one line of help"
    for name in ("add_arguments", "run"):
        if not callable(getattr(found, name, None)):
            yield f"has no function {name}"


def is_tag(kind: Any) -> bool:
    """Tell whether a type has one possible value."""
    return typing.get_origin(kind) is Literal and len(typing.get_args(kind)) == 1


def is_config(found: Any) -> Iterator[str]:
    """Yield what keeps a class from being a part's configuration."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        yield "is not a dataclass"
        return
    if not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield "is not frozen"
    # A tag with one possible value selects the class; it is no setting.
    tags = {name for name, kind in typing.get_type_hints(found).items() if is_tag(kind)}
    fields = [field for field in dataclasses.fields(found) if field.name not in tags]
    if positional := [field.name for field in fields if field.init and not field.kw_only]:
        yield f"takes {', '.join(positional)} by position: it must be kw_only"
    if len(fields) > 15:
        yield f"has {len(fields)} fields, at most 15 are allowed"
    if not callable(getattr(found, "build", None)):
        yield "has no method build"


def is_schema(found: Any) -> Iterator[str]:
    """Yield what keeps an object from naming the sections of a configuration file."""
    if not isinstance(getattr(found, "sections", None), Mapping):
        yield "has no sections, a mapping of their names to what they hold"


def is_recipe(found: Any) -> Iterator[str]:
    """Yield what keeps an object from being a complete configuration."""
    if not isinstance(getattr(found, "doc", None), str):
        yield "has no doc, its one line of help"
    if not hasattr(getattr(found, "path", None), "read_text"):
        yield "has no path, a file to read"


def is_callable(found: Any) -> Iterator[str]:
    """Yield what keeps an object from being a console script."""
    if not callable(found):
        yield "is not callable"


def is_package(found: Any) -> Iterator[str]:
    """Yield the names in `__all__` that cannot be had."""
    for name in getattr(found, "__all__", ()):
        try:
            getattr(found, name)
        except Exception as error:
            yield f"exports {name}, which fails: {type(error).__name__}: {error}"


KINDS: dict[str, Callable[[Any], Iterator[str]]] = {
    "console_scripts": is_callable,
    "package": is_package,
    "styrax.checkpoint": is_config,
    "styrax.commands": is_command,
    "styrax.data": is_config,
    "styrax.models": is_config,
    "styrax.optim": is_config,
    "styrax.recipes": is_recipe,
    "styrax.schemas": is_schema,
    "styrax.trackers": is_config,
}


def problems(group: str, target: str) -> Iterator[str]:
    """Yield everything that is wrong with one entry point."""
    if group not in KINDS:
        yield f"is in an unknown group; known are {', '.join(sorted(KINDS))}"
        return
    module, _, attribute = target.partition(":")
    try:
        found = importlib.import_module(module)
        for name in filter(None, attribute.split(".")):
            found = getattr(found, name)
    except Exception as error:
        yield f"cannot be imported: {type(error).__name__}: {error}"
        return
    if loaded := [name for name in HEAVY if name in sys.modules]:
        yield f"loads {', '.join(loaded)}: import inside the function that needs it"
    yield from KINDS[group](found)


if __name__ == "__main__":
    print(json.dumps(list(problems(*sys.argv[1:]))))
