"""A tree of plain values to config dataclasses, with every mistake found in one pass."""

import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from styrax.core.config import types
from styrax.core.config.toml import Bare, literal
from styrax.core.errors import UsageError, nearest

T = TypeVar("T")
_FAILED = object()


def build(cls: type[T], tree: Mapping[str, Any], path: str = "") -> T:
    """Make a config dataclass from a tree of plain values.

    A nested table changes only the keys that it names of the field's default, as long as it has the same
    `kind`; a `dict` or `tuple` field is replaced as a whole. TOML has no null: the string `"none"` is `None`
    where that is allowed.

    Args:
        cls: A dataclass; its annotations say what is right (see `styrax.core.config`).
        tree: Key -> value, as TOML gives them.
        path: The dotted path of the whole, for error texts.

    Returns:
        An instance of `cls`.

    Raises:
        UsageError: Unknown or missing keys, wrong types, broken limits, failed cross-field checks; all are
            listed by dotted path, with what was expected, what was got, and the nearest right key.

    Example:
        >>> from styrax.core.mesh import MeshConfig
        >>> build(MeshConfig, {"axes": {"data": 2}})
        MeshConfig(axes={'data': 2}, dcn={})
        >>> build(MeshConfig, {"axis": {}, "axes": {"data": "two"}}, "mesh")
        Traceback (most recent call last):
        styrax.core.errors.UsageError: mesh.axis: unknown key (did you mean 'axes'?)
        mesh.axes.data: expected integer, got "two"
    """
    problems: list[str] = []
    made = table(cls, tree, path, problems)
    if problems:
        raise UsageError("\n".join(problems))
    return made


def table(cls: type, tree: Any, path: str, problems: list[str], base: Any = None) -> Any:
    """Make one dataclass, appending to `problems` instead of raising.

    Args:
        cls: The dataclass.
        tree: Its keys.
        path: Its dotted path.
        problems: Gets one line (or more, for a cross-field check) per mistake.
        base: An instance whose values stand where `tree` has none, in place of the class's defaults.
    """
    if not isinstance(tree, Mapping):
        problems.append(f"{path}: expected table, got {literal(tree)}")
        return _FAILED
    before = len(problems)
    known, spelled = types.hints(cls), {}
    for name, key in types.spellings(cls).items():
        if key not in tree:
            continue
        if name in tree:
            problems.append(f"{_dot(path, key)}: it says what {_dot(path, name)} says; leave one of them out")
        spelled[name] = key
        tree = {name if k == key else k: value for k, value in tree.items()}
    for key in tree:
        if key not in known:
            near = nearest(key, known)
            problems.append(f"{_dot(path, key)}: unknown key{near or '; known: ' + ', '.join(known)}")
    values = {}
    for name, annotation in known.items():
        fallback = types.default(cls, name) if base is None else getattr(base, name)
        if name in tree:
            here = _dot(path, spelled.get(name, name))
            values[name] = _value(annotation, tree[name], here, problems, fallback)
        elif fallback is dataclasses.MISSING:
            problems.append(f"{_dot(path, name)}: missing, expected {types.words(annotation)}")
        else:
            values[name] = fallback
    if len(problems) > before:
        return _FAILED
    try:
        return cls(**values)
    except ValueError as error:
        problems += [f"{path}: {line}" if path else line for line in str(error).splitlines()]
        return _FAILED


def check(config: Any, *also: str) -> None:
    """Refuse a config made in Python whose values its annotations do not allow, as `build` does; for `__post_init__`.

    Args:
        config: A config dataclass, all fields set. Configs within it have checked themselves.
        also: What else is wrong, to be told with the rest.

    Raises:
        UsageError: Wrong types and broken limits, a line each.

    Example:
        >>> from styrax.core.config import PositiveFloat
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Part:
        ...     rate: PositiveFloat = 1.0
        ...
        ...     def __post_init__(self):
        ...         check(self)
        >>> Part(rate=float("inf"))
        Traceback (most recent call last):
        styrax.core.errors.UsageError: rate: expected number > 0.0, got inf: numbers must be finite
    """
    allowed = types.hints(type(config)).items()
    if problems := [*mistakes({name: (annotation, getattr(config, name)) for name, annotation in allowed}), *also]:
        raise UsageError("\n".join(problems))


def mistakes(arguments: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Hold arguments of a function to annotations, in the words in which a config's fields are.

    Args:
        arguments: Name -> annotation and value.

    Returns:
        A line for each wrong one.

    Example:
        >>> from styrax.core.config import Positive, PositiveFloat
        >>> mistakes({"steps": (Positive, 2.5), "rate": (PositiveFloat, 1e-3)})
        ['steps: expected integer >= 1, got 2.5']
    """
    problems: list[str] = []
    for name, (annotation, value) in arguments.items():
        before = len(problems)
        _value(annotation, value, name, problems, dataclasses.MISSING)
        if len(problems) == before:  # what a file may say with a table, Python says with the class
            problems += _tables_for_classes(annotation, value, name)
    return problems


def _tables_for_classes(annotation: Any, value: Any, path: str) -> list[str]:
    by_name = types.held(annotation)
    if by_name and isinstance(value, Mapping):
        found = [(f"{path}.{key}", item, by_name) for key, item in value.items()]
    else:
        found = [(path, value, types.tables(annotation))]
    return [
        f"{where}: expected {' or '.join(f'{cls.__name__}(...)' for cls in classes.values())}, got {literal(item)}"
        for where, item, classes in found
        if classes and isinstance(item, Mapping)
    ]


def plain(value: Any) -> Any:
    """Turn configs into dicts of plain values, the inverse of `build`.

    Example:
        >>> from styrax.core.mesh import MeshConfig
        >>> plain(MeshConfig())
        {'axes': {'data': -1}, 'dcn': {}}
    """
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in types.hints(type(value))}  # pyright: ignore
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def changed(value: Any, base: Any = None) -> dict[str, Any]:
    """Give the part of a config that `build` needs to make it again.

    Args:
        value: A config dataclass.
        base: What it is compared with; the class's defaults by default.
    """
    cls = type(value)
    result: dict[str, Any] = {}
    for name in types.hints(cls):
        mine = getattr(value, name)
        other = types.default(cls, name) if base is None else getattr(base, name)
        if dataclasses.is_dataclass(mine):
            same = type(mine) is type(other)
            part = changed(mine, other if same else None)
            if not same and types.kind(type(mine)):
                part = {"kind": types.kind(type(mine)), **part}
            if part or not same:
                result[name] = part
        elif other is dataclasses.MISSING or plain(mine) != plain(other):
            result[name] = {key: _changed_item(item) for key, item in mine.items()} if _is_table(mine) else plain(mine)
    return result


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and any(dataclasses.is_dataclass(item) for item in value.values())


def _changed_item(item: Any) -> Any:
    kind = types.kind(type(item))
    return {**({"kind": kind} if kind else {}), **changed(item)}


def _value(annotation: Any, value: Any, path: str, problems: list[str], fallback: Any) -> Any:
    if types.allows_none(annotation) and _is_none(value):
        return None
    tables = types.tables(annotation)
    if tables and dataclasses.is_dataclass(value) and not isinstance(value, Bare):
        return value  # made in Python, perhaps of the user's own class
    if tables and isinstance(value, Mapping):
        return _tagged(tables, value, path, problems, fallback)
    for member in types.members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            for key in value if args[0] is not str else ():
                _leaf(args[0], key, f"{path}: key {key}" if path else f"key {key}", problems)
            return {
                key: _value(args[1], item, _dot(path, key), problems, dataclasses.MISSING)
                for key, item in value.items()
            }
        if origin in (tuple, list, Sequence) and isinstance(value, (list, tuple)):
            return _items(member, value, path, problems)
    return _leaf(annotation, value, path, problems)


def _tagged(tables: dict[str, type], value: Mapping[str, Any], path: str, problems: list[str], fallback: Any) -> Any:
    base = next((cls for cls in tables.values() if type(fallback) is cls), None)
    if "kind" in value and any(types.kind(cls) for cls in tables.values()):
        wanted = _text(value["kind"])
        if wanted not in tables:
            expected = " or ".join(map(literal, tables))
            near = nearest(str(wanted), tables)
            problems.append(f"{path}.kind: expected {expected}, got {literal(value['kind'])}{near}")
            return _FAILED
        cls = tables[wanted]
    elif base is not None or len(tables) == 1:
        cls = base or next(iter(tables.values()))
    else:
        problems.append(f"{path}.kind: missing, expected {' or '.join(map(literal, tables))}")
        return _FAILED
    return table(cls, value, path, problems, fallback if cls is base else None)


def _items(annotation: Any, value: Sequence[Any], path: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and Ellipsis not in args:
        if len(value) != len(args):
            problems.append(f"{path}: expected {types.words(annotation)}, got {literal(value)}")
            return _FAILED
        annotations = list(args)
    else:
        annotations = [args[0]] * len(value)
    found = [
        _value(each, item, f"{path}[{number}]", problems, dataclasses.MISSING)
        for number, (each, item) in enumerate(zip(annotations, value))
    ]
    return tuple(found) if origin is tuple else found


def _leaf(annotation: Any, value: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, Bare):
        if not types.allows_text(annotation):
            problems.append(
                f"{path}: expected {types.words(annotation)}, got {value.text}, which is not a TOML value "
                f"({_instead(annotation, value.text, path)})"
            )
            return _FAILED
        value = value.text
    elif getattr(value, "shape", None) == ():  # a numpy or jax scalar
        value = value.item()
    elif isinstance(value, Path):
        value = str(value)
    outside = _outside(value)
    if outside and Any not in types.members(annotation):
        problems.append(f"{path}: expected {types.words(annotation)}, got {outside}")
        return _FAILED
    # Tables and lists were looked into before: what is left to msgspec is scalars, and types without arguments.
    scalars = [each for each in types.members(annotation) if not _is_container(each)]
    try:
        if not scalars:
            raise msgspec.ValidationError
        return msgspec.convert(value, typing.Union[tuple(scalars)], dec_hook=_path)  # noqa: UP007
    except msgspec.ValidationError:
        choices = [str(c) for member in types.members(annotation) for c in typing.get_args(member)]
        near = nearest(value, choices) if isinstance(value, str) else ""
        if isinstance(value, (bool, int, float)) and types.allows_text(annotation):
            near += f" (text is written {literal(literal(value))})"
        problems.append(f"{path}: expected {types.words(annotation)}, got {literal(value)}{near}")
        return _FAILED


def _outside(value: Any) -> str:
    # What TOML can write and nothing here can use: integers have 64 bits in TOML too, Python's have no limit.
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}: numbers must be finite"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"an integer of {value.bit_length()} bits: 64 are the most"
    return ""


def _instead(annotation: Any, text: str, path: str) -> str:
    if text in types.tables(annotation):
        return f"write {path}.kind={text}"
    for attempt in (text.lower(), f"0{text}", f"{text}0", text.replace(",", "")):
        try:
            msgspec.convert(tomllib.loads(f"x={attempt}")["x"], annotation)
        except ValueError:
            continue
        return f"write {attempt}"
    return f"text would be written '{literal(text)}'"


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    raise NotImplementedError(f"no config value has type {kind}")


def _is_container(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return dataclasses.is_dataclass(annotation) or origin in (dict, Mapping, tuple, list, Sequence)


def _is_none(value: Any) -> bool:
    if isinstance(value, Bare):
        return value.text.lower() in ("none", "null")
    return value is None or value == "none"


def _text(value: Any) -> Any:
    return value.text if isinstance(value, Bare) else value


def _dot(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
