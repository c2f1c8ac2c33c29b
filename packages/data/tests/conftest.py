import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import styrax.core
import styrax.data
from styrax.data import ByteTokenizer, write_store

TEXT = "the cat sat on a mat; où est l'été? 日本語 0 12 345 def f(x): return x\n\t'quoted' <|endoftext|> 🙂"


def texts(count, seed=0, longest=60):
    """Documents of very different lengths, with characters of one to four bytes."""
    rng, words = random.Random(seed), TEXT.split(" ")
    return {f"doc/{i:03d}": " ".join(rng.choices(words, k=rng.randint(1, longest))) for i in range(count)}


@pytest.fixture(scope="session")
def documents():
    return texts(40)


@pytest.fixture(scope="session")
def store(tmp_path_factory, documents):
    return write_store(tmp_path_factory.mktemp("stores") / "words", documents, ByteTokenizer())


@pytest.fixture(scope="session")
def python_env():
    """Give the environment in which a fresh interpreter sees this package."""
    folders = [str(Path(module.__file__).parents[2]) for module in (styrax.core, styrax.data)]
    paths = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def run_python(python_env):
    """Run a program in a fresh interpreter that sees this package."""

    def run(code, *, timeout=120, check=True, **env):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**python_env, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run
