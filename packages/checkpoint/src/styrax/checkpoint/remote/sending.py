"""The upload of one checkpoint, which may be cut off anywhere and begun again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Literal

from styrax.checkpoint import digest
from styrax.checkpoint.errors import CheckpointError
from styrax.checkpoint.manifest import FILE, Manifest, step_name
from styrax.checkpoint.remote import receiving
from styrax.checkpoint.remote.files import difference, parse, part_of
from styrax.checkpoint.remote.objects import Objects
from styrax.checkpoint.remote.receiving import Progress, silent
from styrax.checkpoint.remote.threads import ordered

JOURNAL = "UPLOAD.json"
#: How much may have to be sent again when an upload goes on in another process.
_JOURNAL_BYTES = 2**30


def send(
    objects: Objects,
    checkpoint: Path,
    manifest: Manifest,
    data: bytes,
    *,
    verify: Literal["size", "readback"],
    progress: Progress | None = None,
) -> None:
    """Upload a checkpoint; see `Bucket.upload`.

    Args:
        objects: Where to.
        checkpoint: Its folder.
        manifest: Of it.
        data: The manifest's own bytes, which are put last.
        verify: What is compared before that.
        progress: Called with what has arrived, in bytes.
    """
    progress, folder = progress or silent, step_name(manifest.step)
    if _is_there(objects, manifest):
        return
    journal = _Journal(objects, folder, digest.of(data))
    sizes = objects.sizes(folder)
    if not journal.found:
        # What an upload of something else left must never be taken for a part of this one.
        objects.remove_all(f"{folder}/{name}" for name in sizes if name not in manifest.files)
        journal.write()
    missing = [n for n, f in manifest.files.items() if n not in journal.arrived or sizes.get(n) != f.size]

    def one(name: str) -> str:
        _check(checkpoint, name, manifest)
        objects.put(f"{folder}/{name}", checkpoint / name)
        return name

    total = manifest.nbytes
    done = total - sum(manifest.files[name].size for name in missing)
    progress("upload", done, total)
    noted = done
    try:
        for name in ordered(one, missing, workers=objects.workers):
            journal.arrived.add(name)
            done += manifest.files[name].size
            progress("upload", done, total)
            if done - noted >= _JOURNAL_BYTES:
                noted = done
                journal.write()
    except (OSError, CheckpointError) as error:
        _check_unchanged(checkpoint, data, error)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{checkpoint} cannot be uploaded: {type(error).__name__}: {error}") from error
    if verify == "readback":
        problems = receiving.read(objects, manifest, manifest.files)
    else:
        problems = receiving.unfit(objects, manifest, manifest.files)
    if problems:
        journal.remove()  # so that the next attempt sends all of it again
        raise CheckpointError("\n  ".join([f"step {manifest.step} did not arrive whole in {objects.url}:", *problems]))
    _check_unchanged(checkpoint, data)
    try:
        objects.write(f"{folder}/{FILE}", data)
    except CheckpointError:
        if objects.read_or_none(f"{folder}/{FILE}") != data:  # or else only the answer was lost
            raise
    with contextlib.suppress(CheckpointError):
        journal.remove()


class _Journal:
    """What has arrived of one upload, kept beside it: objects alone do not tell whose they are."""

    def __init__(self, objects: Objects, folder: str, identity: str) -> None:
        self._objects, self._name, self._identity = objects, f"{folder}/{JOURNAL}", identity
        self.arrived: set[str] = set()
        self.found = False
        data = objects.read_or_none(self._name)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(data or b"{}")
            if record["manifest"] == identity:
                self.arrived, self.found = set(record["arrived"]), True

    def write(self) -> None:
        record = {"manifest": self._identity, "arrived": sorted(self.arrived)}
        self._objects.write(self._name, json.dumps(record).encode())

    def remove(self) -> None:
        self._objects.remove(self._name)


def _is_there(objects: Objects, manifest: Manifest) -> bool:
    """Tell whether there is nothing to do; what is there instead stops being a checkpoint."""
    name = f"{step_name(manifest.step)}/{FILE}"
    data = objects.read_or_none(name)
    if data is None:
        return False
    with contextlib.suppress(CheckpointError):
        if parse(data, manifest.step) == manifest and not receiving.unfit(objects, manifest, manifest.files):
            return True
    objects.remove(name)
    return False


def _check(checkpoint: Path, name: str, manifest: Manifest) -> None:
    path, expected = checkpoint / name, manifest.files[name]
    size, text = digest.of_file(path)
    if (size, text) != (expected.size, expected.digest):
        raise CheckpointError(
            f"{path} is damaged{part_of(name, manifest)}, so step {manifest.step} was not uploaded: "
            f"{difference(expected, size, text)}"
        )


def _check_unchanged(checkpoint: Path, data: bytes, cause: Exception | None = None) -> None:
    """A save of the same step may have taken the folder's place, and files of both may have been sent."""
    now = None
    with contextlib.suppress(OSError):
        now = (checkpoint / FILE).read_bytes()
    if now != data:
        raise CheckpointError(f"{checkpoint} was replaced or deleted while it was uploaded; upload it again") from cause
