"""The numbers and words that a run leaves, where its configuration names parts of several packages."""

import argparse
import io
import json
import shlex
import warnings
from types import SimpleNamespace

import pytest
from rich.console import Console

from styrax.core import UserError
from styrax.core.cli import main
from styrax.train.commands import report as command
from styrax.train.config import SCHEMA
from styrax.train.display import EventLog
from styrax.train.ending import finish
from styrax.train.goodput import Goodput
from styrax.train.interrupts import Interrupts
from styrax.train.report import rows, summarise, write_report
from styrax.train.rundir import RunDir, write_atomic

NAN_RUN = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": "nan", "held_out_loss": "inf"}\n'


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "sp \u00fc dir" / "run [bold]x")
    folder.create()
    write_atomic(folder.config, "")
    return folder


def test_a_number_that_is_not_finite_is_null_in_json_and_words_for_people(run, capsys):
    run.metrics.write_text(NAN_RUN)
    write_atomic(run.path / "summary.json", '{"gzip_bits_per_byte": NaN, "parameters": 3}')
    summary = summarise(run)
    assert (summary["loss"], summary["held_out_loss"], summary["gzip_bits_per_byte"]) == (None, None, None)
    assert summary["parameters"] == 3
    assert dict(rows(summary))["training loss, last step"] == "not finite"
    assert main(["report", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["loss"] is None


def test_what_to_try_next_can_be_pasted_into_a_shell(run):
    out = io.StringIO()
    resolved = SCHEMA.resolve({}, ["train.baselines=false"])
    result = SimpleNamespace(state=SimpleNamespace(params={}), step=1)
    log = EventLog(run, Goodput())
    summary = finish(
        Console(file=out, width=60), run, resolved, SimpleNamespace(tokenizer=True), result, Interrupts(), log
    )  # pyright: ignore[reportArgumentType]
    assert summary["step"] is None
    lines = out.getvalue().splitlines()
    generate, train = (
        next(shlex.split(x) for x in lines if x.startswith(f"styrax {n}")) for n in ("generate", "train")
    )
    assert generate == ["styrax", "generate", str(run.path), "--prompt", "class "]
    assert train == ["styrax", "train", "--run", str(run.path), "train.steps=2000"]
    assert any(line.endswith(str(run.report)) for line in lines)
    assert shlex.quote(str(run.path)).replace("'", "&#x27;") in run.report.read_text()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"3", b'"x"', b"[1]", b'{"a": "b"}'])
def test_damaged_side_files_are_passed_over_with_a_warning(run, content):
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2}\n')
    run.events.write_bytes(content + b'\n{"event": "compile"}\n{"event": "start"}\n')
    for path in (run.versions, run.summary):
        path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert write_report(run)["starts"] == 1
        run.begin("")
    said = "\n".join(str(one.message) for one in caught)
    assert all("is damaged" in line for line in said.splitlines())
    assert ("versions.json" in said) == (content != b"[1]")
    assert ("summary.json" in said) == (content != b'{"a": "b"}')
    assert len(run.read_starts()) == 1


def test_the_numbers_need_no_place_to_write(run, monkeypatch, capsys):
    run.metrics.write_text('{"step": 3, "loss": 2.0}\n')

    def read_only(path, content):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("styrax.train.report.write_atomic", read_only)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for options in ([], ["--json"]):
        with pytest.raises(UserError, match=r"numbers are complete.*Read-only file system") as caught:
            command.run(parser.parse_args([str(run.path), *options]))
        assert "goes on" not in str(caught.value)
        assert "2.0" in capsys.readouterr().out
