"""Whole checkpoints below a URL, laid out as in a folder, where the manifest is the commit.

An object appears whole or not at all, so `MANIFEST.json` is put last and makes a step a checkpoint, and is deleted
first when one goes. Nothing is renamed, and nothing is believed that was only listed:

    PREFIX/00001200/MANIFEST.json   without it there is no such step
    PREFIX/00001200/...             the files of the checkpoint
    PREFIX/00001200/UPLOAD.json     while it is being uploaded: of which manifest, and what has arrived
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from styrax.checkpoint import commit, storage
from styrax.checkpoint.errors import CheckpointError, Damaged, explain
from styrax.checkpoint.lock import Lock
from styrax.checkpoint.manifest import FILE, File, Manifest, read_manifest, step_name
from styrax.checkpoint.remote import receiving, sending
from styrax.checkpoint.remote.files import needed, parse
from styrax.checkpoint.remote.objects import Objects
from styrax.checkpoint.remote.receiving import Progress
from styrax.checkpoint.remote.threads import ordered

DAY = 86400.0
_ATTEMPTS = 3


class Bucket:
    """Checkpoints below a URL: uploaded, listed only when whole, verified when they come back.

    One writer at a time is taken for granted: object storage offers no lock.

    Args:
        url: Where they are, such as `s3://bucket/runs/a/checkpoints`, `gs://`, `file://`, `memory://`: whatever
            fsspec has a driver for.
        storage_options: What the driver takes: an endpoint, keys, ... By default they come from the environment and
            from fsspec's own configuration.
        workers: Requests at a time; each takes up to 16 MiB of memory, four times that for a large upload.
        attempts: How often a request is made at most, when the server is busy or does not answer. Drivers such as
            s3fs try again by themselves as well.

    Attributes:
        url: Without a slash at its end.

    Raises:
        CheckpointError: The URL is none, or a package is missing. That the place can be used is found out later.

    Example:
        >>> import tempfile, numpy as np
        >>> from styrax.checkpoint import Store
        >>> folder = tempfile.mkdtemp()
        >>> with Store(f"{folder}/here") as store:
        ...     _ = store.save(10, {"params": {"w": np.ones(3)}})
        >>> bucket = Bucket(f"file://{folder}/there")
        >>> bucket.upload(f"{folder}/here/00000010")
        >>> bucket.steps(), bucket.verify(10)
        ([10], [])
        >>> _ = bucket.download(10, f"{folder}/again")
        >>> Store(f"{folder}/again", read_only=True).restore(10, {"params": None})
        {'params': {'w': array([1., 1., 1.])}}
    """

    def __init__(
        self, url: str, *, storage_options: Mapping[str, Any] | None = None, workers: int = 8, attempts: int = 5
    ) -> None:
        self._objects = Objects(url, storage_options=storage_options, attempts=attempts, workers=workers)
        self.url = self._objects.url
        self._live: set[int] = set()

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def steps(self) -> list[int]:
        """List the complete checkpoints, in order; what has no manifest is not one.

        Raises:
            CheckpointError: The place cannot be listed.
        """
        return [step for step, complete in self._folders().items() if complete]

    def incomplete(self) -> list[int]:
        """List the steps that have objects but no manifest: uploads under way, or cut short; in order."""
        steps = [step for step, complete in self._folders().items() if not complete]
        return [step for step in steps if self._objects.sizes(step_name(step))]  # some places have empty folders

    def manifest(self, step: int) -> Manifest:
        """Read what a step holds.

        Raises:
            CheckpointError: There is no such step, or its manifest is damaged.
        """
        try:
            data = self._objects.read(f"{step_name(step)}/{FILE}")
        except FileNotFoundError:
            steps = self.steps()
            there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.url}: {there}") from None
        try:
            return parse(data, step)
        except CheckpointError as error:
            raise Damaged(f"step {step} in {self.url} is damaged: {error}") from error

    def upload(
        self,
        checkpoint: str | Path,
        *,
        verify: Literal["size", "readback"] = "size",
        progress: Progress | None = None,
    ) -> None:
        """Upload the checkpoint of one step, in place of one that is there.

        Every file is compared with its digest before it is sent. It may be called again after whatever went wrong:
        what has arrived is not sent again, and a checkpoint that is there already is left alone.

        Args:
            checkpoint: The folder of the step, such as `runs/a/checkpoints/00001200`.
            verify: After sending, compare the sizes of all objects, or read all of them back.
            progress: Called as `progress("upload", done, total)`, in bytes.

        Raises:
            CheckpointError: The folder is no checkpoint or is damaged, or the place cannot be written. The step is
                then not listed, unless only the answer to the last request was lost.
        """
        checkpoint = Path(checkpoint)
        try:
            manifest, data = read_manifest(checkpoint), (checkpoint / FILE).read_bytes()
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint} cannot be uploaded: {error}") from error
        step = manifest.step
        self._live.add(step)
        try:
            sending.send(self._objects, checkpoint, manifest, data, verify=verify, progress=progress)
        finally:
            self._live.discard(step)

    def download(
        self,
        step: int,
        directory: str | Path,
        *,
        items: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Download a checkpoint into a folder of checkpoints, where it appears whole or not at all.

        Every byte is compared with the manifest on its way.

        Args:
            step: Which.
            directory: The folder of the checkpoints; made if missing. Nothing else may write to it meanwhile.
            items: Only the files that these need. What is restored from such a folder is as sure as ever, but it is
                no whole checkpoint, so use a folder of its own. All by default.
            progress: Called as `progress("download", done, total)`, in bytes.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: There is no such step, it is damaged (every such object is named), or the folder cannot
                be written or is in use.
        """
        directory = Path(directory).expanduser().absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = Lock(directory)
        except OSError as error:
            raise explain(error, directory, f"step {step} cannot be downloaded") from error
        try:
            commit.sweep(directory)
            return self.fetch(step, directory, items=items, progress=progress)
        finally:
            lock.release()

    def fetch(
        self,
        step: int,
        directory: Path,
        *,
        items: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Download like `download`, for a caller that holds the lock of the folder."""
        error = None
        for _ in range(_ATTEMPTS):
            manifest = self.manifest(step)
            folder = commit.staging(directory, step)
            try:
                folder.mkdir(parents=True)
                files = _chosen(manifest, items)
                problems = receiving.read(self._objects, manifest, files, folder, progress=progress)
                if not problems:
                    commit.publish(folder, manifest)
                    return directory / step_name(step)
            except OSError as raised:
                raise explain(raised, directory, f"step {step} of {self.url} cannot be stored") from raised
            finally:
                storage.remove_tree(folder)
            error = Damaged("\n  ".join([f"step {step} in {self.url} is damaged:", *problems]))
            if self.manifest(step) == manifest:
                break  # or else it was replaced while it was read, and what was read may be a mix
        raise error or AssertionError("there is an attempt at least")

    def read_arrays(self, step: int, item: str, like: Any = None) -> Any:
        """Read the arrays of one item without a download, each host only the parts that it needs.

        The large arrays are read by TensorStore, of which Orbax is made, from `s3://`, `gs://` and `file://`. Each
        part that is read, one device's share when it was saved, is compared with its digest.

        Args:
            step: Which.
            item: A tree of arrays, such as the parameters.
            like: A tree with the same paths: `jax.ShapeDtypeStruct` or a `jax.Array` for a `jax.Array` with that
                sharding (default device if it has none), a numpy array for such a one. By default all as numpy.

        Returns:
            The item, with the containers of `like`, or as it was saved.

        Raises:
            CheckpointError: There is no such step or item, it is damaged or differs from `like`, or TensorStore cannot
                read there: for S3 it takes its credentials from the environment, not from `storage_options`.
        """
        from styrax.checkpoint.remote import direct

        return direct.restore(self._objects, self.manifest(step), item, like)

    def verify(
        self,
        step: int,
        *,
        mode: Literal["size", "digest"] = "digest",
        items: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> list[str]:
        """Compare the objects of a step with its manifest.

        Args:
            step: Which.
            mode: Compare sizes, from one listing, or read everything and compare digests.
            items: Only the files that these need; all by default.
            progress: Called as `progress("verify", done, total)`, in bytes.

        Returns:
            One text for each damaged object, with the item that it belongs to; empty if all is well.

        Raises:
            CheckpointError: There is no such step, or the place cannot be read.
        """
        try:
            manifest = self.manifest(step)
        except Damaged as error:
            return [str(error.__cause__)]
        files = _chosen(manifest, items)
        if mode == "size":
            return receiving.unfit(self._objects, manifest, files)
        return receiving.read(self._objects, manifest, files, progress=progress, label="verify")

    def delete(self, step: int) -> None:
        """Delete a checkpoint, or what an upload left of one; a step that is not there is no error.

        Raises:
            CheckpointError: Something cannot be deleted. The step is then not listed, or still whole.
        """
        folder = step_name(step)
        names = self._objects.sizes(folder)
        self._objects.remove(f"{folder}/{FILE}")
        # What says that an upload is under way goes last, so that what is left is swept one day.
        self._objects.remove_all(f"{folder}/{name}" for name in names if name not in (FILE, sending.JOURNAL))
        self._objects.remove(f"{folder}/{sending.JOURNAL}")
        self._objects.tidy(folder)

    def sweep(self, *, older_than: float = DAY) -> list[int]:
        """Delete what uploads left that were cut short.

        Args:
            older_than: Seconds without a new object before it is sure that nobody uploads the step any more. What
                this `Bucket` is uploading is left alone at any age.

        Returns:
            The steps that were swept.
        """
        swept = []
        for step in self.incomplete():
            folder = step_name(step)
            names = [f"{folder}/{name}" for name in self._objects.sizes(folder)]
            if step in self._live or not names:
                continue
            times = ordered(self._objects.written, names, workers=self._objects.workers)
            with contextlib.suppress(FileNotFoundError):  # somebody else deletes it, or uploads it anew
                if time.time() - max(times) > older_than and self._objects.size(f"{folder}/{FILE}") is None:
                    self.delete(step)
                    swept.append(step)
        return swept

    def _folders(self) -> dict[int, bool]:
        found = self._objects.folders()
        steps = sorted(int(name) for name in found if name.isdecimal() and step_name(int(name)) == name)
        names = [f"{step_name(step)}/{FILE}" for step in steps]
        sizes = ordered(self._objects.size, names, workers=self._objects.workers)
        return {step: size is not None for step, size in zip(steps, sizes)}


def _chosen(manifest: Manifest, items: Iterable[str] | None) -> dict[str, File]:
    if items is None:
        return dict(manifest.files)
    names = set(items)
    return {name: file for name, file in manifest.files.items() if needed(name, names, manifest)}
