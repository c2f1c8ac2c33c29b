"""The benchmark programs run; what they print is for people."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "tools" / "benchmarks"


@pytest.mark.slow
def test_train_overhead_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "train_overhead.py", "--rounds", "3", "--host-steps", "20", "--shape", "small"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ours / by hand" in done.stdout
    assert "host time a step" in done.stdout


@pytest.mark.slow
def test_optim_update_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "optim_update.py", "--size", "2e4", "--rounds", "2"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("adamw / optax.adamw: ", "adam_mini: ", "stochastic", "soap, lines of the program: "):
        assert part in done.stdout


@pytest.mark.slow
def test_checkpoint_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "checkpoint.py", "--rounds", "1", "--quick"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("big: ", "small: ", "half: ", "looking at ", " saves of ", " goals met"):
        assert part in done.stdout


@pytest.mark.slow
def test_generate_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "generate.py", "--quick"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout


@pytest.mark.slow
def test_models_forward_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "models_forward.py", "--quick", "--rounds", "1"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("f32 forward: ours ", "bf16 step: ours ", "temporary memory: "):
        assert part in done.stdout


@pytest.mark.slow
def test_pipeline_memory_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "pipeline_memory.py", "--quick"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\ngpipe, recompute_stages ") == 2 and done.stdout.count("\n1f1b ") == 2


@pytest.mark.slow
def test_train_step_runs():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "train_step.py", "--quick"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for part in ("quick, llama, f32: ", "quick, llama, bf16: ", "by hand", "held-out loss after "):
        assert part in done.stdout
