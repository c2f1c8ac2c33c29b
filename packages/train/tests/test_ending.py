import io
import json
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from styrax.core import UserError
from styrax.core.cli import main
from styrax.train import session
from styrax.train.baselines import Bigram, gzip_bits_per_byte
from styrax.train.config import SCHEMA
from styrax.train.interrupts import Interrupts
from styrax.train.report import rows, summarise
from styrax.train.rundir import RunDir, write_atomic

NAN_RUN = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": "nan", "held_out_loss": "inf"}\n'


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "sp \u00fc dir" / "run [bold]x")
    folder.create()
    write_atomic(folder.config, "")
    return folder


class Data:
    """Tokens, and nothing held out."""

    vocab_size = 4
    token_bytes = np.ones(4, np.int64)

    def batch(self, step):
        ones = np.ones((1, 3))
        return {"tokens": ones.astype(int), "targets": ones.astype(int), "loss_mask": ones}

    def held_out(self):
        return []

    def held_out_text(self):
        return b""


def test_nothing_held_out_has_no_baselines():
    assert gzip_bits_per_byte(b"") is None
    assert Bigram(4).bits_per_byte([], np.ones(4, int)) is None
    assert session.baselines(Data(), 2, Interrupts()) == {
        "tokens_seen": 6,
        "gzip_bits_per_byte": None,
        "bigram_bits_per_byte": None,
    }


def test_a_number_that_is_not_finite_is_null_in_json_and_words_for_people(run, capsys):
    run.metrics.write_text(NAN_RUN)
    write_atomic(run.path / "summary.json", '{"gzip_bits_per_byte": NaN, "parameters": 3}')
    summary = summarise(run)
    assert (summary["loss"], summary["held_out_loss"], summary["gzip_bits_per_byte"]) == (None, None, None)
    assert summary["parameters"] == 3
    assert dict(rows(summary))["training loss, last step"] == "not finite"
    assert main(["report", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["loss"] is None


def test_a_run_that_ends_without_a_finite_loss_is_no_success(run):
    session.check_ending(summarise(run))
    run.metrics.write_text(NAN_RUN)
    with pytest.raises(UserError, match="2 steps, but the last loss is not finite"):
        session.check_ending(summarise(run))


def test_what_to_try_next_can_be_pasted_into_a_shell(run):
    out = io.StringIO()
    resolved = SCHEMA.resolve({}, ["train.baselines=false"])
    result = SimpleNamespace(state=SimpleNamespace(params={}), step=1)
    summary = session.finish(Console(file=out, width=60), run, resolved, Data(), result, Interrupts())  # pyright: ignore[reportArgumentType]
    assert summary["step"] is None
    lines = out.getvalue().splitlines()
    generate, train = (
        next(shlex.split(x) for x in lines if x.startswith(f"styrax {n}")) for n in ("generate", "train")
    )
    assert generate == ["styrax", "generate", str(run.path), "--prompt", "class "]
    assert train == ["styrax", "train", "--run", str(run.path), "train.steps=2000"]
    assert any(line.endswith(str(run.report)) for line in lines)
    assert shlex.quote(str(run.path)).replace("'", "&#x27;") in run.report.read_text()
