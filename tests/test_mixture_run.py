"""A run over a mixture with growing batches, whose mixture is changed on the way."""

import json

import pytest
from support import lines

CHANGED = "data.weights=[[0, {one = 1, two = 1}], [6, {two = 1}]]"
ALLOWED = 'data.allow_changes=["mixture"]'


@pytest.mark.slow
def test_the_mixture_of_a_run_can_be_changed_from_where_it_is(styrax):
    source = json.dumps([str(styrax.corpus)])
    config = styrax.config(
        data__kind='"mixture"',
        data__sources=f"{{one = {{sources = {source}}}, two = {{sources = {source}}}}}",
        data__batch_size="[[0, 4], [3, 8]]",
        train__steps=6,
        train__eval_every=0,
        checkpoint__every=3,
    )
    run = styrax.folder / "run"
    styrax("train", config, "--run", run)
    assert [m["tokens"] for m in lines(run)] == sorted(m["tokens"] for m in lines(run)), "batches grow"

    said = styrax.fails("train", "--run", run, CHANGED, "train.steps=8")
    assert "data.weights" in said
    back = CHANGED.replace("[6,", "[5,")
    said = styrax.fails("train", "--run", run, back, ALLOWED, "train.steps=8")
    assert "mixture: the change reaches back before step 6" in said
    assert "[ 5, {" not in (run / "config.toml").read_text(), "a command that was refused leaves the run as it was"

    styrax("train", "--run", run, CHANGED, ALLOWED, "train.steps=8")
    assert [m["step"] for m in lines(run)] == list(range(1, 9))
    # What was changed is the run's own from now on.
    rows = json.loads(styrax("data", "inspect", "--config", run / "config.toml", "--step", 7, "--json").stdout)["rows"]
    assert len(rows) == 8
    assert {segment["source"] for row in rows for segment in row["segments"]} == {"two"}
