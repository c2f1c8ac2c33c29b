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


@pytest.fixture
def styrax(corpus, tmp_path):
    """The command, with a cache of its own, in a folder of its own."""
    return support.Command(corpus, tmp_path)
