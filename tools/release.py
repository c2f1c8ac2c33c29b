"""The steps of a release, each of which can be tried at any time.

    uv run --locked python tools/release.py check               changed packages are renumbered, and dated
    uv run --locked python tools/release.py constraints [FILE]  the exact set that was tested
    uv run --locked python tools/release.py build DIST          wheels and source archives, looked into

A release is a tag with the meta-package's version, such as 2026.11.0. It publishes every package whose version
is new.
"""

import argparse
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from check_workspace import Package, Workspace
from shell import ROOT, CommandError, run

DATED = r"\d{4}-\d{2}-\d{2}"


def undated(workspace: Workspace) -> Iterator[str]:
    """Yield the packages whose changelog has no date, or nothing to say, for the current version."""
    for package in workspace.packages:
        path = package.folder / "CHANGELOG.md"
        heading = rf"^## {re.escape(str(package.version))} \(([^)]+)\)\n"
        text = path.read_text(encoding="utf-8")
        section = re.search(heading + r"(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        if section is None or not re.fullmatch(DATED, section[1]):
            yield f"{workspace.where(path)}: has no dated heading '## {package.version} (YYYY-MM-DD)'"
        elif not section[2].strip():
            yield f"{workspace.where(path)}: says nothing about {package.version}"


def not_renumbered(workspace: Workspace, release: str) -> Iterator[str]:
    """Yield the packages that changed since the release before this one but kept their version."""
    tags = run("git", "tag", "--list", "20*", "--sort=-creatordate", cwd=workspace.root).split()
    tags = [tag for tag in tags if tag != release]
    for package in workspace.packages if tags else ():
        where = workspace.where(package.folder)
        try:
            before = run("git", "show", f"{tags[0]}:{where}/pyproject.toml", cwd=workspace.root)
        except CommandError:
            continue  # the package is new
        published = f'version = "{package.version}"' in before
        paths = (f"{where}/src", f"{where}/pyproject.toml")
        if published and run("git", "diff", "--name-only", tags[0], "--", *paths, cwd=workspace.root):
            yield f"{where}: changed since {tags[0]}, already {package.version} there; raise its version"


def constraints(workspace: Workspace) -> str:
    """Write the exact version of everything that the lock file holds for users, ours included."""
    export = ("export", "--locked", "--all-packages", "--no-dev", "--all-extras", "--no-emit-workspace")
    others = run("uv", *export, "--no-hashes", "--no-header", "--no-annotate", cwd=workspace.root)
    meta = next(package for package in workspace.packages if package.module is None)
    ours = [f"{package.name}=={package.version}" for package in workspace.packages]
    title = f"# What {meta.name} {meta.version} was tested with: pip install {meta.name} -c this-file"
    return "\n".join([title, *ours, *others.splitlines(), ""])


def build(workspace: Workspace, dist: Path) -> Iterator[str]:
    """Build every package into a folder; yield what is wrong with a wheel."""
    if dist.exists() and any(dist.iterdir()):
        yield f"{dist}: is not empty; what is in it would be published too"
        return
    run("uv", "build", "--quiet", "--all-packages", "--out-dir", str(dist), cwd=workspace.root)
    for package in workspace.packages:
        (wheel,) = dist.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl")
        for problem in problems_of_wheel(package, set(zipfile.ZipFile(wheel).namelist())):
            yield f"{wheel.name}: {problem}"


def problems_of_wheel(package: Package, names: set[str]) -> Iterator[str]:
    """Yield what is missing from a wheel's files, and what should not be there."""
    info = f"{package.name.replace('-', '_')}-{package.version}.dist-info"
    own = package.module.replace(".", "/") if package.module else info
    expected = {f"{info}/METADATA", f"{info}/licenses/LICENSE"} | ({f"{own}/py.typed"} if package.module else set())
    yield from (f"lacks {name}" for name in sorted(expected - names))
    files = (name for name in sorted(names) if not name.endswith("/"))
    yield from (f"has {name}, outside its own folder" for name in files if not name.startswith((f"{own}/", info)))


def main() -> int:
    """Run one step; print every problem that it found."""
    workspace = Workspace.load(ROOT)
    (version,) = [package.version for package in workspace.packages if package.module is None]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("check", help="is every changed package renumbered, and every changelog dated?")
    step.add_argument("--tag", default=str(version), help="the tag of the release; must be the meta-package's version")
    step = steps.add_parser("constraints", help="the exact set that was tested")
    step.add_argument("file", nargs="?", type=Path, default=Path(f"constraints-{version}.txt"))
    step = steps.add_parser("build", help="wheels and source archives, looked into")
    step.add_argument("dist", type=Path)
    arguments = parser.parse_args()
    try:
        match arguments.step:
            case "check":
                found = [*undated(workspace), *not_renumbered(workspace, arguments.tag)]
                if arguments.tag != str(version):
                    found.append(f"the tag is {arguments.tag}, but packages/styrax is {version}; they must agree")
            case "constraints":
                found = []
                arguments.file.write_text(constraints(workspace), encoding="utf-8")
                print(arguments.file)
            case _:
                found = list(build(workspace, arguments.dist.resolve()))
    except CommandError as error:
        found = [str(error)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
