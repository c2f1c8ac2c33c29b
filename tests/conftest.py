"""Shared by the tests that compose libraries."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import support


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of text, the same on every machine: a few modules that every Python has."""
    return support.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def here(corpus, tmp_path_factory):
    """The command in one folder for a whole file of tests, with the cache that runs in this process use too."""
    folder = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STYRAX_CACHE", str(folder / "cache"))
        yield support.Command(corpus, folder)


@pytest.fixture
def styrax(corpus, tmp_path):
    """The command, with a cache of its own, in a folder of its own."""
    return support.Command(corpus, tmp_path)
