"""Runs of the real command in real processes, at sizes that compile fast."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np

TINY = {
    "model.num_layers": 2,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.dropout": 0.1,
    "data.tokenizer": '"byte"',
    "data.seq_len": 32,
    "data.batch_size": 4,
    "data.held_out": 0.2,
    "data.max_held_out_batches": 2,
    "optim.learning_rate": 0.01,
    "checkpoint.every": 5,
    "train.steps": 20,
    "train.eval_every": 10,
    "train.baselines": "false",
}


def write_corpus(folder: Path) -> Path:
    """Split the source of two small standard modules into documents."""
    import bisect
    import textwrap

    for module in (bisect, textwrap):
        for number, part in enumerate(inspect.getsource(module).split("\ndef ")):
            (folder / f"{module.__name__}-{number}.txt").write_text(part, encoding="utf-8")
    return folder


class Command:
    """``styrax`` as a process on one CPU device.

    Args:
        corpus: Folder of text files.
        folder: Where it runs; it also holds the cache of token stores.
    """

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.corpus, self.folder = corpus, folder
        self.executable = Path(sys.executable).with_name("styrax")

    def environment(self, devices: int = 1) -> dict[str, str]:
        """The process's variables."""
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
        flags.append(f"--xla_force_host_platform_device_count={devices}")
        return {
            **os.environ,
            "XLA_FLAGS": " ".join(flags),
            "STYRAX_CACHE": str(self.folder / "cache"),
            "COLUMNS": "200",
        }

    def config(self, name: str = "tiny.toml", **changes: object) -> Path:
        """Write the tiny configuration as a file; ``a__b=value`` sets ``a.b``, None leaves a key out."""
        keys = {**TINY, "data.sources": json.dumps([str(self.corpus)])}
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        path = self.folder / name
        path.write_text("".join(f"{k} = {v}\n" for k, v in keys.items() if v is not None))
        return path

    def start(self, *args: object, devices: int = 1, out: IO[str] | None = None) -> subprocess.Popen[str]:
        """Start it; what it says goes into pipes, or all of it into ``out``."""
        return subprocess.Popen(
            [self.executable, *map(str, args)], cwd=self.folder, env=self.environment(devices), text=True,
            stdout=out or subprocess.PIPE, stderr=out or subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def __call__(self, *args: object, devices: int = 1, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run it to its end, and check its exit code."""
        process = self.start(*args, devices=devices)
        out, err = process.communicate(timeout=300)
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        assert code is None or done.returncode == code, f"exit code {done.returncode}, expected {code}\n{out}\n{err}"
        return done

    def fails(self, *args: object, code: int = 1, devices: int = 1) -> str:
        """Run it, expecting a clear error; returns what it says."""
        done = self(*args, code=code, devices=devices)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stderr.startswith(("error:", "usage:")), done.stderr
        return done.stderr


def lines(run: Path) -> list[dict]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def arrays(run: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Step and every array of a run's newest checkpoint, by path."""
    from styrax.checkpoint import CheckpointConfig
    from styrax.core.tree import flatten

    with CheckpointConfig().build(run / "checkpoints", read_only=True) as store:
        step = store.latest()
        assert step is not None
        items = store.restore(step, dict.fromkeys(("params", "opt_state", "variables", "rng", "data")))
    state = items.pop("data")
    return step, {**{k: np.asarray(v) for k, v in flatten(items).items()}, "data": np.array(json.dumps(state))}


def assert_same_run(one: Path, other: Path) -> None:
    """Parameters, optimizer state, random state, data position and metrics are equal bit for bit."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    (step, first), (step_other, second) = arrays(one), arrays(other)
    assert step == step_other
    assert first.keys() == second.keys()
    for path, value in first.items():
        assert value.dtype == second[path].dtype, path
        assert value.tobytes() == second[path].tobytes(), path
