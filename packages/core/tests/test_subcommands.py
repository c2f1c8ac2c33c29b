import argparse
import sys

import pytest

from styrax.core import UsageError
from styrax.core.cli import Parser
from styrax.core.subcommands import subcommands

MODULE = """
HELP = "do {0}"


def add_arguments(parser):
    parser.add_argument("what", nargs="?")
    parser.add_argument("--loud", action="store_true")


def run(args):
    print("{0}", args.what, args.loud)
    return {1}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "fake_actions"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, code in (("list", 0), ("import_", 3), ("quiet", None)):
        (folder / f"{name}.py").write_text(MODULE.format(name, code))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.fixture
def run(package, capsys):
    add_arguments, act = subcommands(package, ("list", "import", "quiet"), aliases={"ls": "list", "in": "import"})

    def run(*words, kind=argparse.ArgumentParser):
        parser = kind(prog="styrax fake")
        add_arguments(parser)
        return act(parser.parse_args(words)), capsys.readouterr().out

    return run


def test_an_action_is_its_module(run):
    assert run("list", "x") == (0, "list x False\n")
    assert run("import", "--loud") == (3, "import_ None True\n")
    assert run("quiet") == (0, "quiet None False\n")  # nothing returned is done


def test_another_name_is_the_same_action(run):
    assert run("ls", "x") == run("list", "x")
    assert run("in", "y") == run("import", "y")


def test_the_help_names_every_action(run, capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "list (ls) do list import (in) do import_ quiet do quiet" in text


def test_a_mistyped_action_or_option(run):
    with pytest.raises(UsageError, match=r"did you mean 'quiet'"):
        run("quiit", kind=Parser)
    with pytest.raises(UsageError, match=r"(?s)no option --lod .did you mean '--loud'.*usage: styrax fake list"):
        run("list", "--lod", kind=Parser)
    with pytest.raises(UsageError, match="required: ACTION"):
        run(kind=Parser)


def test_a_module_that_is_not_there_is_an_error_of_ours():
    add_arguments, _ = subcommands("styrax.core.commands", ("no_such",))
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        add_arguments(argparse.ArgumentParser())
