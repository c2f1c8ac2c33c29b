"""Commands in the documents are ones that exist, with options and keys that exist.

The `python` blocks of a page are run (see conftest.py). Its `console` blocks would train models and install
distributions, so each line that begins with `$` is checked against the command's own parser instead.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import check_workspace
import pytest

from styrax.core.cli import Parser
from styrax.core.config import find_schema, read_config
from styrax.core.registry import names, resolve

ROOT = Path(check_workspace.__file__).parents[1]
WORKSPACE = check_workspace.Workspace.load(ROOT)
STAGES = subprocess.check_output([ROOT / ".ci/run", "--list"], text=True).split("\n")
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> Iterator[Path]:
    yield from (ROOT / "docs").rglob("*.md")
    yield from ROOT.glob("*.md")
    yield from ROOT.glob("packages/*/README.md")


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield (page, command, error shown below it or "") for each command of each page; `a && b` is two."""
    for page in sorted(pages()):
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            for line, output in re.findall(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                for command in line.replace("\\\n", " ").split(" && "):
                    yield str(page.relative_to(ROOT)), command, output if output.startswith("error: ") else ""


def check_styrax(arguments: list[str]) -> None:
    if arguments[:1] in (["--help"], ["--version"], []):
        return
    name, *rest = arguments
    assert name in names("styrax.commands"), f"no command {name}"
    module = resolve("styrax.commands", name)
    parser = Parser(prog=f"styrax {name}", allow_abbrev=False)
    module.add_arguments(parser)
    found, extra = parser.parse_known_args(rest)
    assert [item for item in extra if item.startswith("-") or "=" not in item] == []
    recipe = getattr(found, "config", None)
    if recipe in names("styrax.recipes"):
        read_config(find_schema("train"), recipe, [*getattr(found, "overrides", ()), *extra])


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    known = {package.name: package for package in WORKSPACE.packages}
    for requirement in re.findall(r"styrax[\w-]*(?:\[[\w,-]+\])?", " ".join(arguments)):
        name, _, extras = requirement.rstrip("]").partition("[")
        assert name in known, f"no distribution {name}"
        assert set(filter(None, extras.split(","))) <= set(known[name].project.get("optional-dependencies", {}))


def check_uv(arguments: list[str]) -> None:
    if arguments[0] == "pip":
        check_pip(arguments[1:])
    elif arguments[0] == "run":
        rest = arguments[1:]
        while rest[0].startswith("-"):
            if rest[0] == "--group":
                assert rest.pop(1) in WORKSPACE.pyproject["dependency-groups"]
            rest.pop(0)
        check(rest)
    else:
        assert arguments[0] in ("add", "lock", "sync", "build"), f"uv {arguments[0]} is not one that we write of"


def check_python(arguments: list[str]) -> None:
    match arguments:
        case ["-m", "pip", *rest]:
            check_pip(rest)
        case ["-m", module, *_]:
            assert module in ("pytest", "venv"), f"-m {module} is not one that we write of"
        case [script, *_]:
            assert (ROOT / script).is_file(), f"no script {script}"


def check_ci(arguments: list[str]) -> None:
    stages = {line.split()[0] for line in STAGES if line.strip()}
    assert set(arguments) <= {*stages, "--list"}


def check_pytest(arguments: list[str]) -> None:
    for argument in arguments:
        if "/" in argument:
            assert (ROOT / argument.partition("::")[0]).exists(), f"no {argument}"


CHECKS = {
    ".ci/run": check_ci,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "styrax": check_styrax,
    "uv": check_uv,
}
#: Commands of others, whose arguments are theirs.
OTHERS = ("cd", "git", "kill", "lint-imports", "pre-commit", "pyright", "ruff", "sphinx-build", "touch")


def check(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program in CHECKS:
        CHECKS[program](arguments)
    else:
        assert program in OTHERS, f"{program} is not a command that the documents use"


COMMANDS = [pytest.param(*found[1:], id=": ".join(found[:2])) for found in dict.fromkeys(commands())]


@pytest.mark.parametrize(("command", "error"), COMMANDS)
def test_a_command_in_a_document_does_what_it_says(command: str, error: str):
    words = shlex.split(command, comments=True)
    if error:
        with pytest.raises(ValueError, match=":") as found:
            check(words)
        assert f"error: {found.value}".split() == error.split()
    else:
        check(words)


@pytest.mark.parametrize(
    "command",
    [
        "styrax trian quickstart",
        "styrax train quickstart --rum runs/a",
        "styrax train quickstart train.stesp=3",
        "pip install styrax-optimizer",
        "pip install 'styrax[cuda11]'",
        ".ci/run tests",
        "uv run --group lints ruff check",
        "python tools/no_such_tool.py",
        "pytest packages/none/tests",
        "make all",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str):
    with pytest.raises((AssertionError, ValueError)):
        check(shlex.split(command))


def test_workflows_name_stages_that_exist():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
    named = [line.split() for line in re.findall(r"run: \.ci/run ([a-z ]+)$", text, re.MULTILINE)]
    named += [group.split() for group in re.findall(r'"([a-z ]+)"', *re.findall(r"stages: \[(.*)\]", text))]
    assert len(named) >= 6
    for stages in named:
        check_ci(stages)


def tables() -> Iterator[tuple[str, str]]:
    sections = find_schema("train").sections.keys()
    for page in pages():
        for number, text in enumerate(TOML.findall(page.read_text(encoding="utf-8"))):
            if (table := tomllib.loads(text)) and table.keys() <= sections:
                yield f"{page.relative_to(ROOT)}:{number}", text


@pytest.mark.parametrize(("name", "text"), tables(), ids=lambda value: value if ".md:" in value else "")
def test_configurations_of_runs_can_be_read(name, text, tmp_path):
    """Whatever a page shows as TOML of a run is one: no key that is none, no value out of its limits."""
    (tmp_path / "run.toml").write_text(text)
    read_config(find_schema("train"), str(tmp_path / "run.toml"), [])
