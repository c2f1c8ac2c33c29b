"""The folder of a run: what is in it, and how it is written."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from styrax.core import UserError, trackers

UPSTREAMS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")

STARTING = ".starting"
"""Marks a folder in which a run is being started, until its config.toml is there."""


class RunDir:
    """Names and writes the files of a run.

    ======================= ===========================================================
    ``config.toml``         the resolved configuration
    ``versions.json``       versions, machine, configuration and folder of each start, newest last
    ``metrics.jsonl``       one object a logged step; equal runs give equal bytes
    ``events.jsonl``        start, compile, evaluate, save, throughput, goodput, end; wall time
    ``checkpoints/``        complete checkpoints by step
    ``tokenizer.json``      what turns text into the run's ids
    ``samples/``            text, by step
    ``summary.json``        numbers of the last finished start: parameters, baselines
    ``report.html``         the report, with ``loss.png``
    ``stacks-N.txt``        where process N stood when its watchdog found that nothing moved
    ``STOP``                if somebody makes it, the run ends after the running step; it is removed then
    ======================= ===========================================================

    Args:
        path: The folder; it is made by :meth:`create`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = self.path / "tokenizer.json"
        self.samples = self.path / "samples"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.picture = self.path / "loss.png"
        self.stop = self.path / "STOP"

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether something was saved, whole or not; a lock and what a killed save left are nothing."""
        if not self.checkpoints.is_dir():
            return False
        return any(not p.name.startswith(".") and p.name != "LOCK" for p in self.checkpoints.iterdir())

    def create(self) -> None:
        """Make the folder and see that it can be written; what a start that was killed left there is no obstacle."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--run {self.path} is a file; expected a folder, or a name that is free")
        if self.path.is_dir() and not self.exists and self.has_checkpoint:
            raise UserError(f"--run {self._without_config()}, or choose another folder")
        if self.path.is_dir() and not self.exists and (inside := self._foreign()):
            raise UserError(
                f"--run {self.path} is not empty and holds no run (no config.toml; it has {', '.join(inside[:3])}); "
                "choose another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
            if not self.exists:
                (self.path / STARTING).touch()
        except OSError as error:
            raise UserError(
                f"cannot write in the run directory {self.path}: {error.strerror}. Choose another with --run, or "
                "make it writable"
            ) from error

    def require(self) -> None:
        """Raise if no run was started here."""
        if self.exists:
            return
        if self.has_checkpoint:
            raise UserError(self._without_config())
        if self.path.exists() and (not self.path.is_dir() or self._foreign()):
            what = "it has no config.toml" if self.path.is_dir() else "it is a file"
            raise UserError(f"{self.path} is not a run: {what}. Name the folder of a run, such as runs/quickstart")
        what = "it has no config.toml" if self.path.exists() else "it does not exist"
        raise UserError(
            f"{self.path} is not a run: {what}. "
            f"Start one with: styrax train quickstart --run {shlex.quote(str(self.path))}"
        )

    def begin(self, config: str, configuration: str | None = None) -> None:
        """Note what runs here: from now on the folder holds a run.

        Args:
            config: The resolved configuration, as TOML.
            configuration: What it was read from (:func:`styrax.train.resume.source`); None for the run's own.
        """
        write_atomic(self.config, config)
        (self.path / STARTING).unlink(missing_ok=True)
        starts = self.read_starts()
        named = configuration or (starts[-1].get("configuration") if starts else None)
        start = versions() | ({"configuration": named} if named else {}) | {"folder": str(Path.cwd())}
        write_atomic(self.versions, json.dumps([*starts, start], indent=1))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn errors of the file system into one that names the run and the cure."""
        try:
            yield
        except OSError as error:
            if isinstance(error.filename, (str, bytes)) and not self._is_inside(error.filename):
                raise UserError(
                    f"cannot read or write {error.filename}: {error.strerror or error}. "
                    "Check the path, its permissions and the space on its disk"
                ) from error
            raise UserError(
                f"cannot write the run {self.path}: {error.strerror or error} ({error.filename or 'file unknown'}). "
                "Free some space or make it writable, then start again: the run goes on from its last whole checkpoint"
            ) from error

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Keep what turns text into ids, so that the run can be read without its data."""
        temporary = self.path / f".tokenizer-{os.getpid()}"
        try:
            tokenizer.save(temporary)
            temporary.replace(self.tokenizer)
        finally:
            temporary.unlink(missing_ok=True)

    def save_sample(self, step: int, text: str) -> None:
        """Keep text that the model of a step made."""
        self.samples.mkdir(exist_ok=True)
        write_atomic(self.samples / f"{step:08d}.txt", text)

    def read_samples(self) -> dict[int, str]:
        """What the models of some steps made, by step."""
        paths = sorted(self.samples.glob("*.txt")) if self.samples.is_dir() else []
        return {int(p.stem): p.read_text(encoding="utf-8", errors="replace") for p in paths if p.stem.isdecimal()}

    def read_starts(self) -> list[dict[str, Any]]:
        """Versions, machine, configuration and folder of each start, newest last."""
        return [start for start in read_json(self.versions, list) if isinstance(start, dict)]

    def last_start(self) -> dict[str, Any]:
        """The newest of :meth:`read_starts`; empty when nothing is known of it."""
        return (self.read_starts() or [{}])[-1]

    def read_summary(self) -> dict[str, Any]:
        """The numbers of summary.json."""
        return {k: v for k, v in read_json(self.summary, dict).items() if isinstance(v, (int, float))}

    def read_metrics(self) -> list[dict[str, Any]]:
        """The logged steps, in order; lines that cannot be read are left out."""
        return trackers.read(self.metrics) if self.metrics.is_file() else []

    def read_events(self) -> list[dict[str, Any]]:
        """The events, in order; lines that cannot be read are left out."""
        return _read_lines(self.events)

    def add_event(self, event: str, **fields: Any) -> None:
        """Append one event with the wall time, over the torn end that a crash may have left."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}, allow_nan=False)
        trackers.drop_torn_end(self.events)
        with self.events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _foreign(self) -> list[str]:
        """Names in the folder that no start of a run can have left; a start marks the folder first."""
        if (self.path / STARTING).is_file():
            return []
        return sorted(
            p.name
            for p in self.path.iterdir()
            if not (p.name.startswith(".") and p.is_file())
            and not (p == self.checkpoints and p.is_dir() and not self.has_checkpoint)
            and not (p == self.metrics and p.is_file() and not p.stat().st_size)
        )

    def _without_config(self) -> str:
        return (
            f"{self.path} holds checkpoints but no config.toml, which says what they are of. Put that file back; "
            "each checkpoint keeps what was in it, as items.run.value.config of: "
            f"styrax checkpoint show {shlex.quote(str(self.path))} --json"
        )

    def _is_inside(self, name: str | bytes) -> bool:
        path = Path(os.fsdecode(name))
        return path.name == str(path) or path.absolute().is_relative_to(self.path.absolute())


def versions() -> dict[str, Any]:
    """Versions of the libraries that are installed, and of the machine."""
    names = [d.metadata["Name"] for d in metadata.distributions() if (d.metadata["Name"] or "").startswith("styrax")]
    found: dict[str, str] = {}
    for name in (*sorted(set(names)), *UPSTREAMS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        **found,
    }


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: temporary sibling, fsync, rename."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, kind: type) -> Any:
    """Read a file that a run can do without.

    Args:
        path: A JSON file.
        kind: ``dict`` or ``list``, whichever it holds.

    Returns:
        What it holds; empty when it is missing, or, with a warning, when it is damaged.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return kind()
    except ValueError:
        value = None
    if isinstance(value, kind):
        return value
    warnings.warn(f"{path} is damaged, so what it says is left out", stacklevel=2)
    return kind()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            lines.append(value)
    return lines
