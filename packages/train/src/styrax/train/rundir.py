"""The folder of a run: what is in it, and how it is written."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from styrax.core import UserError, trackers

UPSTREAMS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


class RunDir:
    """Names and writes the files of a run.

    ======================= ===========================================================
    ``config.toml``         the resolved configuration
    ``versions.json``       versions and machine of each start, newest last
    ``metrics.jsonl``       one object a logged step; equal runs give equal bytes
    ``events.jsonl``        start, compile, evaluate, save, throughput, end; wall time
    ``checkpoints/``        complete checkpoints by step
    ``tokenizer.json``      what turns text into the run's ids
    ``samples/``            text, by step
    ``report.html``         the report, with ``loss.png``
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
        self.report = self.path / "report.html"
        self.picture = self.path / "loss.png"

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    def create(self) -> None:
        """Make the folder and see that it can be written."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--run {self.path} is a file; expected a folder, or a name that is free")
        if self.path.is_dir() and not self.exists and any(self.path.iterdir()):
            inside = sorted(p.name for p in self.path.iterdir())[:3]
            raise UserError(
                f"--run {self.path} is not empty and holds no run (no config.toml; it has {', '.join(inside)}); "
                "choose another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"cannot write in the run directory {self.path}: {error.strerror}. Choose another with --run, or "
                "make it writable"
            ) from error

    def require(self) -> None:
        """Raise if no run was started here."""
        if not self.exists:
            what = "has no config.toml" if self.path.exists() else "does not exist"
            raise UserError(
                f"{self.path} is not a run: it {what}. Start one with: styrax train quickstart --run {self.path}"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn errors of the file system into one that names the run and the cure."""
        try:
            yield
        except OSError as error:
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

    def record_versions(self) -> None:
        """Append the versions and the machine of this start."""
        starts = json.loads(self.versions.read_text()) if self.versions.is_file() else []
        write_atomic(self.versions, json.dumps([*starts, versions()], indent=1))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The logged steps, in order; a torn last line is left out."""
        return trackers.read(self.metrics) if self.metrics.is_file() else []

    def read_events(self) -> list[dict[str, Any]]:
        """The events, in order; a torn last line is left out."""
        return _read_lines(self.events)

    def add_event(self, event: str, **fields: Any) -> None:
        """Append one event with the wall time."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        with self.events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


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


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines: list[Mapping[str, Any]] = []
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        lines.append(json.loads(line))
    return [dict(x) for x in lines]
