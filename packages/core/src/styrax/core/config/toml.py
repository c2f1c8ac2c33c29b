"""TOML text to a tree and back, and `a.b=value` overrides."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from styrax.core.errors import UsageError

_WIDTH = 100


@dataclass(frozen=True)
class Bare:
    """An override's value that is not TOML, such as an unquoted word; text fields take it as it is.

    Attributes:
        text: What was written.
    """

    text: str


def parse(text: str, name: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: The document.
        name: The file's name, for the error text.

    Raises:
        UsageError: A syntax error, with file, line, column and the line itself.

    Example:
        >>> parse("[train]\\nsteps = 3", "run.toml")
        {'train': {'steps': 3}}
        >>> parse("[train]\\nsteps = three", "run.toml")
        Traceback (most recent call last):
        styrax.core.errors.UsageError: run.toml:2:9: Invalid value
          steps = three
                  ^
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rstrip(")").rpartition(" (at ")
        lines = text.rstrip("\n").split("\n")
        numbers = [int(word.rstrip(",")) for word in place.split() if word.rstrip(",").isdigit()]
        line, column = numbers if len(numbers) == 2 else (len(lines), len(lines[-1]) + 1)
        shown = lines[line - 1].expandtabs(1) if line <= len(lines) else ""
        raise UsageError(f"{name}:{line}:{column}: {message}\n  {shown}\n  {' ' * (column - 1)}^") from None
    except ValueError:
        raise UsageError(f"{name}: an integer has thousands of digits; 64 bits are the most") from None


def override(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set `a.b=value` overrides in a tree, later ones over earlier ones; the tree itself is left as it is.

    Args:
        tree: As `parse` gives it.
        overrides: Keys as in TOML (`optim.schedule.kind`), values as in TOML, or a `Bare` word.

    Returns:
        A new tree.

    Raises:
        UsageError: Some are not of that form or reach into a value; all are listed.

    Example:
        >>> override({"train": {"steps": 3}}, ["train.steps=5", "train.dir=runs/a"])
        {'train': {'steps': 5, 'dir': Bare(text='runs/a')}}
    """
    result = _copy(tree)
    problems = []
    for item in overrides:
        try:
            _check_utf8(item)
            path, value = _split(item)
            _set(result, path, value)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return result


def dumps(tree: Mapping[str, Any]) -> str:
    """Write a tree as TOML, short lists on one line, `None` as the string `"none"`.

    Example:
        >>> print(dumps({"optim": {"betas": (0.9, 0.95), "clip": None}}), end="")
        [optim]
        betas = [0.9, 0.95]
        clip = "none"
    """
    lines: list[str] = []
    pending: list[str] = []
    for line in tomli_w.dumps(_no_none(tree)).split("\n"):  # other line breaks stay inside strings
        if pending or line.endswith(" = ["):
            pending.append(line)
            if line == "]":
                joined = pending[0] + " ".join(item.strip() for item in pending[1:-1]).rstrip(",") + "]"
                lines += [joined] if len(joined) <= _WIDTH else pending
                pending = []
        else:
            lines.append(line)
    return "\n".join(lines)


def literal(value: Any) -> str:
    """Write one value as TOML, for messages.

    Example:
        >>> literal("fast"), literal([1, True]), literal({"a": 0.5}), literal(Bare("fast"))
        ('"fast"', '[1, true]', '{a = 0.5}', 'fast')
    """
    if isinstance(value, Bare):
        return value.text
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if value is None:
        return '"none"'
    try:
        return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
    except TypeError:
        return repr(value)


def _check_utf8(item: str) -> None:
    try:
        item.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no text arrive as lone surrogates
        raise ValueError(f"{item!r} is not UTF-8 text; write it in UTF-8") from None


def _split(item: str) -> tuple[list[str], Any]:
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{item!r} is not an override: expected key=value, such as train.steps=100")
    try:
        path = _only_path(tomllib.loads(f"{key}=0"))
    except ValueError:
        raise ValueError(f"{item!r}: {key.strip()!r} is not a dotted key, such as train.steps") from None
    try:
        document = tomllib.loads(f"value={text}")
    except tomllib.TOMLDecodeError:
        document = {}
    # A line break in the value could hide further keys: such a value is not one TOML value.
    return path, document["value"] if len(document) == 1 else Bare(text.strip())


def _only_path(tree: dict[str, Any]) -> list[str]:
    path = []
    while isinstance(tree, dict):
        (key, tree), *rest = tree.items()
        if rest:
            raise ValueError("several keys")
        path.append(key)
    return path


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for depth, key in enumerate(path[:-1], 1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{'.'.join(path)}: {'.'.join(path[:depth])} is {literal(tree)}, not a table")
    tree[path[-1]] = value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _no_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _no_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_no_none(item) for item in value]
    return "none" if value is None else value
