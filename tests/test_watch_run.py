"""Statistics on request of a real decoder on a mesh, and what each term of its loss has in the gradient."""

import pytest
from support import arrays, lines

from styrax.core import UserError
from styrax.core.config import find_schema, read_config
from styrax.train.replay import replay
from styrax.train.rundir import RunDir
from styrax.train.session import train

WATCH = {"train__watch__parameters": '["layers/attn/**/kernel", "embed/*"]', "train__watch__activations": "true",
         "train__watch__every": 2}  # fmt: skip


@pytest.fixture(scope="module")
def styrax(here):
    return here


def trained(styrax, name, **changes):
    defaults = {"data__batch_size": 8, "data__seq_len": 16, "train__steps": 5, "train__log_every": 5,
                "train__eval_every": 0}  # fmt: skip
    folder = RunDir(styrax.folder / name)
    folder.create()
    config = styrax.config(f"{name}.toml", **{**defaults, **changes})
    train(read_config(find_schema("train"), str(config)).check(), folder, quiet=True)
    return folder


def test_a_watched_run_is_the_same_run_and_says_more(styrax):
    plain, watched = trained(styrax, "plain"), trained(styrax, "watched", **WATCH)
    (_, one), (_, other) = arrays(plain.path), arrays(watched.path)
    assert one.keys() == other.keys()
    assert all(one[path].tobytes() == other[path].tobytes() for path in one)
    told = {line["step"]: line for line in watched.read_metrics()}
    assert list(told) == [2, 4, 5]
    for line in told.values():
        for kind in ("parameter", "gradient", "update"):
            assert all(line[f"norm/{kind}/layers/attn/q/kernel/{layer}"] > 0 for layer in (0, 1))
            assert line[f"norm/{kind}/embed/embedding"] > 0
        assert all(line[f"activation/rms/layers/mlp/{layer}"] > 0 for layer in (0, 1))
        assert line["activation/max/final_norm"] > 0
    (last,) = plain.read_metrics()
    assert {name: value for name, value in told[5].items() if name in last} == last


@pytest.mark.slow
def test_replay_tells_the_same_of_a_watched_step_and_splits_its_gradient(styrax):
    run = trained(styrax, "split", **WATCH, model__scales__z_loss=1e-2)
    found, line = replay(run, 5), run.read_metrics()[-1]
    assert found.differences == []
    compared = 0
    for path, norms in found.norms.items():
        for kind, value in norms.items():
            for layer, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                name = f"norm/{kind}/{path}" + ("" if layer is None else f"/{layer}")
                compared += name in line
                assert line.get(name, each) == pytest.approx(each, rel=1e-4)
    assert compared == len([name for name in line if name.startswith("norm/")])
    terms = found.term_gradients
    assert list(terms) == ["loss", "z_loss"]
    assert sum(each["norm"] * each["cosine"] for each in terms.values()) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert sum(each["share"] for each in terms.values()) == pytest.approx(1.0, abs=1e-4)


def test_a_pattern_that_fits_nothing_leaves_no_run(styrax):
    with pytest.raises(UserError, match=r"'layers/atn/\*\*' fits no parameter \(did you mean 'layers/attn/\*\*'"):
        trained(styrax, "wrong", train__watch__parameters='["layers/atn/**"]')
    assert not (styrax.folder / "wrong" / "config.toml").exists()


@pytest.mark.slow
def test_several_processes_measure_together(styrax):
    config = styrax.config("several.toml", train__steps=4, train__eval_every=0, **WATCH)
    styrax("train", config, "--run", "one", devices=2)
    styrax("launch", "-n", 2, "--devices-per-process", 1, "--", "train", config, "--run", "two")
    one, two = lines(styrax.folder / "one"), lines(styrax.folder / "two")
    assert [line.keys() for line in one] == [line.keys() for line in two]
    assert any(name.startswith("norm/gradient/") for name in one[1])
    for a, b in zip(one, two):
        assert b == {name: pytest.approx(value, rel=5e-4, abs=1e-6) for name, value in a.items()}
