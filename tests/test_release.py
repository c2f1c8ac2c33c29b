"""A release is refused when a changelog is undated, a version was kept, or a wheel is not whole."""

import subprocess
from pathlib import Path

import pytest
import release
from check_workspace import Package, Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A repository of one package, released as 2026.1.0."""
    folder = tmp_path / "packages/toys"
    (folder / "src/styrax/toys").mkdir(parents=True)
    (folder / "src/styrax/toys/__init__.py").write_text("SIZE = 1\n")
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.3.1 (2026-01-31)\n\nBalls roll.\n")
    project = '[project]\nname = "styrax-toys"\nversion = "0.3.1"\n'
    (folder / "pyproject.toml").write_text(project + '[tool.uv.build-backend]\nmodule-name = "styrax.toys"\n')
    (tmp_path / "pyproject.toml").touch()
    git = ("git", "-c", "user.name=toy", "-c", "user.email=toy@example.org")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "toys"], ["tag", "2026.1.0"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    return Workspace.load(tmp_path)


def test_a_dated_changelog_passes(workspace: Workspace):
    assert list(release.undated(workspace)) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "2026-01-31",
            "unreleased",
            "packages/toys/CHANGELOG.md: has no dated heading '## 0.3.1 (YYYY-MM-DD)'",
        ),
        ("0.3.1", "0.3.0", "packages/toys/CHANGELOG.md: has no dated heading '## 0.3.1 (YYYY-MM-DD)'"),
        ("Balls roll.", "", "packages/toys/CHANGELOG.md: says nothing about 0.3.1"),
        (
            "Balls roll.",
            "\n## 0.3.0 (2026-01-01)\nCubes.",
            "packages/toys/CHANGELOG.md: says nothing about 0.3.1",
        ),
    ],
)
def test_a_changelog_without_its_date_or_news_is_found(workspace: Workspace, old: str, new: str, expected: str):
    path = workspace.root / "packages/toys/CHANGELOG.md"
    path.write_text(path.read_text().replace(old, new))
    assert list(release.undated(workspace)) == [expected]


def test_a_change_that_kept_its_version_is_found(workspace: Workspace):
    assert list(release.not_renumbered(workspace, "2026.2.0")) == []
    (workspace.root / "packages/toys/src/styrax/toys/__init__.py").write_text("SIZE = 2\n")
    assert list(release.not_renumbered(workspace, "2026.2.0")) == [
        "packages/toys: changed since 2026.1.0, already 0.3.1 there; raise its version"
    ]
    path = workspace.root / "packages/toys/pyproject.toml"
    path.write_text(path.read_text().replace("0.3.1", "0.3.2"))
    assert list(release.not_renumbered(Workspace.load(workspace.root), "2026.2.0")) == []


def test_wheels_hold_their_own_folder_and_nothing_else(workspace: Workspace):
    (toys,) = workspace.packages
    whole = {
        "styrax/",
        "styrax/toys/py.typed",
        "styrax_toys-0.3.1.dist-info/METADATA",
        "styrax_toys-0.3.1.dist-info/licenses/LICENSE",
    }
    assert list(release.problems_of_wheel(toys, whole)) == []
    broken = (whole - {"styrax/toys/py.typed"}) | {"styrax/__init__.py"}
    assert list(release.problems_of_wheel(toys, broken)) == [
        "lacks styrax/toys/py.typed",
        "has styrax/__init__.py, outside its own folder",
    ]


def test_constraints_name_every_package_exactly(monkeypatch: pytest.MonkeyPatch, workspace: Workspace):
    meta = Package(workspace.root, {"project": {"name": "styrax", "version": "2026.1.0"}} | NO_CODE)
    both = Workspace(workspace.root, {}, (meta, *workspace.packages))
    monkeypatch.setattr(release, "run", lambda *_, **__: "jax==0.10.2 ; python_full_version < '3.12'\n")
    assert release.constraints(both).splitlines()[1:] == [
        "styrax==2026.1.0",
        "styrax-toys==0.3.1",
        "jax==0.10.2 ; python_full_version < '3.12'",
    ]


NO_CODE = {"tool": {"uv": {"build-backend": {"module-name": []}}}}
