"""The checks of the workspace: the real one passes, and each check finds what was broken on purpose."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import check_workspace as checks
import pytest

ROOT = Path(checks.__file__).parents[1]

# Written in two parts, so that the check of this very file does not find them.
HOME = "/" + "home/somebody/data"
UNFINISHED = "TO" + "DO"


def test_the_workspace_is_sound():
    workspace = checks.Workspace.load(ROOT)
    assert [problem for check in checks.CHECKS for problem in check(workspace)] == []


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text).lstrip(), encoding="utf-8")


def write_package(root: Path, name: str, dependencies: list[str], module: str | None, entries: str = "") -> None:
    folder = root / "packages" / name.removeprefix("styrax-")
    pyproject = f"""
[project]
name = "{name}"
version = "0.3.1"
requires-python = ">=3.11"
dependencies = {dependencies}
{entries}
[tool.uv.build-backend]
module-name = {f'"{module}"' if module else []}
"""
    write(folder / "pyproject.toml", pyproject)
    write(folder / "README.md", f"# {name}\n\n```python\n1 + 1\n```\n")
    write(folder / "CHANGELOG.md", "## 0.3.1 (unreleased)\n")
    (folder / "LICENSE").symlink_to("../../LICENSE")
    if module:
        write(folder / "src" / module.replace(".", "/") / "py.typed")
        write(folder / "tests" / f"test_{folder.name}.py", "def test_it(): ...\n")
        write(root / f"docs/api/{folder.name}.md", "# A toy\n")


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A workspace of two libraries and their meta-package, with nothing wrong in it."""
    root = """
        [project]
        requires-python = ">=3.11"
        [tool.importlinter]
        root_packages = ["styrax.base", "styrax.toys"]
    """
    write(tmp_path / "pyproject.toml", root)
    write(tmp_path / "uv.lock", 'source = { registry = "https://pypi.org/simple" }\n')

    base, toys = "styrax-base>=0.3,<0.4", "styrax-toys>=0.3,<0.4"
    write_package(tmp_path, "styrax", [base, toys], None)
    write_package(tmp_path, "styrax-base", ["numpy>=2.1"], "styrax.base")
    entries = """
[project.entry-points]
"styrax.optim" = { ball = "styrax.toys.config:Ball" }
"styrax.commands" = { roll = "styrax.toys.command" }
"""
    write_package(tmp_path, "styrax-toys", [base, "grain>=0.2.18,<0.3"], "styrax.toys", entries)

    write(tmp_path / BASE / "__init__.py", 'from styrax.base.size import BIG\n__all__ = ["BIG"]\n')
    write(tmp_path / BASE / "size.py", "BIG = 3\n")
    init = """
        from typing import TYPE_CHECKING
        from styrax.core import lazy_exports
        if TYPE_CHECKING:
            from styrax.toys.config import Ball
        __all__ = ["Ball"]
        __getattr__, __dir__ = lazy_exports(__name__, {"Ball": "config"})
    """
    write(tmp_path / TOYS / "__init__.py", init)
    config = """
        from dataclasses import dataclass
        @dataclass(frozen=True, kw_only=True)
        class Ball:
            size: int = 1
            def build(self): ...
    """
    write(tmp_path / TOYS / "config.py", config)
    write(tmp_path / TOYS / "command.py", "HELP = ''\ndef add_arguments(parser): ...\ndef run(args): ...\n")
    return tmp_path


BASE, TOYS = "packages/base/src/styrax/base", "packages/toys/src/styrax/toys"
PROJECT = "packages/toys/pyproject.toml"

Check = Callable[[checks.Workspace], object]
Change = Callable[[Path], None]


def replace(name: str, old: str, new: str) -> Change:
    def change(root: Path) -> None:
        text = (root / name).read_text(encoding="utf-8")
        assert old in text
        (root / name).write_text(text.replace(old, new), encoding="utf-8")

    return change


def create(name: str, text: str = "") -> Change:
    return lambda root: write(root / name, text)


def delete(name: str) -> Change:
    return lambda root: (root / name).unlink()


# What is changed in the sound toy, and what the check then says.
BREAKAGES: dict[Check, list[tuple[Change, str]]] = {
    checks.sibling_ranges: [
        (
            replace("packages/styrax/pyproject.toml", "styrax-toys>=0.3,<0.4", "styrax-toys==0.3.1"),
            "styrax-toys==0.3.1 does not fit styrax-toys 0.3.1; write styrax-toys>=0.3,<0.4",
        ),
        (
            replace("packages/base/pyproject.toml", 'version = "0.3.1"', 'version = "0.4.0"'),
            "does not fit styrax-base 0.4.0; write styrax-base>=0.4,<0.5",
        ),
        (replace(PROJECT, "styrax-base>=0.3,<0.4", "styrax-base>=0.3,<1"), "write styrax-base>=0.3,<0.4"),
        (replace(PROJECT, "styrax-base>=0.3,<0.4", "styrax-base>=0.3"), "write styrax-base>=0.3,<0.4"),
    ],
    checks.meta_lists_libraries: [
        (
            replace("packages/styrax/pyproject.toml", "styrax-toys", "styrax-balls"),
            "packages/styrax/pyproject.toml: does not list styrax-toys",
        ),
    ],
    checks.upstream_bounds: [
        (
            replace("packages/base/pyproject.toml", "numpy>=2.1", "numpy>=2.1,<3"),
            "has an upper bound; only grain and orbax-checkpoint may have one",
        ),
        (replace("packages/base/pyproject.toml", "numpy>=2.1", "numpy"), "numpy has no lower bound"),
    ],
    checks.same_python: [
        (replace(PROJECT, '">=3.11"', '">=3.12"'), "requires-python is '>=3.12', expected '>=3.11'"),
    ],
    checks.package_files: [
        (delete("packages/toys/LICENSE"), "toys/LICENSE: must be a link to ../../LICENSE"),
        (delete("packages/toys/README.md"), "toys/README.md: must begin with '# styrax-toys'"),
        (create("packages/toys/README.md", "# Toys\n"), "toys/README.md: must begin with '# styrax-toys'"),
        (create("packages/toys/README.md", "# styrax-toys\n"), "toys/README.md: has no python block"),
        (replace("packages/toys/CHANGELOG.md", "0.3.1", "0.3.0"), "has no heading '## 0.3.1 (unreleased"),
        (delete(f"{TOYS}/py.typed"), "toys/py.typed: is missing"),
        (delete("packages/toys/tests/test_toys.py"), "toys/tests: has no test_*.py"),
        (delete("docs/api/toys.md"), "docs/api/toys.md: is missing"),
    ],
    checks.namespace_is_empty: [
        (create("packages/toys/src/styrax/__init__.py"), "src/styrax/__init__.py: stands in the namespace"),
        (create("packages/styrax/src/styrax/all.py"), "src/styrax/all.py: stands in the namespace"),
    ],
    checks.exports_agree: [
        (replace(f"{TOYS}/__init__.py", '["Ball"]', '["Cube"]'), "__all__ lacks Ball, exported lazily"),
        (replace(f"{TOYS}/__init__.py", '["Ball"]', '["Ball", "Cube"]'), "lists Cube, which nothing exports"),
        (replace(f"{TOYS}/__init__.py", '["Ball"]', '["Ball", "Ball"]'), "lists Ball twice"),
        (
            replace(f"{TOYS}/__init__.py", "import Ball\n", "import Cube\n"),
            "Ball, Cube must stand both in lazy_exports and under TYPE_CHECKING",
        ),
        (create(f"{BASE}/__init__.py"), "base/__init__.py: has no __all__"),
        (delete(f"{BASE}/__init__.py"), "base/__init__.py: is missing"),
    ],
    checks.imports_are_checked: [
        (replace("pyproject.toml", ', "styrax.toys"', ""), "root_packages lacks styrax.toys"),
    ],
    checks.entry_points_work: [
        (replace(f"{TOYS}/__init__.py", '["Ball"]', '["Cube"]'), "exports Cube, which fails: AttributeError"),
        (replace(PROJECT, "config:Ball", "config:Cube"), "styrax.toys.config:Cube cannot be imported"),
        (
            replace(PROJECT, "styrax.optim", "styrax.optin"),
            "styrax.optin ball = styrax.toys.config:Ball is in",
        ),
        (replace(PROJECT, "config:Ball", "command"), "styrax.optim ball = styrax.toys.command is not a data"),
        (replace(f"{TOYS}/config.py", "frozen=True", "frozen=False"), "is not frozen"),
        (replace(f"{TOYS}/config.py", ", kw_only=True", ""), "takes size by position"),
        (replace(f"{TOYS}/config.py", "def build", "def make"), "has no method build"),
        (
            replace(f"{TOYS}/command.py", "HELP", "TEXT"),
            "styrax.commands roll = styrax.toys.command has no HELP",
        ),
        (replace(f"{TOYS}/command.py", "def run", "def go"), "has no function run"),
        (replace(f"{TOYS}/command.py", "HELP", "import optax\nHELP"), "styrax.toys.command loads"),
        (replace(f"{TOYS}/command.py", "HELP", "import os; os._exit(3)\nHELP"), "ends the process"),
    ],
    checks.lock_names_pypi: [
        (replace("uv.lock", "pypi.org", "mirror.example"), "names the index https://mirror.example/simple"),
    ],
    checks.forbidden_words: [
        (create("docs/page.md", f"See {HOME}.\n"), "docs/page.md:1: a path of one machine"),
        (create("tools/tool.py", f"x = 1  # {UNFINISHED}\n"), "tools/tool.py:1: an unfinished place"),
        (create("docs/page.md", "<" * 7 + " ours\n"), "docs/page.md:1: a merge conflict"),
    ],
}


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_check_finds_what_is_broken_and_nothing_else(toy: Path, check: Check):
    assert list(check(checks.Workspace.load(toy))) == []
    assert check in BREAKAGES


CASES = [(check, *case) for check, cases in BREAKAGES.items() for case in cases]


@pytest.mark.parametrize(("check", "change", "expected"), CASES, ids=[f"{c[0].__name__}-{c[2]}" for c in CASES])
def test_a_check_can_fail(toy: Path, check: Check, change: Change, expected: str):
    change(toy)
    found = list(check(checks.Workspace.load(toy)))
    assert any(expected in problem for problem in found), found


def test_a_long_file_is_a_warning(toy: Path):
    write(toy / TOYS / "long.py", "x = 1\n" * 401)
    assert list(checks.long_files(checks.Workspace.load(toy))) == [
        f"{TOYS}/long.py: 401 lines, over 400: is it one question?"
    ]


def test_every_problem_is_printed_at_once(toy: Path, capsys: pytest.CaptureFixture[str]):
    delete("packages/toys/LICENSE")(toy)
    replace("pyproject.toml", ', "styrax.toys"', "")(toy)
    assert checks.main([str(toy)]) == 1
    output = capsys.readouterr().out
    assert "toys/LICENSE" in output
    assert "root_packages lacks styrax.toys" in output
    assert output.endswith("2 problems\n")
