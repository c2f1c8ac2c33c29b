"""The objects of one checkpoint, read and compared with its manifest, and written to files if wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import xxhash

from styrax.checkpoint import storage
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import File, Manifest, step_name
from styrax.checkpoint.remote import errors
from styrax.checkpoint.remote.files import difference, part_of
from styrax.checkpoint.remote.objects import PIECE, Objects
from styrax.checkpoint.remote.threads import ordered

_LOOKS = 3

Progress = Callable[[str, int, int], None]


def silent(label: str, done: int, total: int) -> None:
    """Show no progress."""


def unfit(objects: Objects, manifest: Manifest, files: Mapping[str, File]) -> list[str]:
    """Find the files that are not there with the right size.

    Args:
        objects: Where the checkpoint is.
        manifest: Of it.
        files: Those of its files to look at.

    Returns:
        One text for each.
    """
    folder = step_name(manifest.step)
    found: dict[str, int | None] = dict(objects.sizes(folder))
    for look in range(_LOOKS):
        wrong = [name for name, file in files.items() if found.get(name) != file.size]
        if not wrong:
            return []
        # Some object stores list a new object only after a while, and some answer late for a replaced one.
        time.sleep(errors.WAIT * look)
        sizes = ordered(objects.size, [f"{folder}/{name}" for name in wrong], workers=objects.workers)
        found.update(zip(wrong, sizes))
    problems = []
    for name, file in files.items():
        size = found[name]
        if size != file.size:
            text = "missing" if size is None else difference(file, size, file.digest)
            problems.append(f"{name}: {text}{part_of(name, manifest)}")
    return problems


def read(
    objects: Objects,
    manifest: Manifest,
    files: Mapping[str, File],
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    label: str = "download",
) -> list[str]:
    """Read files, in pieces and several at a time, and compare each with its digest.

    Args:
        objects: Where the checkpoint is.
        manifest: Of it.
        files: Those of its files to read.
        folder: Where to write them, synced; nowhere by default.
        progress: Called as `progress(label, done, total)`, in bytes.
        label: What is done.

    Returns:
        One text for each damaged file.
    """
    problems = unfit(objects, manifest, files)
    if problems:
        return problems
    total = sum(file.size for file in files.values())
    report, wrong, found = progress or silent, dict(files), {}
    for _ in range(2):  # a second time for what came damaged: it may have happened on the way
        done = total - sum(file.size for file in wrong.values())
        for name, text, size in _digests(objects, step_name(manifest.step), wrong, folder):
            done += size
            report(label, done, total)
            if text is not None:
                found[name] = text
        wrong = {name: file for name, file in wrong.items() if found[name] != file.digest}
        if not wrong:
            break
    return [f"{n}: {difference(file, file.size, found[n])}{part_of(n, manifest)}" for n, file in wrong.items()]


def _digests(
    objects: Objects, step: str, files: Mapping[str, File], folder: Path | None
) -> Iterator[tuple[str, str | None, int]]:
    """Give file, digest once all of it is read, and size of each piece, in order."""

    def fetch(piece: tuple[str, int, int]) -> bytes:
        name, start, stop = piece
        try:
            # No range of no bytes can be asked for.
            return objects.read(f"{step}/{name}", start, stop) if stop else objects.read(f"{step}/{name}")
        except FileNotFoundError as error:
            raise CheckpointError(f"{objects.url}/{step}/{name} was deleted while it was read") from error

    pieces = [piece for name, file in files.items() for piece in _pieces(name, file.size)]
    handle: IO[bytes] | None = None
    state = xxhash.xxh3_128()
    try:
        for (name, start, stop), data in zip(pieces, ordered(fetch, pieces, workers=objects.workers)):
            if start == 0:
                handle, state = _create(folder, name), xxhash.xxh3_128()
            state.update(data)
            if handle is not None:
                handle.write(data)
            whole = stop == files[name].size
            if whole and handle is not None:
                handle.close()
                storage.sync_file(Path(handle.name))
            yield name, state.hexdigest() if whole else None, len(data)
    finally:
        if handle is not None:
            handle.close()


def _pieces(name: str, size: int) -> Iterator[tuple[str, int, int]]:
    for start in range(0, max(size, 1), PIECE):
        yield name, start, min(start + PIECE, size)


def _create(folder: Path | None, name: str) -> IO[bytes] | None:
    if folder is None:
        return None
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return (folder / name).open("wb")
