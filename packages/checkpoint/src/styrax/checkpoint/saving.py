"""How one checkpoint is written, by all processes together."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from styrax.checkpoint import commit, items, processes, raw, snapshot, storage
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError, explain
from styrax.checkpoint.manifest import ARRAYS, COMPRESSED, LEAVES, File, Item, Manifest, Shard
from styrax.checkpoint.pending import THREADS_OUTLIVE_MAIN


class Writer:
    """Writes the checkpoint of one step.

    Args:
        folder: Where it is staged; process 0 makes it.
        step: The step.
        config: Of the store.
        channel: Of this save, for all processes.
        metrics: For the manifest.
        temporary: For the manifest.

    Raises:
        CheckpointError: On every process, if one of them cannot save.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        config: CheckpointConfig,
        channel: processes.Channel,
        *,
        metrics: Mapping[str, float],
        temporary: bool,
    ) -> None:
        self._folder, self._step, self._config, self._channel = folder, step, config, channel
        self._metrics, self._temporary = metrics, temporary
        self._taken = snapshot.Snapshot()
        self._engines: list[Callable[[], Any]] = []

    def stage(self, named: Mapping[str, Any]) -> None:
        """Take what is to be saved; when this returns, the caller may change it."""
        config, error = self._config, None
        try:
            self._taken = snapshot.take(
                named, pack_below=config.smallest, compress=config.compress, borrow=not config.async_save
            )
            if self._channel.first:
                storage.make_folder(self._folder)
                commit.kill_point("after_staging")
        except Exception as raised:  # an iterator may raise anything, and the others must hear of it
            error = self._explained(raised)
        try:
            mine = {"items": sorted(self._taken.items), "positions": self._taken.positions}
            answers = [json.loads(text) for text in self._channel.agree(error, json.dumps(mine))]
            _same_items([answer["items"] for answer in answers])
        except CheckpointError as raised:
            raise self._failed(raised) from raised.__cause__
        positions = [answer["positions"] for answer in answers]
        for name in self._taken.positions:
            file = self._taken.items[name].file
            self._taken.documents[str(file)] = items.merged([position[name] for position in positions])
        try:
            self._engines = [self._engine(name, arrays) for name, arrays in self._taken.arrays.items()]
        except Exception as raised:
            error = self._failed(raised)
            raise error from error.__cause__

    def write(self, then: Callable[[], None]) -> None:
        """Write it and make it the checkpoint of its step; this may run in the background.

        Args:
            then: Called on process 0 when it is one, before any process goes on.
        """
        try:
            writings = [begin() for begin in self._engines]
            commit.kill_point("mid_arrays")
            digests = self._taken.digests()  # while Orbax waits for the disk
            for writing in writings:
                writing.wait(self._channel.check)
            commit.kill_point("after_arrays")
            self._publish(digests)
            if self._channel.first:
                then()
            self._channel.gather()
        except Exception as raised:
            error = self._failed(raised)
            raise error from error.__cause__
        finally:
            self._taken, self._engines = snapshot.Snapshot(), []  # frees what was held

    def _engine(self, folder: str, arrays: Mapping[str, Mapping[str, Any]]) -> Callable[[], Any]:
        """Prepare what Orbax has to do; gives what begins it in the background, if it can begin there."""
        from styrax.checkpoint import arrays as engine

        begin = functools.partial(
            engine.Writing,
            self._folder / folder,
            arrays,
            timeout=self._config.timeout,
            compress=folder == COMPRESSED,
            raw=self._config.raw and folder != COMPRESSED,
        )
        if self._taken.on_host and THREADS_OUTLIVE_MAIN and self._channel.alone:
            return begin
        writing = begin()
        if not THREADS_OUTLIVE_MAIN:
            writing.wait(self._channel.check)
        return lambda: writing

    def _publish(self, digests: Mapping[tuple[str, str], list[Shard]]) -> None:
        channel, folder = self._channel, self._folder
        if channel.first:
            if self._taken.packed.size:
                commit.write_file(folder / LEAVES, self._taken.packed.data)
            for file, text in self._taken.documents.items():
                commit.write_file(folder / file, text)
        shards: dict[tuple[str, str], list[Shard]] = {}
        for text in channel.gather(_shards_as_text(digests)):
            for name, path, *shard in json.loads(text):
                shards.setdefault((name, path), []).append(_shard(shard))
        files: list[str] = json.loads(channel.share(json.dumps(commit.contents(folder) if channel.first else [])))
        recorded = self._taken.recorded(shards)
        commit.kill_point("before_seal")
        sealed = commit.seal(folder, files[channel.index :: channel.count], known=self._known(recorded, shards))
        found: dict[str, File] = {}
        for text in channel.gather(json.dumps([[name, file.size, file.digest] for name, file in sealed.items()])):
            found |= {name: File(size=size, digest=digest) for name, size, digest in json.loads(text)}
        if channel.first:
            manifest = Manifest(
                step=self._step,
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                items=recorded,
                files=dict(sorted(found.items())),
                writer=writer(),
                metrics=self._metrics,
                temporary=self._temporary,
            )
            if self._config.verify == "readback":
                _read_back(folder, manifest)
            commit.publish(folder, manifest)

    def _known(self, recorded: Mapping[str, Item], shards: Mapping[tuple[str, str], list[Shard]]) -> dict[str, File]:
        """Give the files whose digests are those of what was in memory."""
        if not self._config.raw:
            return {}
        return {
            file: facts
            for name, item in recorded.items()
            for leaf in item.leaves
            if leaf.where == ARRAYS
            for file, facts in raw.known(self._folder, name, leaf, shards.get((name, leaf.path), ())).items()
        }

    def _failed(self, error: Exception) -> CheckpointError:
        try:
            self._channel.check()  # what another process reports is the cause, what happened here may be due to it
        except CheckpointError as reported:
            error = reported
        explained = self._explained(error)
        self._channel.fail(explained)
        if self._channel.first:
            storage.remove_tree(self._folder)
        return explained

    def _explained(self, error: Exception) -> CheckpointError:
        return explain(error, self._folder.parent, f"the checkpoint of step {self._step} cannot be written")


def _same_items(items: list[list[str]]) -> None:
    """Raise, on every process alike, if they were given different items to save."""
    lines = [f"process {number}: {', '.join(names)}" for number, names in enumerate(items) if names != items[0]]
    if lines:
        head = "all processes have to save the same items, but these differ:"
        raise CheckpointError("\n  ".join([head, f"process 0: {', '.join(items[0])}", *lines]))


def _read_back(folder: Path, manifest: Manifest) -> None:
    from styrax.checkpoint.verify import bad_arrays

    bad = [leaf for name in manifest.items for leaf in bad_arrays(folder, manifest, name)]
    if bad:
        raise CheckpointError(f"read back, these leaves are not what was written: {', '.join(bad)}; try another disk")


def _shards_as_text(found: Mapping[tuple[str, str], list[Shard]]) -> str:
    return json.dumps(
        [[*key, shard.start, shard.stop, shard.digest] for key, shards in found.items() for shard in shards]
    )


def _shard(record: list[Any]) -> Shard:
    start, stop, digest = record
    return Shard(start=tuple(start), stop=tuple(stop), digest=digest)


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("styrax-checkpoint", "jax", "orbax-checkpoint", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def writer() -> dict[str, Any]:
    """Say who writes, for a manifest: versions, host and process."""
    return {"versions": _versions(), "host": socket.gethostname(), "pid": os.getpid()}
