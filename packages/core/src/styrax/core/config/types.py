"""What the annotation of a config field allows, as data and in words."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import msgspec

from styrax.core.config.toml import literal

_WORDS = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    Path: "path",
    Any: "anything",
}


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Give the annotation of every field that a constructor takes, by name, in order."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls) if field.init}


@functools.cache
def spellings(cls: type) -> dict[str, str]:
    """Give the other names by which files may call fields, by field: `field(metadata={"spelling": "from"})`.

    For words that Python keeps for itself. The field's own name is right too.
    """
    return {field.name: field.metadata["spelling"] for field in dataclasses.fields(cls) if "spelling" in field.metadata}


def default(cls: type, name: str) -> Any:
    """Give a field's default, or `dataclasses.MISSING`."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def members(annotation: Any) -> list[Any]:
    """Split a union into its members; any other annotation is the one member."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in members(member)]
    return [annotation]


def tables(annotation: Any) -> dict[str, type]:
    """Give the dataclasses that an annotation allows, by kind (their name when they have none)."""
    found = [each for each in members(annotation) if isinstance(each, type)]
    return {kind(cls) or cls.__name__: cls for cls in found if dataclasses.is_dataclass(cls)}


def held(annotation: Any) -> dict[str, type]:
    """Give the dataclasses that a table of them by name allows, as `tables` does; empty for anything else."""
    return {
        name: cls
        for member in members(annotation)
        if typing.get_origin(member) in (dict, Mapping)
        for name, cls in tables(typing.get_args(member)[1]).items()
    }


def kind(cls: Any) -> str | None:
    """Give the tag of a union's member: the one value of its field `kind: Literal[...]`."""
    annotation = hints(cls).get("kind")
    values = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return values[0] if len(values) == 1 else None


def allows_none(annotation: Any) -> bool:
    """Tell whether a field may be left empty."""
    return any(member in (None, type(None)) for member in members(annotation))


def allows_text(annotation: Any) -> bool:
    """Tell whether some string is right, so that an unquoted word on a command line can be one."""
    for member in members(annotation):
        bare = _bare(member)
        if bare in (str, Path, Any):
            return True
        if typing.get_origin(bare) is Literal and any(isinstance(v, str) for v in typing.get_args(bare)):
            return True
    return False


def words(annotation: Any) -> str:
    """Say what a field takes.

    Example:
        >>> from typing import Annotated, Literal
        >>> words(Annotated[int, msgspec.Meta(ge=1)]), words(Literal["a", "b"]), words(float | None)
        ('integer >= 1', '"a" or "b"', 'number or "none"')
        >>> words(tuple[int, ...]), words(dict[str, float])
        ('list of (integer)', 'table of (number)')
    """
    return " or ".join(dict.fromkeys(_words(member) for member in members(annotation)))


def constraint(annotation: Any) -> str:
    """Give a field's limits alone, or the empty string.

    Example:
        >>> from typing import Annotated
        >>> constraint(Annotated[float, msgspec.Meta(ge=0, le=1)] | None)
        '>= 0.0, <= 1.0'
    """
    return "; ".join(filter(None, (_limits(member) for member in members(annotation))))


def _bare(annotation: Any) -> Any:
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _limits(annotation: Any) -> str:
    signs = {
        "gt": "> {}",
        "ge": ">= {}",
        "lt": "< {}",
        "le": "<= {}",
        "multiple_of": "a multiple of {}",
        "min_length": "length >= {}",
        "max_length": "length <= {}",
        "pattern": "matching {!r}",
    }
    metas = [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    found = [(sign, getattr(meta, name)) for meta in metas for name, sign in signs.items()]
    return ", ".join(sign.format(limit) for sign, limit in found if limit is not None)


def _words(annotation: Any) -> str:
    limits = _limits(annotation)
    annotation = _bare(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, type(None)):
        text = '"none"'
    elif origin is Literal:
        text = " or ".join(literal(value) for value in args)
    elif dataclasses.is_dataclass(annotation):
        tag = kind(annotation)
        text = f'table with kind = "{tag}"' if tag else "table"
    elif origin in (tuple, list, Sequence):
        items = [item for item in args if item is not Ellipsis]
        fixed = origin is tuple and Ellipsis not in args
        count = f"{len(items)} " if fixed else ""
        text = f"list of {count}({', '.join(words(item) for item in items)})"
    elif origin in (dict, Mapping):
        text = f"table of ({words(args[1])})"
    else:
        text = _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return f"{text} {limits}" if limits else text
