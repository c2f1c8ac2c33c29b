"""One record: from what a reader or a user hands over to an id and a text, or to why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from styrax.core.errors import nearest
from styrax.data.build.quarantine import EXCERPT_CHARS, Refused

Errors = Literal["raise", "replace", "skip"]


@dataclass(frozen=True, slots=True)
class Record:
    """A document on its way into a store.

    Attributes:
        id: What it is called.
        text: What it says.
        fields: Everything that its source says of it, for filters.
    """

    id: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """How sources are read.

    Attributes:
        text: The field that holds a record's text.
        id: The field that holds its id; `None` numbers the records of each file.
        errors: What to do with bytes that are not UTF-8: `raise`, `replace` or `skip`.
        split_on: Cut text files after every such text.
        all_fields: Whether filters will look at the other fields.
    """

    text: str = "text"
    id: str | None = None
    errors: Errors = "raise"
    split_on: str | None = None
    all_fields: bool = False

    @property
    def columns(self) -> list[str]:
        """The fields that are always read."""
        return [self.text] if self.id in (None, self.text) else [self.text, self.id]


def make_record(
    fields: Any, number_id: str, where: str, settings: ReadSettings, content: Any = None
) -> Record | Refused:
    """Take id and text out of a record's fields.

    Args:
        fields: A mapping, or something else that is then refused.
        number_id: The record's id if its fields hold none.
        where: Where a person finds it.
        settings: Which fields.
        content: What its excerpt is cut from, if not the fields.

    Returns:
        The record, or why it cannot be used.
    """
    content = fields if content is None else content
    if not isinstance(fields, Mapping):
        return refuse(content, number_id, where, "not a record", f"is not an object: got {_kind(fields)}")
    for name in settings.columns:
        if name not in fields:
            reason = "no text" if name == settings.text else "no id"
            has = ", ".join(map(str, fields)) or "none"
            detail = f"has no field {name!r}{nearest(name, map(str, fields))}; its fields: {has}"
            return refuse(content, number_id, where, reason, detail)
    text = fields[settings.text]
    if not isinstance(text, str):
        detail = f"has a field {settings.text!r} that is no text: got {_kind(text)}"
        return refuse(content, number_id, where, "text is no string", detail)
    if not _encodes(text):
        return refuse(content, number_id, where, "not Unicode", "has half a surrogate pair in its text")
    name = number_id
    if settings.id is not None:
        value = fields[settings.id]
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            detail = f"has a field {settings.id!r} that is no id: got {_kind(value)}"
            return refuse(content, number_id, where, "no id", detail)
        name = clean(str(value))
    return Record(name, text, fields)


def item_record(item: Any, number_id: str, where: str, settings: ReadSettings) -> Record | Refused:
    """Take id and text out of what a Python iterable gave: a text, a pair of id and text, or a mapping."""
    if isinstance(item, str):
        item = number_id, item
    if isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item):
        name, text = item
        if not _encodes(text):
            return refuse(text, number_id, where, "not Unicode", "has half a surrogate pair in its text")
        return Record(clean(name), text)
    if isinstance(item, Mapping):
        return make_record(item, number_id, where, settings)
    detail = f"is no text, pair (id, text) or mapping: got {_kind(item)}"
    return refuse(item, number_id, where, "not a record", detail)


def refuse(content: Any, name: str, where: str, reason: str, detail: str, *, quiet: bool = False) -> Refused:
    """Note why a record cannot be used, with how it begins."""
    if isinstance(content, bytes):
        content = content[: 4 * EXCERPT_CHARS].decode(errors="replace")
    excerpt = clean(str(content)[:EXCERPT_CHARS])
    return Refused(name, where, reason, clean(detail), excerpt, quiet)


def clean(text: str) -> str:
    """Write halves of surrogate pairs as escapes, so that a name can be stored."""
    return text.encode(errors="backslashreplace").decode()


def _encodes(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
