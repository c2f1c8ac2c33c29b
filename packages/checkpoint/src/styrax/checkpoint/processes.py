"""What several processes of one run must do together, and how each learns at once that another one failed.

They talk through small files in the folder of the checkpoints, which they share anyway, and not through the
devices: so they can do it in the background, while the devices compute, and notice a dead or silent peer
instead of waiting for it. All of them make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from styrax.checkpoint import identity, pending, storage
from styrax.checkpoint.errors import CheckpointError, Damaged

PREFIX = ".meeting-"
_POLL = 0.05
_BEAT = 2.0
_SILENCE = 25.0  # seconds without a beat after which a process counts as dead
_LEAVE = 5.0  # seconds that process 0 waits for the others to close
_APPEAR = 60.0  # seconds for a folder made by one process to be seen by another one


class Gone(CheckpointError):
    """Another process of this run has ended, or does not answer."""


def several() -> bool:
    """Tell whether this run has more than one process."""
    import jax

    # Asked for first because counting processes starts jax's devices.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Tell whether this is process 0, which alone changes what is listed as a checkpoint."""
    import jax

    return not several() or jax.process_index() == 0


def place() -> tuple[int, int]:
    """Give the number of this process, and how many there are."""
    import jax

    return (jax.process_index(), jax.process_count()) if several() else (0, 1)


def agree(error: Exception | None) -> None:
    """Raise on every process if one of them has an error, asking over the devices: its own, or that another failed."""
    if several():
        from jax.experimental import multihost_utils

        failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(error is not None)))
        if error is None and failed.size:
            raise CheckpointError(f"process {', '.join(map(str, failed))} failed; see its own error")
    if error is not None:
        raise error


def share(value: int) -> int:
    """Give every process the number of process 0, over the devices.

    Args:
        value: At most 31 bits; what the others pass is ignored.
    """
    if not several():
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


class Group:
    """The processes of this run on one folder; a single process agrees with itself.

    Args:
        directory: The folder that they share; process 0 may write in it.

    Attributes:
        index: Of this process.
        count: How many there are.
        token: The same on all of them, and on no others.

    Raises:
        CheckpointError: The others do not see what process 0 wrote: they do not share the folder.
    """

    def __init__(self, directory: Path) -> None:
        import jax

        self.index, self.count = 0, 1
        self.token = secrets.token_hex(4)
        if not several():
            return
        self.index, self.count = jax.process_index(), jax.process_count()
        self.token = f"{share(secrets.randbits(31)):08x}"
        self._folder = directory / f"{PREFIX}{self.token}"
        error = None
        if self.index == 0:
            self._folder.mkdir()
        elif not _within(_APPEAR, self._folder.is_dir):
            error = CheckpointError(
                f"process {self.index} on {socket.gethostname()} does not see what process 0 wrote in {directory}: "
                "with several processes the folder must lie on a file system that all of them share"
            )
        agree(error)
        self._peers = _Peers(self._folder, self.index, self.count)

    def channel(self, name: str, timeout: float) -> Channel:
        """Open a conversation, which every process has to open by the same name.

        Args:
            name: Of letters, digits and dashes; never used before.
            timeout: Seconds to wait for each other.
        """
        return Channel(self, name, timeout)

    def close(self) -> None:
        """End this process's signs of life; when all have, the folder goes."""
        if self.count == 1:
            return
        self._peers.close()
        # Another one may yet have to read the last message, and whoever opens the folder next sweeps it.
        if self.index == 0 and _within(_LEAVE, self._peers.all_closed):
            storage.remove_tree(self._folder)

    def silent(self) -> str | None:
        """Say which process is dead or does not answer, or `None`."""
        return self._peers.silent() if self.count > 1 else None

    def path(self, name: str) -> Path:
        """Give the path of a message."""
        return self._folder / name


class Channel:
    """One conversation of a group, see `Group.channel`."""

    def __init__(self, group: Group, name: str, timeout: float) -> None:
        self._group, self._name, self._timeout = group, name, timeout
        self._round = 0

    @property
    def index(self) -> int:
        """Of this process."""
        return self._group.index

    @property
    def count(self) -> int:
        """How many processes there are."""
        return self._group.count

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self._group.index == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self._group.count == 1

    def gather(self, text: str = "") -> list[str]:
        """Give every process the texts of all, in order of the processes; also a barrier.

        Raises:
            CheckpointError: Another process has failed, ended, or does not answer.
        """
        group = self._group
        if group.count == 1:
            return [text]
        self._round += 1
        _put(self._path(self._round, group.index), text)
        found: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout
        while not self._read(found):
            try:
                self.check()
            except CheckpointError:
                if not self._read(found):  # it may have ended after it has said what was waited for
                    raise
            if time.monotonic() > deadline:
                missing = ", ".join(str(index) for index in range(group.count) if index not in found)
                raise CheckpointError(f"process {missing} did not come within {self._timeout} s (timeout)")
            time.sleep(_POLL)
        # Whoever has come to this round has read all of the one before the last.
        self._path(self._round - 2, group.index).unlink(missing_ok=True)
        return [found[index] for index in range(group.count)]

    def _read(self, found: dict[int, str]) -> bool:
        """Read what is there of this round; tells whether that is all."""
        for index in range(self.count):
            if index not in found:
                with contextlib.suppress(FileNotFoundError):
                    found[index] = self._path(self._round, index).read_text()
        return len(found) == self.count

    def agree(self, error: Exception | None, text: str = "") -> list[str]:
        """Raise on every process if one of them has an error: its own, or a text with that of another one.

        Returns:
            The texts of all.
        """
        if self.alone:
            if error is not None:
                raise error
            return [text]
        kind = None if error is None else type(error).__name__
        answers = [json.loads(answer) for answer in self.gather(json.dumps([kind, str(error), text]))]
        if error is not None:
            raise error
        failed = [(number, kind, text) for number, (kind, text, _) in enumerate(answers) if kind]
        if failed:
            damaged = all(kind == Damaged.__name__ for _, kind, _ in failed)
            reasons = [f"process {number} failed: {text}" for number, _, text in failed]
            raise (Damaged if damaged else CheckpointError)("\n".join(reasons))
        return [text for _, _, text in answers]

    def share(self, value: str) -> str:
        """Give every process the text of process 0."""
        return self.gather(value if self.first else "")[0]

    def fail(self, error: Exception) -> None:
        """Tell the others, wherever they wait in this conversation, that this process has failed."""
        if self._group.count > 1:
            with contextlib.suppress(OSError):
                gone = isinstance(error, Gone)
                _put(self._group.path(f"{self._name}.failed.{self._group.index}"), json.dumps([gone, str(error)]))

    def check(self) -> None:
        """Raise if another process has said that it failed, has ended, or does not answer.

        Raises:
            Gone: One is gone, as was found here or by another one; the end of this process will not wait for it.
            CheckpointError: Another failure.
        """
        group = self._group
        if group.count == 1:
            return
        for index in range(group.count):
            if index != group.index:
                with contextlib.suppress(FileNotFoundError):
                    gone, reason = json.loads(group.path(f"{self._name}.failed.{index}").read_text())
                    if gone:
                        pending.abandon(reason)
                    raise (Gone if gone else CheckpointError)(f"process {index} failed: {reason}")
        reason = group.silent()
        if reason is not None:
            pending.abandon(reason)
            raise Gone(reason)

    def end(self) -> None:
        """Remove the last messages of this process, when every process is done with this conversation."""
        if self._group.count > 1:
            for number in (self._round - 1, self._round):
                self._path(number, self._group.index).unlink(missing_ok=True)
            self._group.path(f"{self._name}.failed.{self._group.index}").unlink(missing_ok=True)

    def _path(self, number: int, index: int) -> Path:
        return self._group.path(f"{self._name}.{number}.{index}")


class _Peers:
    """Signs of life: each process counts up in a file of its own, and looks at those of the others."""

    def __init__(self, folder: Path, index: int, count: int) -> None:
        self._folder, self._index, self._count = folder, index, count
        self._me = identity.me()
        self._seen: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._write(0)
        thread = threading.Thread(
            target=_beat, args=(weakref.WeakMethod(self._write), self._stop), name="checkpoint-beat", daemon=True
        )
        thread.start()

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            _put(self._path(self._index), "")

    def all_closed(self) -> bool:
        return all(self._text(index) == "" for index in range(self._count))

    def silent(self) -> str | None:
        now = time.monotonic()
        for index in range(self._count):
            if index == self._index:
                continue
            text = self._text(index)
            if text == "":
                return f"process {index} has closed its checkpoints"
            if text is None:  # not yet seen
                text = "{}"
            before = self._seen.setdefault(index, (text, now))
            if before[0] != text:
                self._seen[index] = text, now
            elif now - before[1] > _SILENCE:
                return f"process {index} has not answered for {_SILENCE:.0f} s: it is stopped, cut off or dead"
            peer = json.loads(text)
            if (
                peer
                and (peer["host"], peer["boot"]) == (self._me["host"], self._me["boot"])
                and not identity.runs(peer["pid"])
            ):
                return f"process {index} (pid {peer['pid']} on {peer['host']}) has ended"
        return None

    def _text(self, index: int) -> str | None:
        try:
            return self._path(index).read_text()
        except FileNotFoundError:
            return None

    def _write(self, number: int) -> None:
        if self._stop.is_set():
            return
        with contextlib.suppress(OSError):
            _put(self._path(self._index), json.dumps({**self._me, "beat": number}))

    def _path(self, index: int) -> Path:
        return self._folder / f"alive.{index}"


def _beat(write: Callable[[], Callable[[int], None] | None], stop: threading.Event) -> None:
    number = 0
    while not stop.wait(_BEAT):
        number += 1
        call = write()
        if call is None:
            return
        call(number)


def _put(path: Path, text: str) -> None:
    """Make a small file appear whole."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.write_text(text)
    part.rename(path)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
