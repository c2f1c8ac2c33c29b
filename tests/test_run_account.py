"""What a run of real parts tells of itself: time, speed, trackers, samples; and how it ends early or goes back."""

import json

import numpy as np
import pytest
from support import TINY, assert_same_run, lines

from styrax.core.cli import main
from styrax.models import DecoderConfig
from styrax.models.cost import cost_of
from styrax.train import session
from styrax.train.config import SCHEMA
from styrax.train.report import summarise
from styrax.train.rundir import RunDir
from styrax.train.trackers.tensorboard import read


def start(corpus, folder, **changes):
    """One start in this process; ``a__b=value`` sets ``a.b``."""
    keys = {**TINY, "data.sources": json.dumps([str(corpus)]), "model.num_layers": 1, "model.dropout": 0.0}
    keys |= {"data.batch_size": 8}  # the tests have eight devices
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    run = RunDir(folder)
    run.create()
    resolved = SCHEMA.resolve({}, [f"{key}={value}" for key, value in keys.items()]).check()
    return run, session.train(resolved, run, quiet=True)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("STYRAX_CACHE", str(tmp_path_factory.getbasetemp() / "account"))


def test_a_run_that_is_stopped_by_a_file_and_goes_on(corpus, tmp_path, capsys):
    options = {
        "train__steps": 6, "train__eval_every": 3, "checkpoint__every": 2, "train__trackers": '["tensorboard"]',
        "train__sample_prompt": '"def"', "train__sample_every": 3, "train__sample_tokens": 2,
    }  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    RunDir(folder).begin("")  # a run, so that its folder may hold the file
    (folder / "STOP").touch()
    run, outcome = start(corpus, folder, **options)
    assert (outcome.interrupted, outcome.summary["step"]) == (None, 2)
    assert not run.stop.exists()
    assert "held_out_loss" in lines(folder)[-1]
    run, outcome = start(corpus, folder, **options)
    assert outcome.summary["step"] == 6 and outcome.summary["starts"] == 2
    assert list(run.read_samples()) == [2, 3, 6]
    # Trackers tell the same, each step once.
    board = dict(read(folder / "tensorboard"))
    assert list(board) == [line["step"] for line in lines(folder)] == [1, 2, 3, 4, 5, 6]
    assert all(board[line["step"]]["loss"] == np.float32(line["loss"]) for line in lines(folder))
    # The parts of the time are all there, and FLOPs are those of the model's own account.
    seconds = outcome.summary["seconds"]
    assert all(seconds[part] > 0 for part in ("startup", "compile", "step", "data", "checkpoint", "evaluate", "sample"))
    assert seconds["lost"] == 0
    config = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1)
    flops = outcome.summary["flops_per_token"]
    assert flops["causal"] == cost_of(config, vocab_size=258).train_flops(32)
    pair = 3 * 4 * 16  # forward and backward, scores and values, all heads of one layer
    assert flops["full"] - flops["causal"] == pair * (32 - 33 / 2)
    assert outcome.summary["peak_flops"] is outcome.summary["mfu_full"] is None  # of a CPU
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6


class Dataset:
    """A dataset of which some batches are noise, and whose drawing may end the process."""

    def __init__(self, inner, noisy, die):
        self._inner, self._noisy, self._die = inner, noisy, die

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def loader(self, **options):
        return Loader(self._inner.loader(**options), self._noisy, self._die)


class Loader:
    def __init__(self, inner, noisy, die):
        self._inner, self._noisy, self._die = inner, noisy, die

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __iter__(self):
        return self

    def __next__(self):
        place = self._inner.get_state()["step"]
        if place == self._die:
            raise SystemExit("killed")
        batch = dict(next(self._inner))
        if place in self._noisy:
            noise = np.random.default_rng(place).integers(128, 256, np.shape(batch["tokens"]))
            batch |= {"tokens": noise.astype(np.int32), "targets": noise[:, ::-1].astype(np.int32)}
        return batch


@pytest.mark.slow
def test_a_spike_is_undone_and_a_killed_run_undoes_it_too(corpus, tmp_path, monkeypatch):
    options = {
        "train__steps": 24, "train__spike__action": '"rollback"', "train__spike__window": 8, "checkpoint__every": 8,
        "train__eval_every": 0, "train__baselines": "true",
    }  # fmt: skip
    build = session.build_data

    def noisy(die=None):
        monkeypatch.setattr(session, "build_data", lambda *args: Dataset(build(*args), {18, 19}, die))

    noisy()
    whole, outcome = start(corpus, tmp_path / "whole", **options)
    assert outcome.summary["rollbacks"] == 1
    (event,) = [e for e in whole.read_events() if e["event"] == "rollback"]
    assert (event["step"], event["to"]) == (19, 16)
    assert outcome.summary["seconds"]["lost"] > 0
    assert [line["step"] for line in lines(whole.path)] == list(range(1, 25))
    plain = {**options, "train__spike__action": '"none"', "data__skip_steps": "[[16, 20]]"}
    monkeypatch.setattr(session, "build_data", build)
    left_out, same = start(corpus, tmp_path / "left-out", **plain)
    # The data can leave out the same batches from the start: then nothing differs but their position.
    assert (whole.path / "metrics.jsonl").read_bytes() == (left_out.path / "metrics.jsonl").read_bytes()
    assert same.summary["bigram_bits_per_byte"] == outcome.summary["bigram_bits_per_byte"]

    for die in (19, 21, 23):
        noisy(die)
        with pytest.raises(SystemExit):
            start(corpus, tmp_path / f"cut-{die}", **options)
        noisy()
        cut, _ = start(corpus, tmp_path / f"cut-{die}", **options)
        assert_same_run(whole.path, cut.path)
        assert summarise(cut)["seconds"]["lost"] > 0


@pytest.mark.slow
def test_the_optimizer_skips_a_spike_within_the_step(corpus, tmp_path, monkeypatch):
    options = {"train__steps": 20, "train__eval_every": 0, "optim__extras__spikes": "{window = 8, sigmas = 4.0}"}
    build = session.build_data
    monkeypatch.setattr(session, "build_data", lambda *args: Dataset(build(*args), {12}, None))
    run, outcome = start(corpus, tmp_path / "run", **options)
    found = lines(run.path)
    assert outcome.summary["rollbacks"] == 0
    assert [line["step"] for line in found if line["clip_scale"] == 0.0] == [13]
    assert found[-1]["spikes"] == found[-1]["skipped"] == 1
