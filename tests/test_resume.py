"""What `styrax train` settles before anything slow: which run, whether it may go on, and how far."""

import argparse
import json

import pytest

from styrax.core import UsageError, UserError
from styrax.core.config import find_schema, read_config
from styrax.train.commands.train import add_arguments, plan
from styrax.train.rundir import RunDir


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args, extra = parser.parse_known_args([str(a) for a in arguments])
    args.overrides += extra
    return plan(args)


def config(path, steps=6, **keys):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'[train]\nsteps = {steps}\n[data]\nsources = ["txt"]\ntokenizer = "byte"\n')
    return path


def started(name, path, done, *overrides):
    """A run as a start of it that saved ``done`` steps leaves it."""
    folder = RunDir(name)
    folder.create()
    resolved, _, asked, _ = planned(path, "--run", name, *overrides)
    folder.begin(resolved.to_toml(), asked)
    if done is not None:
        checkpoint = folder.checkpoints / f"{done:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "MANIFEST.json").touch()
    return folder


def steps(result):
    return result[0].sections["train"].steps


def test_a_file_of_the_same_name_elsewhere_is_another_run(tmp_path):
    folder = started("runs/my", config(tmp_path / "my.toml"), 6)
    assert planned("my.toml")[3] == []
    other = config(tmp_path / "o" / "my.toml", steps=9)
    with pytest.raises(UsageError, match=r"runs/my is a run of my\.toml, not of o/my\.toml.*--run DIR.*--run runs/my"):
        planned("o/my.toml")
    assert steps(planned("o/my.toml", "--run", "runs/my")) == 9
    config(other)  # the same configuration: the file was moved
    assert planned("o/my.toml")[2] == "../../o/my.toml"
    folder.versions.write_text("{")  # nothing is known
    config(other, steps=9)
    with pytest.warns(match="is damaged"):
        planned("o/my.toml")


def test_a_recipe_and_a_file_of_its_name_are_two(tmp_path):
    started("runs/quickstart", "quickstart", 5)
    config(tmp_path / "quickstart.toml")
    with pytest.raises(UsageError, match=r"a run of recipe quickstart, not of quickstart\.toml"):
        planned("quickstart.toml")


def test_a_configuration_that_says_fewer_steps_does_not_cut_a_run_short(tmp_path):
    path = config(tmp_path / "my.toml")
    started("runs/my", path, 40, "train.steps=100")
    result = planned(path)
    assert steps(result) == 100
    assert "asked for 100 steps before" in result[3][0]
    assert steps(planned(path, "train.steps=200")) == 200
    assert steps(planned("--run", "runs/my")) == 100
    assert steps(planned(path, "train.steps=60")) == 60
    assert steps(planned(path, "train.steps=40")) == 40


def test_fewer_steps_than_are_done_are_refused_and_a_finished_run_stays(tmp_path):
    path = config(tmp_path / "my.toml")
    started("runs/going", path, 42, "train.steps=100")
    with pytest.raises(UserError, match=r"has done 42 of 100 steps, more than the train\.steps=10"):
        planned("--run", "runs/going", "train.steps=10")
    started("runs/done", path, 42, "train.steps=42")
    result = planned("--run", "runs/done", "train.steps=10")
    assert steps(result) == 42
    assert "has done 42 steps, more than the train.steps=10 asked for, and is left as it is" in result[3][0]


def test_a_bad_first_try_may_be_put_right(tmp_path):
    path = config(tmp_path / "my.toml")
    folder = started("runs/my", path, None, "optim.learning_rate=9.0", "train.steps=50")
    result = planned(path, "optim.learning_rate=0.1")
    assert "has no checkpoint, so it starts anew" in result[3][0]
    assert steps(result) == 6
    folder.config.write_text("[optim]\nno_such_key = 1\n")
    planned(path)
    (folder.checkpoints / "00000005").mkdir(parents=True)
    folder.config.write_text(read_config(find_schema("train"), str(path)).to_toml())
    with pytest.raises(UserError, match=r"optim\.learning_rate: the run has"):
        planned(path, "optim.learning_rate=0.1")


def test_an_override_that_ends_like_a_file_is_an_override(tmp_path):
    started("my", config(tmp_path / "my.toml"), 6)
    assert planned("--run", "my", "train.sample_prompt=a.toml")[0].sections["train"].sample_prompt == "a.toml"
    config(tmp_path / "a=b.toml", steps=3)
    assert steps(planned("a=b.toml")) == 3


def test_checkpoints_without_a_config_are_not_called_nothing(tmp_path):
    folder = started("my", config(tmp_path / "my.toml"), 6)
    folder.config.unlink()
    with pytest.raises(UserError, match=r"holds checkpoints but no config\.toml.*Put that file back"):
        planned("--run", "my")
    with pytest.raises(UsageError, match="no run to resume"):
        planned("--run", "none")


def test_each_start_keeps_what_it_was_read_from(tmp_path):
    folder = started("runs/my", config(tmp_path / "my.toml"), 6)
    folder.begin(folder.config.read_text())
    assert [start["configuration"] for start in json.loads(folder.versions.read_text())] == ["../../my.toml"] * 2
