"""From what a user names (files, folders, globs, `python:stdlib`) to a sorted list of files."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from styrax.core.errors import UserError, nearest
from styrax.data.build.records import Errors
from styrax.data.hashing import hash64

STDLIB = "python:stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """One file: a text, or a table of records.

    Attributes:
        id: Its path below the folder that was named, that folder's own name first; the same on any machine.
        path: Where it is.
        size: Bytes.
        errors: What to do where it is not UTF-8, if its source decides that.
        mtime_ns: When it was last changed, in nanoseconds.
    """

    id: str
    path: Path
    size: int
    errors: Errors | None = None
    mtime_ns: int = 0


def find_documents(sources: Sequence[str | Path], *, max_bytes: int | None = None) -> list[Document]:
    """List the files of all sources, sorted by id.

    Args:
        sources: Files, folders (every file below, except hidden ones), globs (`corpus/**/*.txt`), or
            `python:stdlib`: the running Python's own library without its tests.
        max_bytes: Keep a subset of whole files of at most this size together, chosen by hash, so that it
            does not depend on the order of anything.

    Returns:
        The documents, each file once.

    Raises:
        UserError: Sources that are missing or empty, all in one message.
    """
    problems: list[str] = []
    found: dict[str, Document] = {}
    seen: set[str] = set()
    for source in sources:
        documents = _expand(str(source), problems)
        for document in sorted(documents, key=lambda document: document.id):
            real = os.path.realpath(document.path)
            if real in seen:
                continue
            seen.add(real)
            name, again = document.id, 1
            while name in found:
                again += 1
                name = f"{document.id}@{again}"
            found[name] = replace(document, id=name)
    if not sources:
        problems.append("no source was given")
    if problems:
        raise UserError(
            "cannot read the text sources:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + f"\nexpected files, folders, globs such as 'corpus/**/*.txt', or {STDLIB!r}"
        )
    documents = [found[name] for name in sorted(found)]
    return documents if max_bytes is None else _subset(documents, max_bytes)


def _expand(source: str, problems: list[str]) -> list[Document]:
    """List one source's documents, or say what is wrong with it."""
    if source.startswith("python:"):
        return _stdlib(source, problems)
    path = Path(source).expanduser()
    if path.is_dir():
        root = path.resolve().name
        documents = _documents(path, root, _walk(path))
        if not documents:
            problems.append(f"{source}: a folder without files (hidden ones do not count)")
        return documents
    if path.is_file():
        return _documents(path.parent, "", [path])
    if glob.has_magic(source):
        fixed = Path(*_before_magic(path.parts))
        files = [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (absolute globs)
        documents = _documents(fixed, fixed.resolve().name, [file for file in files if file.is_file()])
        if not documents:
            problems.append(f"{source}: no file matches")
        return documents
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    problems.append(f"{source}: does not exist{nearest(path.name, siblings)}")
    return []


def _before_magic(parts: tuple[str, ...]) -> Iterable[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def _walk(folder: Path, leave_out: Collection[str] = ()) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _documents(folder: Path, root: str, files: Iterable[Path], errors: Errors | None = None) -> list[Document]:
    documents = []
    for file in files:
        relative = file.relative_to(folder).as_posix()
        name = f"{root}/{relative}" if root else relative
        name = os.fsencode(name).decode(errors="backslashreplace")
        if file.is_file():
            about = file.stat()
            documents.append(Document(name, file, about.st_size, errors, about.st_mtime_ns))
    return documents


def _stdlib(source: str, problems: list[str]) -> list[Document]:
    if source != STDLIB:
        problems.append(f"{source}: not a known source{nearest(source, [STDLIB])}")
        return []
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(folder, NOT_STDLIB) if file.suffix == ".py"]
    if not files:
        problems.append(f"{source}: this Python has no library sources in {folder}")
    return _documents(folder, STDLIB, files, errors="skip")


def _subset(documents: list[Document], max_bytes: int) -> list[Document]:
    kept: set[str] = set()
    left = max_bytes
    for document in sorted(documents, key=lambda document: hash64("subset", document.id)):
        if document.size <= left:
            kept.add(document.id)
            left -= document.size
    if not kept:
        smallest = min(document.size for document in documents)
        raise UserError(
            f"max_bytes = {max_bytes} leaves no document; the smallest file has {smallest} bytes, and only "
            "whole files are taken"
        )
    return [document for document in documents if document.id in kept]
