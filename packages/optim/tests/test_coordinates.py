"""The coordinate check: its arithmetic, and what it says of a model with and without a transfer."""

import argparse
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from styrax.core import UsageError, UserError, registry
from styrax.core.tree import flatten, unflatten
from styrax.optim import adamw, specs
from styrax.optim.commands import coordcheck
from styrax.optim.coordinates import Coordinate, Coordinates, Trial, coordinate_check
from styrax.optim.transfer import CompleteP, MuP, UMuP

BASE = 32


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def residual_mlp(rules, width, depth, seed, learning_rate=1e-3):
    """A residual MLP whose head starts at 0, by `rules`, or in the standard parametrisation without."""
    unit = isinstance(rules, UMuP)
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "embed": {"kernel": jax.random.normal(keys[0], (8, width))},
        "layers": {"up": {"kernel": jax.random.normal(keys[1], (depth, width, width))}},
        "head": {"kernel": jnp.zeros((width, 4))},
    }
    params["layers"]["up"]["kernel"] *= 1.0 if unit else (BASE if rules else width) ** -0.5
    residual, logits = rules.forward(head_dim=1)[:2] if rules else (1.0, 1.0)
    settings = {"lr_multipliers": 1.0}
    if rules:
        by_path = rules.by_path(params, specs(params))
        params["layers"]["up"]["kernel"] *= by_path["layers/up/kernel"].init
        settings = {
            "lr_multipliers": {path: each.lr for path, each in by_path.items()},
            "eps": {path: 1e-8 * each.eps for path, each in by_path.items()},
        }
    factor = width**-0.5 if unit else 1.0

    def loss_and_activations(params, batch):
        x = first = batch[0] @ params["embed"]["kernel"]
        x, _ = jax.lax.scan(
            lambda x, kernel: (x + residual * jnp.tanh(factor * (norm(x) @ kernel)), None),
            x,
            params["layers"]["up"]["kernel"],
        )
        out = logits * (norm(x) @ params["head"]["kernel"])
        return jnp.mean((out - batch[1]) ** 2), {"embedding": first, "branches": x - first, "out": out}

    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 8)).astype("float32"), rng.normal(size=(8, 4)).astype("float32")
    return Trial(params, adamw(learning_rate, weight_decay=0.0, **settings), loss_and_activations, batch)


def slopes(make, sizes):
    found = coordinate_check(make, sizes, steps=3)
    return {name: found.slope(name) for name in found.names}


WIDTHS = [pytest.param([32, 128]), pytest.param([32, 64, 128, 256], marks=pytest.mark.slow)]
DEPTHS = [pytest.param([2, 8]), pytest.param([2, 4, 8, 16], marks=pytest.mark.slow)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_mup_is_flat_over_the_width(widths):
    found = slopes(lambda n, seed: residual_mlp(MuP(width=n, base_width=BASE), n, 2, seed), widths)
    assert all(abs(slope) < 0.15 for slope in found.values()), found


@pytest.mark.parametrize("widths", WIDTHS)
def test_without_transfer_activations_move_more_the_wider_the_model(widths):
    found = slopes(lambda n, seed: residual_mlp(None, n, 2, seed, learning_rate=1e-4), widths)
    assert min(found["branches"], found["out"]) > 0.3, found
    assert abs(found["embedding"]) < 0.15


@pytest.mark.parametrize("widths", WIDTHS)
def test_unit_scaled_mup_is_flat_over_the_width(widths):
    """But for the embedding, whose learning rate falls with the root of the width by rule."""
    found = slopes(lambda n, seed: residual_mlp(UMuP(width=n, depth=2), n, 2, seed, learning_rate=0.05), widths)
    assert max(abs(found["branches"]), abs(found["out"])) < 0.15, found
    assert found["embedding"] == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("depths", DEPTHS)
def test_completep_is_flat_over_the_depth(depths):
    def make(n, seed):
        return residual_mlp(CompleteP(width=64, base_width=BASE, depth=n, base_depth=2), 64, n, seed)

    found = slopes(make, depths)
    assert all(abs(slope) < 0.15 for slope in found.values()), found


@pytest.mark.parametrize("depths", DEPTHS)
def test_mup_is_not_flat_over_the_depth(depths):
    found = slopes(lambda n, seed: residual_mlp(MuP(width=64, base_width=BASE), 64, n, seed), depths)
    assert found["branches"] > 0.3, found


# --- the arithmetic


def power_law(p, widths=(64, 128, 512)):
    rows = []
    for width in widths:
        rows += [Coordinate("x", width, step, 1.0, step * 0.01 * width**p if step else 0.0) for step in range(3)]
    return Coordinates(rows)


@pytest.mark.parametrize("p", [-0.5, 0.0, 0.14, 0.16, 1.0])
def test_slope_of_a_power_law(p):
    found = power_law(p)
    assert found.slope("x") == pytest.approx(p, abs=1e-9)
    assert found.slope("x", step=1) == pytest.approx(p, abs=1e-9)
    assert found.flat("x") == (abs(p) < 0.15)
    assert found.flat("x", tolerance=2.0)
    assert (found.names, found.widths, found.steps) == (["x"], [64, 128, 512], 2)
    last = str(found).splitlines()[-1]
    assert last.endswith("NOT flat") == (abs(p) > 0.15)
    assert float(last.split()[4]) == pytest.approx(p, abs=0.005)


@pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf])
def test_what_never_moved_or_is_not_finite_is_not_flat(wrong):
    rows = [*power_law(0.0)]
    rows[2] = rows[2]._replace(change=wrong)
    assert math.isnan(Coordinates(rows).slope("x"))
    assert not Coordinates(rows).flat("x")


def test_size_and_change_are_means_over_elements_and_seeds():
    """One parameter under a step of 1 a time, by hand."""

    def make(width, seed):
        def loss(params, batch):
            x = params * jnp.arange(1.0, 3.0)
            return params.sum(), {"z": x, "a": -x}

        return Trial(jnp.float32(10.0 * (seed + 1)), optax.sgd(1.0), loss, None)

    found = coordinate_check(make, [2, 1], steps=2, seeds=[0, 1])
    assert found.names == ["z", "a"]  # in the model's order
    assert found.widths == [1, 2]
    rows = {(row.name, row.width, row.step): row[3:] for row in found}
    assert rows["z", 1, 0] == ((15 + 30) / 2, 0.0)
    assert rows["a", 2, 2] == ((8 * 1.5 + 18 * 1.5) / 2, 3.0)


def test_errors():
    def make(width, seed):
        name = "out" if width < 64 else "logits"
        return Trial(jnp.ones(()), optax.sgd(1.0), lambda params, batch: (params, {name: batch}), jnp.ones(2))

    with pytest.raises(UserError, match=r"expected activations of the same names .* 32 has out; 64 has logits"):
        coordinate_check(make, [32, 64])
    with pytest.raises(
        UserError, match=r"(?s)widths.0.: expected integer >= 1, got 0.*steps: .*\n  seeds: expected one"
    ):
        coordinate_check(make, [0, 64], steps=0, seeds=[])
    with pytest.raises(UserError, match=r"widths: expected two or more, all different, got \[64, 64\]"):
        coordinate_check(make, [64, 64])
    with pytest.raises(
        UserError, match=r"expected an activation of x and a step from 1 to 2, got 'xx' .did you mean 'x'"
    ):
        power_law(0.0).slope("xx")


def test_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows = [row._replace(name=f"layer {n}") for n in range(5) for row in power_law(n / 4)]
    Coordinates(rows).plot(tmp_path / "coords.png")
    assert (tmp_path / "coords.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"cannot write the picture .*coords.exe"):
        Coordinates(rows).plot(tmp_path / "coords.exe")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"needs matplotlib; pip install .styrax-optim.plot"):
        Coordinates(rows).plot(tmp_path / "other.png")


# --- the command


def command(*arguments):
    parser = argparse.ArgumentParser()
    coordcheck.add_arguments(parser)
    return coordcheck.run(parser.parse_args(arguments))


def test_command_needs_a_model():
    if "decoder" not in registry.names("styrax.models"):
        with pytest.raises(UsageError, match="pip install styrax-models"):
            command()
    with pytest.raises(UsageError, match="no model named 'decoderr'"):
        command("--model", "decoderr")


def test_command_lists_what_is_wrong(capsys):
    pytest.importorskip("styrax.models")
    with pytest.raises(UsageError) as caught:
        command("--widths", "32,48,32", "--layers", "0", "--steps", "1", "--learning-rate", "-1")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "--layers 0",
        "--steps 1",
        "width 48",
        "sizes [32, 48, 32]",
        "--learning-rate -1.0",
    ]
    with pytest.raises(SystemExit):
        command("--widths", "32;64")
    assert "expected integers with commas between, got '32;64'" in capsys.readouterr().err


@pytest.mark.slow
def test_command_on_the_decoder(tmp_path, capsys):
    pytest.importorskip("styrax.models")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "coords.png"
    assert command("--widths", "32,64", "--layers", "1", "--steps", "2", "--json", "--out", str(picture)) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["activations"]) == ["embedding", "block 1", "logits"]
    assert report["activations"]["logits"]["rows"][0] == {"width": 32, "step": 0, "size": 0.0, "change": 0.0}
    assert picture.read_bytes().startswith(b"\x89PNG")


def decoder_slopes(transfer, capsys, *sizes):
    command("--transfer", transfer, "--json", "--steps", "4", *sizes)
    return {name: found["slope"] for name, found in json.loads(capsys.readouterr().out)["activations"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["mup", "completep", "umup", "none"])
def test_decoder_over_the_width(transfer, capsys, tmp_path, monkeypatch):
    pytest.importorskip("styrax.models")
    monkeypatch.chdir(tmp_path)
    found = decoder_slopes(transfer, capsys, "--widths", "64,128,256")
    first = found.pop("embedding")
    if transfer == "none":
        assert min(found.values()) > 0.3, found
    else:
        assert all(abs(slope) < 0.15 for slope in found.values()), found
        assert first == pytest.approx(-0.5 if transfer == "umup" else 0.0, abs=0.1)


@pytest.mark.slow
def test_decoder_over_the_depth(capsys, tmp_path, monkeypatch):
    pytest.importorskip("styrax.models")
    monkeypatch.chdir(tmp_path)
    found = decoder_slopes("completep", capsys, "--depths", "2,4,8")
    half = found.pop("half the blocks")
    assert all(abs(slope) < 0.15 for slope in found.values()), found
    without = decoder_slopes("mup", capsys, "--depths", "2,4,8")
    assert min(without["half the blocks"], without["all blocks"]) > 0.2, without
    # One of two blocks is not half of the way yet, so this one rises too, but less than without.
    assert half < 0.8 * without["half the blocks"]


@pytest.mark.slow
def test_epsilon_of_completep_follows_the_gradient():
    """Adam's epsilon matters alike at every size if it is multiplied as the size of the gradient is: measured."""
    kind = pytest.importorskip("styrax.models").DecoderConfig
    measured, given = [], []
    for width, depth in ((64, 2), (256, 2), (64, 8)):
        rules = coordcheck.transfer("completep", width=width, base_width=64, depth=depth, base_depth=2)
        trial = coordcheck.trial(kind, rules, width=width, depth=depth, base_depth=2, seed=0, learning_rate=1e-3)
        leaves = flatten(trial.params)
        leaves["head/kernel"] = 0.02 * jax.random.normal(jax.random.key(3), leaves["head/kernel"].shape)
        params = unflatten(trial.params, leaves)
        grads = jax.jit(jax.grad(lambda p, trial=trial: trial.loss_and_activations(p, trial.batch)[0]))(params)
        measured.append({path: float(jnp.sqrt(jnp.mean(g * g))) for path, g in flatten(grads).items()})
        given.append({path: each.eps for path, each in rules.by_path(params, specs(params)).items()})
    for path, base in measured[0].items():
        for size in (1, 2):
            ratio = measured[size][path] / base
            assert ratio == pytest.approx(given[size][path] / given[0][path], rel=0.2), (path, size)
