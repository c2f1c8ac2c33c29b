import json
import os
from pathlib import Path

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
    run.begin("", "recipe quickstart")
    run.begin("")
    starts = json.loads(run.versions.read_text())
    assert len(starts) == 2
    assert run.last_start() == starts[1]
    assert starts[1]["configuration"] == "recipe quickstart"
    assert starts[1]["folder"] == str(Path.cwd())
    assert {"python", "jax", "styrax-core", "styrax-train"} <= starts[0].keys()


def test_the_report_stands_alone_and_unknown_is_na(run):
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    run.samples.mkdir()
    (run.samples / "00000002.txt").write_text("<script>alert(1)</script>")
    summary = write_report(run, changed="[train]\nsteps = 2")
    page = run.report.read_text()
    assert summary["held_out_bits_per_byte"] is None
    assert dict(rows(summary))["held-out text, gzip -9"] == "n/a"
    assert "<svg" in page and "<script>" not in page and "steps = 2" in page
    assert 'src="http' not in page and "href=" not in page
    assert run.picture.read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_run_without_a_step(run):
    assert write_report(run)["step"] is None
    assert summarise(run)["loss"] is None


def test_require_says_how_to_start(tmp_path):
    with pytest.raises(UserError, match=r"does not exist.*styrax train quickstart"):
        RunDir(tmp_path / "none").require()


def test_a_start_that_was_killed_may_be_made_again(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.create()
    (folder.path / "wandb").mkdir()  # a tracker's, made before config.toml
    folder.create()
    other = RunDir(tmp_path / "other")
    (other.checkpoints / ".tmp-00000005-1").mkdir(parents=True)
    for name in (".probe-1", ".config.toml.1", ".tokenizer-1", "checkpoints/LOCK", "metrics.jsonl"):
        (other.path / name).touch()
    other.create()
    other.begin("")
    assert other.exists and not (other.path / ".starting").exists()


@pytest.mark.parametrize("inside", ["notes.txt", "metrics.jsonl", ".git/HEAD", "checkpoints/00000005/x"])
def test_a_folder_that_no_start_left_is_refused(tmp_path, inside):
    path = tmp_path / "run" / inside
    path.parent.mkdir(parents=True)
    path.write_text("x")
    with pytest.raises(UserError, match=rf"{inside.split('/')[0]}.*choose another folder"):
        RunDir(tmp_path / "run").create()


def test_checkpoints_without_a_config_say_where_it_is_kept(tmp_path):
    folder = RunDir(tmp_path / "a run")
    (folder.checkpoints / "00000005").mkdir(parents=True)
    for refuse in (folder.require, folder.create):
        with pytest.raises(UserError, match=r"no config.toml.*Put that file back.*checkpoint show '.*a run' --json"):
            refuse()


def test_a_folder_that_is_no_run_is_not_offered_for_one(tmp_path):
    (tmp_path / "mine").write_text("x")
    for path in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="is not a run") as caught:
            RunDir(path).require()
        assert "quickstart --run" not in str(caught.value)


def test_events_after_a_torn_line_are_whole(run):
    run.add_event("start", step=0)
    with run.events.open("a") as file:
        file.write('{"event": "thr')
    run.add_event("end", step=2)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "end"]


def test_errors_outside_of_the_run_do_not_blame_it(run):
    with pytest.raises(UserError, match=r"cannot read or write /elsewhere/x: Permission denied"), run.writing():
        raise OSError(13, "Permission denied", "/elsewhere/x")


def test_compiling_is_that_of_the_last_time(run):
    for event, fields in (
        ("start", {}),
        ("compile", {"seconds": 9.0}),
        ("start", {}),
        ("compile", {"seconds": 2.0}),
        ("compile", {"seconds": 1.0}),
        ("start", {}),
    ):
        run.add_event(event, **fields)
    assert summarise(run)["compile_seconds"] == 3.0
