import json
import os

import pytest

from styrax.core import UserError
from styrax.train.report import rows, summarise, write_report
from styrax.train.rundir import RunDir, write_atomic


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.create()
    write_atomic(folder.config, "")
    return folder


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "a.json"
    write_atomic(target, "old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_or_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        RunDir(tmp_path / "file").create()
    with pytest.raises(UserError, match=r"holds no run.*file"):
        RunDir(tmp_path).create()


def test_errors_of_the_file_system_name_the_run_and_the_cure(run):
    with (
        pytest.raises(UserError, match=r"(?s)cannot write the run.*No space left.*last whole checkpoint"),
        run.writing(),
    ):
        raise OSError(28, "No space left on device", "metrics.jsonl")


def test_a_torn_line_is_left_out(run):
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert run.read_metrics() == [{"step": 1, "loss": 2.0}]


def test_versions_of_each_start_are_kept(run):
    run.record_versions()
    run.record_versions()
    starts = json.loads(run.versions.read_text())
    assert len(starts) == 2
    assert {"python", "jax", "styrax-core", "styrax-train"} <= starts[0].keys()


def test_the_report_stands_alone_and_unknown_is_na(run):
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    run.samples.mkdir()
    (run.samples / "00000002.txt").write_text("<script>alert(1)</script>")
    summary = write_report(run, changed="[train]\nsteps = 2")
    page = run.report.read_text()
    assert summary["held_out_bits_per_byte"] is None
    assert dict(rows(summary))["held-out text, gzip -9"] == "n/a"
    assert "data:image/png;base64," in page and "<script>" not in page and "steps = 2" in page
    assert 'src="http' not in page and "href=" not in page
    assert run.picture.read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_run_without_a_step(run):
    assert write_report(run)["step"] is None
    assert summarise(run)["loss"] is None


def test_require_says_how_to_start(tmp_path):
    with pytest.raises(UserError, match=r"does not exist.*styrax train quickstart"):
        RunDir(tmp_path / "none").require()
