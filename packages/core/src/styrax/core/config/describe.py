"""What there is to know about a config key: type, default, limits and the text of its docstring."""

import dataclasses
import inspect
import re
from dataclasses import dataclass, field
from typing import Any

from styrax.core import registry
from styrax.core.config import convert, types
from styrax.core.config.schema import Choice, Named, Resolved, Schema, section_words
from styrax.core.errors import UsageError, nearest

_UNSET = dataclasses.MISSING


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key, section or table.

    Attributes:
        path: Dotted.
        type: What it takes, in words.
        constraint: The limits alone.
        doc: Its text.
        default: Its default, `dataclasses.MISSING` when it must be given.
        value: What a given configuration sets it to, `dataclasses.MISSING` without one.
        keys: What a section or table holds.
    """

    path: str
    type: str
    constraint: str = ""
    doc: str = ""
    default: Any = field(default_factory=lambda: _UNSET)
    value: Any = field(default_factory=lambda: _UNSET)
    keys: list["Entry"] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Give it as JSON values; an unset default or value has no key."""
        result: dict[str, Any] = {"path": self.path, "type": self.type}
        result |= {"constraint": self.constraint, "doc": self.doc}
        for name in ("default", "value"):
            if getattr(self, name) is not _UNSET:
                result[name] = convert.plain(getattr(self, name))
        if self.keys:
            result["keys"] = [entry.to_dict() for entry in self.keys]
        return result


def attributes(cls: type) -> dict[str, str]:
    """Give the text of each entry in the `Attributes:` section of a class's docstring, and of its bases'.

    Example:
        >>> from styrax.core.trackers import JsonlConfig
        >>> attributes(JsonlConfig)
        {'name': 'File name.'}
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        lines = inspect.cleandoc(base.__dict__.get("__doc__") or "").splitlines()
        name = None
        for line in lines[lines.index("Attributes:") + 1 :] if "Attributes:" in lines else ():
            if line and not line.startswith(" "):
                break
            start = re.match(r" {1,4}(\w+)(?: \(.*?\))?:(?: |$)(.*)", line)
            if start and not line.startswith(" " * 5):
                name, found[start[1]] = start[1], start[2].strip()
            elif name and line.strip():
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def describe(schema: Schema, path: str, resolved: Resolved | None = None) -> Entry:
    """Find what a dotted path names.

    Args:
        schema: The sections.
        path: `section`, `section.key`, deeper keys, or `""` for the list of sections.
        resolved: Gives the values, and the kinds of parts.

    Raises:
        UserError: No such key (with the nearest one), or its part is not installed.
    """
    if not path:
        keys = [Entry(path=name, type=section_words(part)) for name, part in schema.sections.items()]
        return Entry(path="", type="sections", keys=keys)
    section, *rest = path.split(".")
    name, choice, base = section, schema.sections.get(section), None
    value: Any = resolved.sections.get(name, _UNSET) if resolved else _UNSET
    if isinstance(choice, Named):
        key, *rest = rest or ["NAME"]
        name, value = f"{section}.{key}", _UNSET if value is _UNSET else value.get(key, _UNSET)
    set_to = resolved.kinds.get(name, _UNSET) if resolved else _UNSET
    meant = choice.implied.get(rest[0]) if isinstance(choice, Choice) and rest else None
    cls = schema.section_class(section, meant or (None if set_to is _UNSET else set_to))
    kind = None
    if isinstance(choice, (Choice, Named)):
        kind = Entry(
            path=f"{name}.kind",
            type=f"one of {', '.join(registry.names(choice.group))}",
            doc=f"Which entry point of {choice.group} this section configures.",
            default=choice.default,
            value=set_to,
        )
        if rest == ["kind"] or cls is None:
            return kind
    assert cls is not None
    if isinstance(choice, Named):  # defaults are the section's, not the class's
        base = convert.table(cls, choice.silent(cls, {}), name, [])
        base = base if isinstance(base, cls) else None
    entry = _walk(cls, name, rest, value, base)
    if kind and not rest:
        keys = [kind, *(key for key in entry.keys if key.path != kind.path)]
        return dataclasses.replace(entry, keys=keys)
    return entry


def _walk(cls: type, path: str, rest: list[str], value: Any, base: Any) -> Entry:
    known = types.hints(cls)
    if not rest:
        doc = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("\n")[0]
        keys = [_entry(cls, path, name, value, base) for name in known]
        return Entry(path=path, type=types.words(cls), doc=doc, keys=keys)
    key, *rest = rest
    key = {spelling: name for name, spelling in types.spellings(cls).items()}.get(key, key)
    if key not in known:
        raise UsageError(f"{path}.{key}: unknown key{nearest(key, known)}; known: {', '.join(known)}")
    entry = _entry(cls, path, key, value, base)
    tables = list(types.tables(known[key]).values())
    if by_name := list(types.held(known[key]).values()):
        name, *rest = rest or ["NAME"]
        item = entry.value.get(name, _UNSET) if isinstance(entry.value, dict) else _UNSET
        fitting = (table for table in by_name if rest and rest[0] in types.hints(table))
        cls = type(item) if type(item) in by_name else next(fitting, by_name[0])
        found = _walk(cls, f"{entry.path}.{name}", rest, item, None)
        return found if rest or name != "NAME" else dataclasses.replace(entry, keys=found.keys)
    if not tables:
        if rest and "table" not in entry.type:
            raise UsageError(f"{entry.path}.{rest[0]}: {entry.path} is no table, it takes {entry.type}")
        return entry
    # The member in use first, then the default's, then whichever has the key.
    tables.sort(key=lambda table: (table is not type(entry.value), table is not type(entry.default)))
    chosen = next((table for table in tables if rest and rest[0] in types.hints(table)), tables[0])
    value = entry.value if type(entry.value) is chosen else _UNSET
    base = entry.default if type(entry.default) is chosen else None
    if rest:
        return _walk(chosen, entry.path, rest, value, base)
    keys = {key.path: key for key in _walk(chosen, entry.path, [], value, base).keys}
    for table in tables:
        keys = {key.path: key for key in _walk(table, entry.path, [], _UNSET, None).keys} | keys
    return dataclasses.replace(entry, keys=list(keys.values()))


def _entry(cls: type, path: str, name: str, value: Any, base: Any) -> Entry:
    annotation = types.hints(cls)[name]
    return Entry(
        path=f"{path}.{name}",
        type=types.words(annotation),
        constraint=types.constraint(annotation),
        doc=attributes(cls).get(name, ""),
        default=types.default(cls, name) if base is None else getattr(base, name),
        value=_UNSET if not hasattr(value, name) else getattr(value, name),
    )
