"""The main job end to end: train, resume, generate, report, in real processes."""

import json
import signal
import time

import pytest
from support import arrays, assert_same_run, lines


def test_train_resume_generate_report(styrax):
    run = styrax.folder / "run"
    config = styrax.config(train__sample_prompt='"def "', train__sample_tokens=8, train__baselines="true")
    done = styrax("train", config, "--run", run)
    for text in ("held-out text, this run", "bits per byte", "styrax generate", "report.html"):
        assert text in done.stdout
    metrics = lines(run)
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert [m["step"] for m in metrics if "held_out_bits_per_byte" in m] == [10, 20]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    inside = {p.name for p in run.iterdir()}
    assert {"config.toml", "versions.json", "metrics.jsonl", "events.jsonl", "checkpoints"} <= inside
    assert {"samples", "report.html", "loss.png", "summary.json", "tokenizer.json"} <= inside
    page = (run / "report.html").read_text()
    assert "gzip -9" in page
    assert "bigram" in page

    again = styrax("train", config, "--run", run, "--json")
    assert json.loads(again.stdout)["step"] == 20
    assert lines(run) == metrics

    styrax("train", "--run", run, "train.steps=24")
    assert [m["step"] for m in lines(run)] == list(range(1, 25))
    assert lines(run)[:19] == metrics[:19]

    said = [styrax("generate", run, "--prompt", "def ", "--max-tokens", 12, "--seed", s).stdout for s in (1, 1, 2)]
    assert said[0] == said[1] != said[2]
    assert said[0].startswith("def ")
    told = json.loads(styrax("generate", run, "--prompt", "x", "--max-tokens", 3, "--temperature", 0, "--json").stdout)
    assert told["step"] == 24
    assert told["prompt"] == "x"

    numbers = json.loads(styrax("report", run, "--json").stdout)
    assert numbers["step"] == 24
    assert numbers["starts"] == 3
    assert numbers["bigram_bits_per_byte"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_next_start_goes_on(styrax, number):
    config = styrax.config(train__steps=120, checkpoint__every=1000, train__eval_every=0)
    run, straight = styrax.folder / "run", styrax.folder / "straight"
    process = styrax.start("train", config, "--run", run)
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "the same command goes on from there" in out
    step, _ = arrays(run)
    assert [m["step"] for m in lines(run)] == list(range(1, step + 1)), "a step was lost"
    assert step < 120
    styrax("train", config, "--run", run)
    styrax("train", config, "--run", straight)
    assert_same_run(run, straight)
