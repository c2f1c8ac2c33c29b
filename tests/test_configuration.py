"""What a configuration of the whole says by itself, before anything is made."""

import json
from types import SimpleNamespace

import jax
import pytest

from styrax.core import UsageError, UserError
from styrax.core.cli import main
from styrax.train import TrainConfig
from styrax.train.compose import make_mesh
from styrax.train.config import SCHEMA


def problems(*overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        SCHEMA.resolve({}, overrides).check()
    return str(caught.value).splitlines()


def test_the_defaults_fit_together():
    assert SCHEMA.resolve({}).check().sections["train"] == TrainConfig()


def test_what_the_configuration_alone_tells_is_told_at_once():
    found = problems(
        "train.accumulate=3", "data.batch_size=[[0, 6], [9, 8], [20, 4]]", "mesh.axes={dta=4, data=-1}",
        'train.trackers=["jsonl", "wandbx", "a", "a"]',
    )  # fmt: skip
    assert [line.partition(";")[0].partition("(")[0].strip() for line in found] == [
        "train.trackers: leave 'jsonl' out: metrics.jsonl is always written",
        "train.trackers: no tracker named 'wandbx'",
        "train.trackers: 'a' is there 2 times",
        "mesh.axes.dta: no rule splits anything over this mesh axis",
        "train.accumulate=3 does not divide the batch of 8 rows",
        "train.accumulate=3 does not divide the batch of 4 rows",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=inf", "optim.learning_rate: expected number >= 0.0, got inf"),
        ("optim.schedule.warmup=nan", "optim.schedule.warmup: expected"),
        ("train.seed=99999999999999999999", "train.seed: expected integer >= 0, <= 4294967295, got an integer of 67"),
        ("train.steps=3000000000", "train.steps: expected integer >= 1, <= 2147483647, got 3000000000"),
        ("train.sample_prompt=\udcff", "is not UTF-8 text"),
        ('train.trackers=["wandb_"]', "train.trackers: no tracker named 'wandb_'"),
        ('train.trackers=["jsonl"]', "train.trackers: leave 'jsonl' out"),
        ("train.accumulate=5", "train.accumulate=5 does not divide the batch of 8 rows"),
        ("mesh.axes={dta=1}", "mesh.axes.dta: no rule"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(override, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (["train", "quickstart", override, "--run", "r"], ["config", "show", "quickstart", override]):
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("axes", ["{data=4}", "{data=2, fsdp=2}"])
def test_the_product_of_a_mesh_is_checked_on_one_device_too(axes, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace()])
    with pytest.raises(UserError, match="needs 4 devices, got 1"):
        make_mesh(SCHEMA.resolve({}, [f"mesh.axes={axes}"]))
    assert make_mesh(SCHEMA.resolve({})) is None


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs devices")
def test_rows_are_checked_against_the_mesh_by_the_configuration_alone():
    with pytest.raises(UserError, match=r"micro-batch of 1 rows .* devices"):
        make_mesh(SCHEMA.resolve({}, ["data.batch_size=2", "train.accumulate=2"]))


def test_show_gives_json(capsys):
    assert main(["config", "show", "quickstart", "--json", "--all"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
