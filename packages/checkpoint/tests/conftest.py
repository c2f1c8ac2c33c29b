"""Fixtures: a worker process, and items to save."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

WORKER = Path(__file__).with_name("worker.py")
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "JAX_PLATFORMS": "cpu",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="session")
def env():
    """The environment of fresh interpreters."""
    return ENV


@pytest.fixture(scope="session")
def worker_module():
    """The worker's functions, here."""
    spec = importlib.util.spec_from_file_location("checkpoint_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """Files that other libraries wrote, see `tools/golden/checkpoint_formats.py`."""
    folder = tmp_path_factory.mktemp("golden")
    shutil.unpack_archive(Path(__file__).with_name("golden") / "formats.zip", folder)
    return folder


class Worker:
    """Runs tasks of `worker.py`, one at a time, each in a forked process of its own."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
        )
        assert self.process.stdout.readline() == "ready\n"

    def start(self, task, output, env=None, **arguments):
        """Start a task; gives its pid."""
        line = {"task": task, "output": str(output), "env": env or {}, **arguments}
        self.process.stdin.write(json.dumps(line, default=str) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        """Wait for the task; gives its exit code, below 0 for a signal."""
        return int(self.process.stdout.readline())

    def run(self, task, output, env=None, **arguments):
        """Run a task to its end; gives its exit code."""
        self.start(task, output, env, **arguments)
        return self.end()


@pytest.fixture(scope="session")
def worker():
    """The one worker of this session."""
    worker = Worker()
    yield worker
    worker.process.stdin.close()
    worker.process.wait(timeout=30)


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh interpreter; gives the completed process."""

    def run(code, *arguments, python=sys.executable, env=None, timeout=120):
        script = tmp_path / "script.py"
        script.write_text(code)
        return subprocess.run(
            [python, script, *map(str, arguments)],
            env={**ENV, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def same():
    """Assert that two trees are equal: containers, leaf types, dtypes, shapes, bits."""

    def check(got, expected):
        import jax

        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
            assert type(left) is type(right)
            if isinstance(right, (jax.Array, np.ndarray, np.generic)):
                assert left.dtype == right.dtype
                assert left.shape == right.shape
                if jax.numpy.issubdtype(right.dtype, jax.dtypes.prng_key):
                    left, right = jax.random.key_data(left), jax.random.key_data(right)
                assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
            else:
                assert repr(left) == repr(right)

    return check


@pytest.fixture
def look(capsys):
    """Run `styrax checkpoint` in this process, as the command does; gives exit code, stdout and stderr."""
    from styrax.core.cli import main

    def run(*arguments):
        code = main(["checkpoint", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(code=code, out=out, err=err)

    return run
