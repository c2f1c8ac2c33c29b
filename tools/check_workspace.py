"""Checks what no package can see of itself, and prints every problem at once.

    uv run --locked python tools/check_workspace.py [ROOT]

Each check is a function from the workspace to its problems, and CHECKS lists them. uv ignores version ranges
between the members of a workspace, so nothing else would notice a wrong one.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

#: The only upstreams with an upper bound: their next minor release may change what we build on.
CAPPED = ("grain", "orbax-checkpoint")
LONG_FILE = 400
PYPI = "https://pypi.org/simple"
TEXT = (".cfg", ".console", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", "")
#: What a published file must not hold, and how to say so. Written so that this file does not match itself.
FORBIDDEN = {
    re.compile(r"(?<![\w.~:/-])/(?:home|mnt|root|Users|work)/[\w.]"): "a path of one machine",
    re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b"): "an unfinished place",
    re.compile(r"^(?:<{7}|>{7}) "): "a merge conflict",
}


@dataclass(frozen=True)
class Package:
    """One folder of packages/ and its pyproject.toml."""

    folder: Path
    pyproject: dict[str, Any]

    @property
    def project(self) -> dict[str, Any]:
        return self.pyproject["project"]

    @property
    def name(self) -> str:
        return canonicalize_name(self.project["name"])

    @property
    def version(self) -> Version:
        return Version(self.project["version"])

    @property
    def requires(self) -> list[Requirement]:
        return [Requirement(text) for text in self.project.get("dependencies", ())]

    @property
    def module(self) -> str | None:
        """The import name, `styrax.optim`; None for the meta-package, which has no code."""
        return self.pyproject["tool"]["uv"]["build-backend"]["module-name"] or None

    @property
    def source(self) -> Path | None:
        """The folder of the import package."""
        return self.folder.joinpath("src", *self.module.split(".")) if self.module else None


@dataclass(frozen=True)
class Workspace:
    """The root and its packages."""

    root: Path
    pyproject: dict[str, Any]
    packages: tuple[Package, ...]

    @classmethod
    def load(cls, root: Path) -> "Workspace":
        """Read the root's pyproject.toml and that of every package."""
        folders = sorted(path.parent for path in (root / "packages").glob("*/pyproject.toml"))
        packages = tuple(Package(folder, read_toml(folder / "pyproject.toml")) for folder in folders)
        return cls(root, read_toml(root / "pyproject.toml"), packages)

    @property
    def libraries(self) -> tuple[Package, ...]:
        """Every package with code."""
        return tuple(package for package in self.packages if package.module)

    @cached_property
    def by_name(self) -> dict[str, Package]:
        return {package.name: package for package in self.packages}

    def where(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def files(self) -> Iterator[Path]:
        """Yield the text files that a commit could hold."""
        for folder in (".ci", ".github", "docs", "packages", "tests", "tools"):
            for path in sorted((self.root / folder).rglob("*")):
                inside = path.relative_to(self.root / folder).parts
                built = any(part.startswith(".") or part in ("__pycache__", "_build", "dist") for part in inside)
                if path.is_file() and not path.is_symlink() and path.suffix in TEXT and not built:
                    yield path
        yield from (path for path in sorted(self.root.glob("*")) if path.is_file() and path.suffix in TEXT)


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def next_breaking(version: Version) -> Version:
    """Give the first version that may break users of this one: 0.2 after 0.1.3, 3 after 2.4."""
    return Version(f"0.{version.minor + 1}") if version.major == 0 else Version(str(version.major + 1))


def sibling_ranges(workspace: Workspace) -> Iterator[str]:
    """A package takes its siblings from their current version up to the next breaking one, never pinned."""
    for package in workspace.packages:
        where = workspace.where(package.folder / "pyproject.toml")
        for requirement in package.requires:
            sibling = workspace.by_name.get(canonicalize_name(requirement.name))
            if sibling is None:
                continue
            end = next_breaking(sibling.version)
            bounds = {specifier.operator for specifier in requirement.specifier}
            if (
                bounds != {">=", "<"}
                or sibling.version not in requirement.specifier
                or Version(f"{end}.0") in requirement.specifier
            ):
                start = f"{sibling.version.major}.{sibling.version.minor}"
                yield (
                    f"{where}: {requirement} does not fit {sibling.name} {sibling.version}; "
                    f"write {sibling.name}>={start},<{end}"
                )


def meta_lists_libraries(workspace: Workspace) -> Iterator[str]:
    """The meta-package depends on every library."""
    for package in workspace.packages:
        if package.module is None:
            listed = {canonicalize_name(requirement.name) for requirement in package.requires}
            for library in workspace.libraries:
                if library.name not in listed:
                    where = workspace.where(package.folder / "pyproject.toml")
                    yield f"{where}: does not list {library.name}"


def upstream_bounds(workspace: Workspace) -> Iterator[str]:
    """An upstream has a lower bound, and no upper one: a cap goes stale and blocks every neighbour."""
    for package in workspace.packages:
        where = workspace.where(package.folder / "pyproject.toml")
        extras = package.project.get("optional-dependencies", {}).values()
        for requirement in [*package.requires, *(Requirement(text) for extra in extras for text in extra)]:
            name = canonicalize_name(requirement.name)
            if name in workspace.by_name:
                continue
            operators = {specifier.operator for specifier in requirement.specifier}
            if ">=" not in operators:
                yield f"{where}: {requirement} has no lower bound (>=); none can be tested"
            if operators - {">=", "!="} and name not in CAPPED:
                yield f"{where}: {requirement} has an upper bound; only {' and '.join(CAPPED)} may have one"


def same_python(workspace: Workspace) -> Iterator[str]:
    """Every package supports the Python versions that the workspace supports."""
    expected = workspace.pyproject["project"]["requires-python"]
    for package in workspace.packages:
        if (got := package.project.get("requires-python")) != expected:
            where = workspace.where(package.folder / "pyproject.toml")
            yield f"{where}: requires-python is {got!r}, expected {expected!r} as in the root"


def package_files(workspace: Workspace) -> Iterator[str]:
    """A package has a README, a changelog with its version, a licence, a type marker, tests and a page."""
    for package in workspace.packages:
        where, folder = workspace.where(package.folder), package.folder
        licence = folder / "LICENSE"
        if not licence.is_symlink() or licence.readlink() != Path("../../LICENSE"):
            yield f"{where}/LICENSE: must be a link to ../../LICENSE"
        readme = folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        if not text.startswith(f"# {package.name}\n"):
            yield f"{where}/README.md: must begin with '# {package.name}'"
        if package.module and "\n```python\n" not in text:
            yield f"{where}/README.md: has no python block, the example that is tested with only this package"
        changelog = folder / "CHANGELOG.md"
        text = changelog.read_text(encoding="utf-8") if changelog.is_file() else ""
        if not re.search(rf"^## {re.escape(str(package.version))} \(.+\)$", text, re.MULTILINE):
            yield f"{where}/CHANGELOG.md: has no heading '## {package.version} (unreleased or a date)'"
        if package.source and not (package.source / "py.typed").is_file():
            yield f"{workspace.where(package.source)}/py.typed: is missing"
        if package.module and not any((folder / "tests").glob("**/test_*.py")):
            yield f"{where}/tests: has no test_*.py"
        page = workspace.root / "docs" / "api" / f"{folder.name}.md"
        if package.module and not page.is_file():
            yield f"{workspace.where(page)}: is missing, the package's page of the API"


def namespace_is_empty(workspace: Workspace) -> Iterator[str]:
    """Nothing stands directly in src/styrax/: a file there would hide the other distributions."""
    for package in workspace.packages:
        allowed = {package.source, *(package.source.parents if package.source else ())}
        for path in sorted((package.folder / "src").rglob("*")):
            inside = package.source in path.parents if package.source else False
            if path not in allowed and not inside and "__pycache__" not in path.parts:
                yield f"{workspace.where(path)}: stands in the namespace that all distributions share"


def exports_agree(workspace: Workspace) -> Iterator[str]:
    """`__all__`, the lazy exports and the imports that type checkers read name the same things."""
    for package in workspace.libraries:
        init = package.source / "__init__.py"  # type: ignore[operator]
        if init.is_file():
            for problem in exports_of(init.read_text(encoding="utf-8")):
                yield f"{workspace.where(init)}: {problem}"
        else:
            yield f"{workspace.where(init)}: is missing"


def exports_of(source: str) -> Iterator[str]:
    """Yield where the three lists of a package's `__init__.py` differ."""
    listed: list[str] = []
    eager: set[str] = set()
    typed: set[str] = set()
    lazy: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                listed = ast.literal_eval(value)
            case ast.Assign(value=ast.Call(func=ast.Name(id="lazy_exports"), args=[_, names])):
                lazy = set(ast.literal_eval(names))
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                typed = {alias.asname or alias.name for child in node.body for alias in imported(child)}
            case ast.ImportFrom(module=str(module)) if module.startswith("styrax."):
                eager |= {alias.asname or alias.name for alias in node.names}
    if not listed:
        yield "has no __all__"
    if twice := sorted({name for name in listed if listed.count(name) > 1}):
        yield f"__all__ lists {', '.join(twice)} twice"
    if missing := sorted(lazy - set(listed)):
        yield f"__all__ lacks {', '.join(missing)}, exported lazily"
    if unknown := sorted(set(listed) - lazy - eager):
        yield f"__all__ lists {', '.join(unknown)}, which nothing exports"
    if untyped := sorted(lazy ^ typed):
        yield f"{', '.join(untyped)} must stand both in lazy_exports and under TYPE_CHECKING"


def imported(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def imports_are_checked(workspace: Workspace) -> Iterator[str]:
    """import-linter looks only at the packages that it is told of."""
    known = workspace.pyproject.get("tool", {}).get("importlinter", {}).get("root_packages", ())
    for package in workspace.libraries:
        if package.module not in known:
            yield f"pyproject.toml: tool.importlinter.root_packages lacks {package.module}"


def entry_points_work(workspace: Workspace) -> Iterator[str]:
    """Every entry point imports without jax and is what its group promises; every exported name resolves."""
    targets = [
        (package, group, name, target)
        for package in workspace.libraries
        for group, entries in {
            "package": {package.module: package.module},
            "console_scripts": package.project.get("scripts", {}),
            **package.project.get("entry-points", {}),
        }.items()
        for name, target in entries.items()
    ]
    sources = os.pathsep.join(str(package.folder / "src") for package in workspace.libraries)

    def probe(group: str, target: str) -> list[str]:
        command = [sys.executable, str(Path(__file__).with_name("probe.py")), group, target]
        environment = {**os.environ, "PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1:]
        return json.loads(last[0]) if last else [f"ends the process: {done.stderr.strip()[-300:]}"]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda entry: probe(entry[1], entry[3]), targets)
        for (package, group, name, target), problems in zip(targets, answers, strict=True):
            for problem in problems:
                where = workspace.where(package.folder / "pyproject.toml")
                yield f"{where}: {group} {name} = {target} {problem}"


def lock_names_pypi(workspace: Workspace) -> Iterator[str]:
    """The lock file holds no address but PyPI's own, whatever mirror wrote it."""
    lock = workspace.root / "uv.lock"
    text = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    for registry in sorted(set(re.findall(r'registry = "([^"]*)"', text)) - {PYPI}):
        yield f"uv.lock: names the index {registry}, expected {PYPI}; run uv lock without a mirror"


def forbidden_words(workspace: Workspace) -> Iterator[str]:
    """No path of somebody's machine, no unfinished place, no conflict is published."""
    for path in workspace.files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, what in FORBIDDEN.items():
                if match := pattern.search(line):
                    yield f"{workspace.where(path)}:{number}: {what}: {match[0]!r}"


def long_files(workspace: Workspace) -> Iterator[str]:
    """A source file that answers one question seldom needs more than 400 lines. A warning, not a problem."""
    for path in workspace.files():
        if path.suffix == ".py" and "tests" not in path.parts:
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > LONG_FILE:
                yield f"{workspace.where(path)}: {lines} lines, over {LONG_FILE}: is it one question?"


CHECKS: tuple[Callable[[Workspace], Iterator[str]], ...] = (
    sibling_ranges,
    meta_lists_libraries,
    upstream_bounds,
    same_python,
    package_files,
    namespace_is_empty,
    exports_agree,
    imports_are_checked,
    entry_points_work,
    lock_names_pypi,
    forbidden_words,
)


def main(arguments: list[str]) -> int:
    """Run every check on the workspace at ROOT, by default the one that this file is in."""
    workspace = Workspace.load(Path(arguments[0] if arguments else Path(__file__).parents[1]).resolve())
    found = [problem for check in CHECKS for problem in check(workspace)]
    for warning in long_files(workspace):
        print(f"warning: {warning}")
    for problem in found:
        print(problem)
    names = ", ".join(f"{package.name} {package.version}" for package in workspace.packages)
    print(f"{len(CHECKS)} checks of {names}: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
