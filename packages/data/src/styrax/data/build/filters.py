"""Filters: plain functions that keep, change or drop a record while a store is built."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, cast

import numpy as np

from styrax.core.errors import UsageError, UserError, nearest
from styrax.data.build.quarantine import Tally
from styrax.data.build.records import Record

Filter = Callable[[Mapping[str, Any]], "bool | str | Mapping[str, Any] | None"]


def apply(filters: Sequence[Filter], record: Record, tally: Tally) -> Record | None:
    """Pass a record through filters.

    Args:
        filters: Each is given `{"id": ..., "text": ..., and the record's other fields}` and answers `True` to
            keep it, `False` or `None` to drop it, or with another text or another mapping to put in its place.
        record: What is passed.
        tally: Where drops and changes are counted, by the filter's name.

    Returns:
        The record, perhaps changed, or `None`.

    Raises:
        UserError: A filter fails, or answers with something else.
    """
    fields: dict[str, Any] = {**record.fields, "id": record.id, "text": record.text}
    for function in filters:
        try:
            answer = function(MappingProxyType(fields))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"the filter {filter_name(function)} failed on record {record.id!r}: {what}") from error
        if isinstance(answer, (bool, np.bool_)) or answer is None:
            if not answer:
                tally.dropped[f"filter {filter_name(function)}"] += 1
                return None
            continue
        before = fields["id"], fields["text"]
        changed = {**fields, "text": answer} if isinstance(answer, str) else answer
        if not _sound(changed):
            raise UserError(
                f"the filter {filter_name(function)} answered {type(answer).__name__} {str(answer)[:80]!r} for record "
                f"{record.id!r}; expected True, False, None, a text, or a mapping with texts as 'id' and 'text'"
            )
        fields = dict(changed)
        if (fields["id"], fields["text"]) != before:
            tally.changed[filter_name(function)] += 1
    return Record(fields["id"], fields["text"])


def filter_name(function: Filter) -> str:
    """Give the name that a filter is reported by: `module:function`."""
    inner: Any = getattr(function, "func", function)  # functools.partial
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def filter_identity(function: Filter) -> list[str]:
    """Give what changes when a filter's name, code or bound values do, as far as that can be seen."""
    digest = hashlib.blake2b(digest_size=16)
    inner: Any = getattr(function, "func", function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is not None:
        _hash_code(code, digest)
    try:
        digest.update(pickle.dumps(function))
    except Exception:  # a lambda or a closure: its name and code must do
        digest.update(repr([cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]).encode())
    return [filter_name(function), digest.hexdigest()]


def load_filter(name: str) -> Filter:
    """Import the filter that a text such as `module:function` names.

    Args:
        name: The text; the module is looked for in the working folder too.

    Raises:
        UsageError: There is no such module or function.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"filter {name!r}: expected module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"filter {name!r}: {error}; expected a module that Python finds, or one in {here}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"filter {name!r}: {module_name} has no function {attribute!r}{nearest(attribute, offered)}")
    return cast("Filter", function)


def _sound(fields: Any) -> bool:
    if not isinstance(fields, Mapping) or not all(isinstance(fields.get(key), str) for key in ("id", "text")):
        return False
    try:
        return bool((fields["id"] + fields["text"]).encode()) or True
    except UnicodeEncodeError:
        return False


def _hash_code(code: CodeType, digest: Any) -> None:
    digest.update(repr((code.co_code, code.co_names, code.co_varnames)).encode())
    for value in code.co_consts:
        if isinstance(value, CodeType):
            _hash_code(value, digest)
        else:
            # The order of a set differs from process to process.
            digest.update(repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode())
