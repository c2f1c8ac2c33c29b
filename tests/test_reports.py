"""``styrax report`` of one run and of several, whose configurations name parts of several packages."""

import json
import re
import sys
from pathlib import Path

from styrax.core.cli import main

sys.path.append(str(Path(__file__).parents[1] / "packages" / "train" / "tests"))

from report_pages import Page, make


def test_several_runs_are_on_one_page(tmp_path, capsys, monkeypatch):
    runs = [
        make(tmp_path / "a" / "x", lr=0.1, jax="0.10"),
        make(tmp_path / "b" / "x", lr=0.2, jax="0.12"),
        make(tmp_path / "c", lr=0.1, steps=5, jax="0.12"),
    ]
    monkeypatch.chdir(tmp_path)
    names = [str(run.path) for run in runs]
    assert main(["report", *names]) == 0
    printed = capsys.readouterr().out
    page = Page((tmp_path / "comparison.html").read_text())
    assert page.lines == 3 * 4  # loss, rate, norm, throughput; a lone held-out point is a dot
    differs = page.text[page.text.index("Configuration that differs") : page.text.index("Versions that differ")]
    assert re.findall(r"[a-z]+\.[a-z_]+", differs) == ["train.steps", "optim.learning_rate"]
    assert "0.1 0.2 0.1" in differs and "8 8 5" in differs
    assert "jax 0.10 0.12 0.12" in page.text and "python 3.12" not in page.text
    assert all(name in page.text for name in (names[0], names[1], "c"))
    assert not runs[0].report.exists()
    (line,) = [line for line in printed.splitlines() if line.startswith("training loss")]
    assert line.count("nats per token") == 3
    assert main(["report", *names, "--json", "--out", "deep.html"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [8, 8, 5]
    assert (tmp_path / "deep.html").read_text() == (tmp_path / "comparison.html").read_text()


def test_one_run_to_another_file(tmp_path, capsys):
    run = make(tmp_path / "run")
    assert main(["report", str(run.path), "--out", str(tmp_path / "page.html")]) == 0
    Page((tmp_path / "page.html").read_text())
    assert not run.report.exists() and not run.picture.exists()
    assert main(["report", str(run.path), "--out", str(tmp_path / "no" / "page.html")]) == 1
    assert "name a file elsewhere with --out" in capsys.readouterr().err
