"""Which sections a run's file has, and what a file and overrides resolve to."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from styrax.core import registry
from styrax.core.config import convert, toml, types
from styrax.core.errors import UsageError, UserError, nearest


@dataclass(frozen=True)
class Choice:
    """A section whose key `kind` picks its dataclass from an entry-point group.

    Attributes:
        group: Such as `"styrax.models"`.
        default: The kind when none is named; `None` leaves the section out then.
        implied: Key -> the kind that a section with this key has, without naming it.
    """

    group: str
    default: str | None = None
    implied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A section of tables by name, `[section.NAME]`, each of which is a choice from an entry-point group.

    Attributes:
        group: Such as `"styrax.data"`.
        default: The kind where a table names none.
        like: An earlier section, from which a table takes some keys that it does not name.
        keys: These, as far as the table's kind has them too.
        defaults: Key -> value that stands in place of a kind's own default.
    """

    group: str
    default: str
    like: str
    keys: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def taken(self, cls: type, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Give the plain values that a table of a class has from the other section where it does not say its own."""
        known, like = types.hints(cls), sections.get(self.like)
        return {key: convert.plain(getattr(like, key)) for key in self.keys if key in known and hasattr(like, key)}

    def silent(self, cls: type, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Give the plain values of keys that a table does not name, where they are not the defaults of its class."""
        known = types.hints(cls)
        own = {key: value for key, value in self.defaults.items() if key in known}
        return own | self.taken(cls, sections)


@dataclass(frozen=True)
class Resolved:
    """A whole configuration: every section checked and complete.

    Attributes:
        sections: Section -> its dataclass instance; of a section of tables, name -> instance.
        kinds: Section -> kind, for those that are a choice; `section.name` for a table of a section of tables.
        schema: What the sections were checked against.
    """

    sections: dict[str, Any]
    kinds: dict[str, str]
    schema: "Schema" = field(repr=False, compare=False)

    def __getitem__(self, section: str) -> Any:
        return self.sections[section]

    def check(self) -> "Resolved":
        """Refuse sections that do not fit together, as the schema's `misfits` tells; for what would start a run.

        Returns:
            This.

        Raises:
            UsageError: All misfits.
        """
        found = list(self.schema.misfits(self.sections)) if self.schema.misfits else []
        if found:
            raise UsageError("\n".join(found))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values: `schema.resolve(resolved.to_dict()) == resolved`.

        Tables of a `Named` section lack what they take from the other section, so that they go on taking it.
        """
        return self._by_section(self._whole)

    def diff(self) -> dict[str, Any]:
        """Give only what differs from the defaults; resolving it gives this again."""
        found = self._by_section(self._changed)
        return {name: part for name, part in found.items() if part}

    def to_toml(self, all: bool = True) -> str:
        """Write TOML that resolves to this again.

        Args:
            all: Every key, or only those that differ from the defaults.
        """
        return toml.dumps(self.to_dict() if all else self.diff())

    def _by_section(self, give: Callable[[str, Any], dict[str, Any]]) -> dict[str, Any]:
        result = {}
        for name, config in self.sections.items():
            if not isinstance(self.schema.sections[name], Named):
                result[name] = give(name, config)
            elif config:
                result[name] = {key: give(f"{name}.{key}", each) for key, each in config.items()}
        return result

    def _whole(self, path: str, config: Any) -> dict[str, Any]:
        section, part = self.schema.sections[path.partition(".")[0]], convert.plain(config)
        if isinstance(section, Named):
            taken = section.taken(type(config), self.sections)
            part = {key: value for key, value in part.items() if key not in taken or value != taken[key]}
        return self._tagged(path, part)

    def _changed(self, path: str, config: Any) -> dict[str, Any]:
        name = path.partition(".")[0]
        section, part = self.schema.sections[name], convert.changed(config)
        if isinstance(section, Named):
            silent, mine = section.silent(type(config), self.sections), convert.plain(config)
            part = {k: value for k, value in part.items() if k not in silent}
            part |= {k: mine[k] for k, value in silent.items() if mine[k] != value}
        default = isinstance(section, (Choice, Named)) and self.kinds[path] == section.default
        return part if default else self._tagged(path, part)

    def _tagged(self, path: str, part: dict[str, Any]) -> dict[str, Any]:
        if path not in self.kinds:
            return part
        return {"kind": self.kinds[path], **{key: value for key, value in part.items() if key != "kind"}}


@dataclass(frozen=True)
class Schema:
    """The sections of a kind of run; an entry point in `styrax.schemas`.

    Attributes:
        sections: Name -> config dataclass, a `Choice` of one by kind, or `Named` tables of these.
        misfits: Given the resolved sections by name, a line for each problem that no section sees alone. It is asked
            by `Resolved.check`, not when an old run is read, which may lack what only training needs.
    """

    sections: Mapping[str, type | Choice | Named]
    misfits: Callable[[Mapping[str, Any]], Iterable[str]] | None = None

    def section_class(self, name: str, kind: str | None = None) -> type | None:
        """Give a section's dataclass.

        Args:
            name: The section.
            kind: For a choice, which one; its default when `None`.

        Returns:
            The class, or `None` for a choice that has no default.

        Raises:
            UserError: No such section, or the part is not installed.
        """
        if name not in self.sections:
            raise UsageError(
                f"{name}: unknown section{nearest(name, self.sections)}; known: {', '.join(self.sections)}"
            )
        section = self.sections[name]
        if not isinstance(section, (Choice, Named)):
            return section
        kind = kind or section.default
        return None if kind is None else registry.resolve(section.group, kind)

    def resolve(self, tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Resolved:
        """Check a tree of plain values against the schema and fill in the defaults.

        Args:
            tree: Section -> key -> value.
            overrides: `section.key=value`, set over `tree` in order.

        Returns:
            All sections.

        Raises:
            UsageError: All mistakes in all sections, a line or more each.

        Example:
            >>> from styrax.core.mesh import MeshConfig
            >>> schema = Schema(sections={"mesh": MeshConfig})
            >>> schema.resolve({}, ["mesh.axes.data=4"]).sections["mesh"]
            MeshConfig(axes={'data': 4}, dcn={})
        """
        tree = toml.override(tree, overrides)
        problems: list[str] = []
        sections: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        for name in tree:
            if name not in self.sections:
                near = nearest(name, self.sections)
                problems.append(f"{name}: unknown section{near or '; known: ' + ', '.join(self.sections)}")
        for name, section in self.sections.items():
            given = tree.get(name, {})
            if not isinstance(given, Mapping):
                problems.append(f"{name}: expected table, got {toml.literal(given)}")
                continue
            if isinstance(section, Named):
                sections[name] = {}
                for key, part in given.items():
                    path = f"{name}.{key}"
                    if not re.fullmatch(r"[\w-]+", key):
                        problems.append(f"{name}.{toml.literal(key)}: expected a name of letters, digits, _ and -")
                    elif not isinstance(part, Mapping):
                        problems.append(f"{path}: expected table, got {toml.literal(part)}")
                    elif (cls := self._chosen(path, section, part, problems, kinds)) is not None:
                        part = {**section.silent(cls, sections), **_untagged(part)}
                        sections[name][key] = convert.table(cls, part, path, problems)
            elif not isinstance(section, Choice):
                sections[name] = convert.table(section, given, name, problems)
            elif given or section.default is not None:
                cls = self._chosen(name, section, given, problems, kinds)
                if cls is not None:
                    sections[name] = convert.table(cls, _untagged(given), name, problems)
        if problems:
            raise UsageError("\n".join(problems))
        return Resolved(sections, kinds, self)

    def _chosen(
        self, name: str, choice: Choice | Named, given: Mapping[str, Any], problems: list[str], kinds: dict[str, str]
    ) -> type | None:
        implied = choice.implied if isinstance(choice, Choice) else {}
        means = {key: implied[key] for key in given if key in implied}
        kind = given.get("kind", next(iter(means.values()), choice.default))
        kind = kind.text if isinstance(kind, toml.Bare) else kind
        against = [key for key, meant in means.items() if meant != kind]
        for key in against:
            named = toml.literal(kind)
            problems.append(
                f"{name}.{key}: it means kind = {toml.literal(means[key])}, and {name}.kind is {named}; leave one out"
            )
        if against:
            return None
        if not isinstance(kind, str):
            offered = registry.names(choice.group)
            got = "missing" if kind is None else f"got {toml.literal(kind)}"
            problems.append(f"{name}.kind: expected one of {', '.join(map(toml.literal, offered))}; {got}")
            return None
        try:
            cls = registry.resolve(choice.group, kind)
        except UserError as error:
            problems.append(f"{name}.kind: {error}")
            return None
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            problems.append(f"{name}.kind: {kind!r} in {choice.group} is {cls!r}, not a config dataclass")
            return None
        kinds[name] = kind
        return cls


def _untagged(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "kind"}


class Readable(Protocol):
    """A `pathlib.Path`, or a file inside an installed package (`importlib.resources`)."""

    def read_bytes(self) -> bytes:
        """Give the contents."""
        ...


@dataclass(frozen=True)
class Recipe:
    """A named configuration that a distribution ships; an entry point in `styrax.recipes`.

    Attributes:
        name: What a user types.
        path: Its TOML file.
        doc: One line for a list.
    """

    name: str
    path: Readable
    doc: str


def find_schema(name: str = "train") -> Schema:
    """Give an installed schema by name.

    Raises:
        UsageError: Nothing in `styrax.schemas` has that name; says what to install.
    """
    return registry.resolve("styrax.schemas", name)


def read(source: str | Path) -> dict[str, Any]:
    """Read a recipe by name, or a file whose name ends in `.toml`, unchecked.

    Args:
        source: The name or the file.

    Raises:
        UsageError: No such recipe or file (with the nearest name), or not TOML (with line and column).
    """
    if str(source).endswith(".toml"):
        path: Readable = Path(source)
        label = str(source)
    else:
        recipe = _recipe(str(source))
        path, label = recipe.path, f"recipe {recipe.name}"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no file {label}{_beside(label)}") from None
    except IsADirectoryError:
        raise UsageError(f"{label} is a folder, expected a TOML file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{label}:{line}: not UTF-8 text ({error.reason})") from None
    return toml.parse(text, label)


def read_config(schema: Schema, source: str | Path | None, overrides: Iterable[str] = ()) -> Resolved:
    """Resolve a recipe or a file with overrides.

    Args:
        schema: From `find_schema`, or your own.
        source: A recipe's name, a `.toml` file, or `None` for the defaults alone.
        overrides: `section.key=value`, later ones over earlier ones.

    Raises:
        UsageError: Every mistake in the file and the overrides.
    """
    return schema.resolve({} if source is None else read(source), overrides)


def _recipe(name: str) -> Recipe:
    offered = registry.names("styrax.recipes")
    if name not in offered and Path(name).exists():
        raise UsageError(f"no recipe named {name!r}; a file's name must end in .toml")
    return registry.resolve("styrax.recipes", name)


def _beside(name: str) -> str:
    folder = Path(name).parent
    beside = sorted(path.name for path in folder.glob("*.toml")) if folder.is_dir() else []
    listed = f"; in {folder}: {', '.join(beside[:10])}" if beside else ""
    return nearest(Path(name).name, beside) + listed


def section_words(section: Any) -> str:
    """Say what a section is, for a list of sections."""
    if isinstance(section, Named):
        return f"tables by name, each of a kind from {section.group}"
    return f"kind from {section.group}" if isinstance(section, Choice) else types.words(section)
