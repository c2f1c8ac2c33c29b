"""Installs the built wheels one package at a time and runs that package's own tests there.

    uv run --locked python tools/isolate.py [--oldest | --canary] [--python PYTHON] [PACKAGE ...]

In the workspace every sibling can be imported, whatever a package declares. Here a package gets a fresh
environment with its wheel and what the wheel asks for, and its tests run outside the source tree. The
meta-package is installed alone; its size, its consistency, its constraints and its command are looked at.

With --oldest, every declared upstream is at the oldest version that the package declares, and of each test at most
two cases are run. With --canary, every upstream is at its newest, the capped ones included.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from check_workspace import CAPPED, Package, Workspace
from packaging.utils import canonicalize_name
from release import constraints
from shell import ROOT, CommandError, run

TEST_TOOLS = ("pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.150")
#: The whole stack, hardware aside, is to stay about twice the bare upstreams (33 distributions).
MOST_DISTRIBUTIONS = 65
UNWANTED = ("tensorflow", "tensorflow-cpu", "torch")


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment, and the only index of siblings that it knows."""

    folder: Path
    wheels: Path
    interpreter: str

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / "python"

    @property
    def variables(self) -> dict[str, str]:
        """What a command in this environment sees: nothing of the workspace but its compilation cache."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
        visible = {name: value for name, value in os.environ.items() if name not in hidden}
        return {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), **visible}

    def create(self) -> None:
        run("uv", "venv", "--quiet", "--python", self.interpreter, str(self.folder))

    def pip(self, verb: str, *arguments: str) -> str:
        command = ("uv", "pip", verb, "--python", str(self.python), *arguments)
        return run(*command, cwd=self.folder, env=self.variables)

    def install(self, *arguments: str) -> None:
        self.pip("install", "--quiet", "--no-sources", "--find-links", str(self.wheels), *arguments)

    def distributions(self) -> set[str]:
        lines = self.pip("list", "--quiet", "--format", "freeze").splitlines()
        return {canonicalize_name(line.partition("==")[0]) for line in lines}


def wheel_of(package: Package, wheels: Path) -> str:
    """Find the built wheel of a package, and ask for exactly it."""
    stem = package.name.replace("-", "_")
    (path,) = wheels.glob(f"{stem}-{package.version}-*.whl")
    return f"{package.name} @ {path.as_uri()}"


def install_package(environment: Environment, package: Package, policy: str) -> None:
    """Install one wheel and what it asks for, at the versions that the policy says."""
    wheel = wheel_of(package, environment.wheels)
    if policy == "oldest":
        # A requirement of a wheel is indirect to uv, so the declared ones are named again.
        declared = [str(requirement) for requirement in package.requires]
        environment.install("--resolution", "lowest-direct", wheel, *declared)
    elif policy == "canary":
        uncapped = environment.folder / "uncapped.txt"
        declared = [requirement for requirement in package.requires if requirement.name in CAPPED]
        floors = [f"{found.name}>={floor(str(found.specifier))}" for found in declared]
        uncapped.write_text("\n".join(floors), encoding="utf-8")
        environment.install("--upgrade", "--override", str(uncapped), wheel)
    else:
        environment.install(wheel)


def floor(specifier: str) -> str:
    """Give the version after `>=`."""
    found = re.search(r">=\s*([^,\s]+)", specifier)
    assert found, f"check_workspace lets no {specifier!r} pass"
    return found[1]


def strangers(package: Package, installed: set[str], workspace: Workspace) -> set[str]:
    """Give the siblings that are installed although the package does not declare them."""
    declared = {canonicalize_name(requirement.name) for requirement in package.requires}
    return (installed & set(workspace.by_name)) - declared - {package.name}


def try_library(environment: Environment, package: Package, workspace: Workspace, policy: str) -> str:
    """Install a library alone, run its tests and the examples of its README, and say how they went."""
    install_package(environment, package, policy)
    if policy != "canary":
        environment.pip("check")
    if found := strangers(package, environment.distributions(), workspace):
        raise CommandError(f"{package.name} brings {', '.join(sorted(found))}, which it does not declare")
    environment.install(*TEST_TOOLS)
    folder = environment.folder / "outside"
    folder.mkdir()
    shutil.copytree(package.folder / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package.folder / "README.md", folder)
    shutil.copy(ROOT / "conftest.py", folder)
    settings = (
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "-o",
        "pythonpath=",
        "-o",
        "cache_dir=.cache",
    )
    # The README's example is written for the versions that a new user gets. Whether an upstream has what a test needs
    # shows in its first cases; that all of them are right, on newer ones.
    tested = ("tests", "--cases", "2") if policy == "oldest" else ("tests", "README.md")
    command = (str(environment.python), "-m", "pytest", "-q", "-n", "2", *settings, *tested)
    output = run(*command, cwd=folder, env=environment.variables)
    return output.strip().splitlines()[-1]


def try_meta(environment: Environment, package: Package) -> str:
    """Install the meta-package alone and look at what a new user gets."""
    environment.install(wheel_of(package, environment.wheels))
    environment.pip("check")
    installed = environment.distributions()
    if found := installed.intersection(UNWANTED):
        raise CommandError(f"{package.name} brings {', '.join(sorted(found))}")
    if len(installed) > MOST_DISTRIBUTIONS:
        names = ", ".join(sorted(installed))
        raise CommandError(f"{len(installed)} distributions, expected at most {MOST_DISTRIBUTIONS}: {names}")
    tested = environment.folder / "constraints.txt"
    tested.write_text(constraints(Workspace.load(ROOT)), encoding="utf-8")
    environment.install("--dry-run", "--constraints", str(tested), package.name)
    command = str(environment.python.with_name("styrax"))
    run(command, "--help", cwd=environment.folder, env=environment.variables)
    started = time.perf_counter()
    run(command, "--help", cwd=environment.folder, env=environment.variables)
    seconds = time.perf_counter() - started
    return f"{len(installed)} distributions; styrax --help answers in {seconds:.2f} s"


def isolate(
    workspace: Workspace, chosen: list[Package], policy: str, interpreter: str, scratch: Path
) -> Iterator[bool]:
    """Build every wheel, then yield for each chosen package whether it works alone."""
    wheels = scratch / "dist"
    run("uv", "build", "--quiet", "--all-packages", "--out-dir", str(wheels))
    for package in chosen:
        environment = Environment(scratch / package.name, wheels, interpreter)
        started, passed = time.perf_counter(), True
        try:
            environment.create()
            if package.module:
                result = try_library(environment, package, workspace, policy)
            else:
                result = try_meta(environment, package)
        except CommandError as error:
            result, passed = f"FAILED\n{error}", False
        finally:
            shutil.rmtree(environment.folder, ignore_errors=True)
        print(f"{package.name} alone ({time.perf_counter() - started:.0f} s): {result}", flush=True)
        yield passed


def main() -> int:
    """Isolate the packages that are named, by default all of them."""
    workspace = Workspace.load(ROOT)
    known = {package.folder.name: package for package in workspace.packages}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments; default: this")
    policies = parser.add_mutually_exclusive_group()
    for policy in ("oldest", "canary"):
        policies.add_argument(f"--{policy}", dest="policy", action="store_const", const=policy, default="newest")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.packages) - set(known)):
        parser.error(f"no package named {', '.join(unknown)}; known are {', '.join(known)}")
    chosen = [known[name] for name in arguments.packages or known]
    if arguments.policy == "oldest":
        chosen = [package for package in chosen if package.module]
    with tempfile.TemporaryDirectory() as scratch:
        results = list(isolate(workspace, chosen, arguments.policy, arguments.python, Path(scratch)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
