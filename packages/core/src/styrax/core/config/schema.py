"""Which sections a run's file has, and what a file and overrides resolve to."""

import dataclasses
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
    """

    group: str
    default: str | None = None


@dataclass(frozen=True)
class Resolved:
    """A whole configuration: every section checked and complete.

    Attributes:
        sections: Section -> its dataclass instance.
        kinds: Section -> kind, for those that are a choice.
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
        """Give everything as plain values: `schema.resolve(resolved.to_dict()) == resolved`."""
        return {name: self._tagged(name, convert.plain(config)) for name, config in self.sections.items()}

    def diff(self) -> dict[str, Any]:
        """Give only what differs from the defaults; resolving it gives this again."""
        result = {}
        for name, config in self.sections.items():
            part = convert.changed(config)
            choice = self.schema.sections[name]
            if isinstance(choice, Choice) and self.kinds[name] != choice.default:
                part = self._tagged(name, part)
            if part:
                result[name] = part
        return result

    def to_toml(self, all: bool = True) -> str:
        """Write TOML that resolves to this again.

        Args:
            all: Every key, or only those that differ from the defaults.
        """
        return toml.dumps(self.to_dict() if all else self.diff())

    def _tagged(self, name: str, part: dict[str, Any]) -> dict[str, Any]:
        if name not in self.kinds:
            return part
        return {"kind": self.kinds[name], **{key: value for key, value in part.items() if key != "kind"}}


@dataclass(frozen=True)
class Schema:
    """The sections of a kind of run; an entry point in `styrax.schemas`.

    Attributes:
        sections: Name -> config dataclass, or a `Choice` of one by kind.
        misfits: Given the resolved sections by name, a line for each problem that no section sees alone. It is asked
            by `Resolved.check`, not when an old run is read, which may lack what only training needs.
    """

    sections: Mapping[str, type | Choice]
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
        if not isinstance(section, Choice):
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
            cls: Any = section
            if isinstance(section, Choice):
                kind = given.get("kind", section.default)
                kind = kind.text if isinstance(kind, toml.Bare) else kind
                if kind is None and not given:
                    continue
                cls = self._chosen(name, section, kind, problems)
                if cls is None:
                    continue
                kinds[name] = str(kind)
                given = {key: value for key, value in given.items() if key != "kind"}
            sections[name] = convert.table(cls, given, name, problems)
        if problems:
            raise UsageError("\n".join(problems))
        return Resolved(sections, kinds, self)

    def _chosen(self, name: str, choice: Choice, kind: Any, problems: list[str]) -> type | None:
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
        return cls


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
    return f"kind from {section.group}" if isinstance(section, Choice) else types.words(section)
