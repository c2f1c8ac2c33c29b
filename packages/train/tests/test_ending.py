import numpy as np
import pytest

from styrax.core import UserError
from styrax.train import ending
from styrax.train.baselines import Bigram, gzip_bits_per_byte
from styrax.train.interrupts import Interrupts
from styrax.train.report import summarise
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
    assert ending.baselines(Data(), range(2), Interrupts()) == {
        "tokens_seen": 6,
        "gzip_bits_per_byte": None,
        "bigram_bits_per_byte": None,
    }


def test_a_run_that_ends_without_a_finite_loss_is_no_success(run):
    ending.check_ending(summarise(run))
    run.metrics.write_text(NAN_RUN)
    with pytest.raises(UserError, match="2 steps, but the last loss is not finite"):
        ending.check_ending(summarise(run))
