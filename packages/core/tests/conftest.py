"""A distribution that other tests see as installed: a schema, parts, recipes and commands, good and bad."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PARTS = '''
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from styrax.core.config import Choice, Fraction, NonNegative, Positive, PositiveFloat, Recipe, Schema
from styrax.core.mesh import MeshConfig


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Falls along a cosine.

    Attributes:
        warmup: Steps of linear warm-up.
        final: Last rate, relative to the peak.
    """

    kind: Literal["cosine"] = "cosine"
    warmup: NonNegative = 10
    final: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, stable, decay.

    Attributes:
        warmup: Steps of linear warm-up.
        decay: Share of the steps that decay.
    """

    kind: Literal["wsd"] = "wsd"
    warmup: NonNegative = 10
    decay: Fraction = 0.2


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Plain descent.

    Attributes:
        rate: Peak learning rate,
            per step.
        betas: Decays.
        schedule: How the rate moves.
        clip: Largest norm, "none" for no limit.
        groups: Multipliers by role.
        stages: Schedules one after another.
        named: Schedules by name.
    """

    rate: PositiveFloat = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Cosine | WSD = Cosine(warmup=100)
    clip: PositiveFloat | None = 1.0
    groups: dict[str, float] = field(default_factory=dict)
    stages: tuple[Cosine | WSD, ...] = ()
    named: dict[str, Cosine | WSD] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [f"betas[{i}] = {b} is not below 1" for i, b in enumerate(self.betas) if b >= 1]
        if problems:
            raise ValueError("\\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long.

    Attributes:
        steps: Updates in all.
        name: A name.
        mode: Which way.
        folder: Where to.
        note: Anything, or none.
        trackers: Names.
    """

    steps: Positive = 100
    name: str = "run"
    mode: Literal["fast", "exact"] = "fast"
    folder: Path = Path("runs")
    note: str | None = None
    trackers: tuple[str, ...] = ()
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class Needy:
    """One key must be given.

    Attributes:
        size: How large.
    """

    size: Positive


SCHEMA = Schema(
    sections={
        "run": Run,
        "optim": Choice(group="fake.optim", default="sgd"),
        "mesh": MeshConfig,
        "extra": Choice(group="fake.extra"),
    }
)
TINY = Recipe(name="fake-tiny", path=Path(__file__).with_name("tiny.toml"), doc="A tiny run.")
'''

HELLO = """
import os
import warnings

HELP = "say hello"


def add_arguments(parser):
    parser.add_argument("--fail", default="")
    parser.add_argument("overrides", nargs="*", default=[])


def run(args):
    from styrax.core import UserError

    if args.fail == "user":
        raise UserError("the disk is round\\n  make it flat")
    if args.fail == "bug":
        raise KeyError("oops")
    if args.fail == "warn":
        warnings.simplefilter("always")
        warnings.warn("step 5 is damaged:\\n  x; taking step 4")
    if args.fail == "stopped":
        raise KeyboardInterrupt("SIGTERM before it began")
    if args.fail == "interrupt":
        raise KeyboardInterrupt
    if args.fail.startswith("os"):
        number = int(args.fail[2:])
        raise OSError(number, os.strerror(number), "/some/file")
    if args.fail == "pipe":
        raise BrokenPipeError
    print("hello", *args.overrides)
    return 0
"""

ENTRY_POINTS = """
[styrax.schemas]
fake = fake_parts:SCHEMA

[styrax.recipes]
fake-tiny = fake_parts:TINY

[fake.optim]
sgd = fake_parts:Sgd
broken = fake_absent:Thing

[fake.extra]
needy = fake_parts:Needy

[fake.twice]
one = fake_parts:Sgd

[styrax.commands]
fake-hello = fake_hello
fake-broken = fake_broken
fake-empty = fake_empty
"""


@pytest.fixture(scope="session")
def fake_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    (site / "fake_parts.py").write_text(PARTS)
    (site / "fake_hello.py").write_text(HELLO)
    (site / "fake_broken.py").write_text("import a_module_that_is_not_there\n")
    (site / "fake_empty.py").write_text("HELP = 'half a command'\n")
    (site / "tiny.toml").write_text("[run]\nsteps = 7\n\n[optim.schedule]\nwarmup = 1\n")
    _install(site, "fake", ENTRY_POINTS)
    _install(site, "rival", "[fake.twice]\none = fake_parts:Run\n")
    return site


@pytest.fixture
def fake(fake_site: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The fake distribution's module, importable for one test."""
    monkeypatch.syspath_prepend(str(fake_site))
    import fake_parts  # pyright: ignore[reportMissingImports]

    return fake_parts


@pytest.fixture
def styrax(fake_site: Path, tmp_path: Path):
    """Run the `styrax` command in a process of its own, where the fake distribution is installed."""

    def run(*arguments: str, code: str | None = None, **environment: str) -> SimpleNamespace:
        path = os.pathsep.join([str(fake_site), os.environ.get("PYTHONPATH", "")])
        command = ["-c", code] if code else ["-m", "styrax.core.cli"]
        done = subprocess.run(
            [sys.executable, *command, *arguments],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


def _install(site: Path, name: str, entry_points: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
