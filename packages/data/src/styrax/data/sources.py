"""From what a user names (files, folders, globs, `python:stdlib`) to a sorted list of text documents."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from styrax.core.errors import UserError, nearest
from styrax.data.hashing import hash64

Errors = Literal["raise", "replace", "skip"]

STDLIB = "python:stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """One text file.

    Attributes:
        id: Its path below the folder that was named, that folder's own name first; the same on any machine.
        path: Where it is.
        size: Bytes.
        errors: What to do where it is not UTF-8, if its source decides that.
    """

    id: str
    path: Path
    size: int
    errors: Errors | None = None


def find_documents(sources: Sequence[str | Path], *, max_bytes: int | None = None) -> list[Document]:
    """List the documents of all sources, sorted by id.

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
            found[name] = Document(name, document.path, document.size, document.errors)
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


def read_text(document: Document, content: bytes, errors: Errors) -> str | None:
    """Decode one document, keeping line ends as they are.

    Args:
        document: What is decoded.
        content: Its bytes.
        errors: `raise`, `replace` (by U+FFFD) or `skip` when it is not UTF-8.

    Returns:
        The text, or `None` for a document to skip.

    Raises:
        UserError: It is not UTF-8; the message gives the byte offset.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        errors = document.errors or errors
        if errors == "skip":
            return None
        if errors == "replace":
            return content.decode(errors="replace")
        raise UserError(
            f"{document.path} is not UTF-8 at byte offset {error.start}: expected text, got "
            f"{content[error.start : error.start + 4].hex(' ')} ({error.reason}); convert the file, leave it "
            "out with a glob, or pass errors 'replace' or 'skip'"
        ) from None


def read_bytes(document: Document) -> bytes:
    """Read one document's bytes.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return document.path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {document.path}: {error.strerror or error}; nothing was built") from error


def split_text(name: str, text: str, separator: str | None) -> Iterator[tuple[str, str]]:
    """Cut a text after each separator; the pieces joined are the text.

    Args:
        name: The id of the whole.
        text: What is cut.
        separator: Where to cut, or `None` not to.

    Yields:
        Id and text of each piece that is not empty; with a separator ids end in `#0`, `#1`, ...

    Example:
        >>> list(split_text("a", "x--y", "--"))
        [('a#0', 'x--'), ('a#1', 'y')]
    """
    if separator is None:
        if text:
            yield name, text
        return
    parts = text.split(separator)
    pieces = [part + separator for part in parts[:-1]] + parts[-1:]
    for index, piece in enumerate(piece for piece in pieces if piece):
        yield f"{name}#{index}", piece


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
            documents.append(Document(name, file, file.stat().st_size, errors))
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
