"""Optimizers other than the default one in a whole run: evaluated, resumed, sampled, told apart by parameter."""

import json

import numpy as np
import pytest
from support import lines

KINDS = {
    "average": {"optim__extras": "{average = {decay = 1.0, start = 2}}"},
    "schedule_free": {"optim__kind": '"schedule_free"'},
    "muon": {"optim__kind": '"muon"', "optim__groups": '{norms = {paths = ["**/scale"], optimizer = {kind = "lion"}}}'},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_run_with_another_optimizer(styrax, name):
    config = styrax.config(**KINDS[name], train__steps=8, train__eval_every=4, checkpoint__every=4)
    whole = styrax.folder / "whole"
    styrax("train", config, "train.steps=4", "--run", whole)
    styrax("train", "--run", whole, "train.steps=8")
    losses = [m["loss"] for m in lines(whole)]
    assert len(losses) == 8
    assert np.isfinite(losses).all()

    # What is evaluated and sampled from are the weights of `eval_params`.
    from styrax.core.config import find_schema, read_config
    from styrax.train.compose import load_model, make_dataset
    from styrax.train.evaluate import evaluator
    from styrax.train.loss import next_token_loss
    from styrax.train.step import TrainState, split_model

    resolved = read_config(find_schema("train"), str(whole / "config.toml"))
    data = make_dataset(resolved)
    model, step = load_model(resolved, whole / "checkpoints", data.vocab_size)
    assert step == 8
    graphdef, params, variables = split_model(model)
    state = TrainState(params, None, variables, step, None)  # pyright: ignore[reportArgumentType]
    found = evaluator(graphdef, next_token_loss)(state, data.held_out())
    np.testing.assert_allclose(found.loss, lines(whole)[-1]["held_out_loss"], rtol=1e-5)
    recipe = resolved.sections["optim"]
    assert recipe.derives_weights == (name != "muon")
    if name == "muon":
        tx = recipe.build(params, steps=8)
        assert set(tx.init(params).inner.inner) == {"norms", "rest"}
    assert styrax("generate", whole, "--prompt", "a", "--max-tokens", 3).stdout


@pytest.mark.slow
def test_the_optim_command(styrax):
    listed = json.loads(styrax("optim", "list", "--json").stdout)
    assert {"adamw", "muon", "soap", "schedule_free"} <= set(listed)
    assert listed["adamw"]["state_bytes_per_number"] == pytest.approx(8, rel=1e-2)
    shown = json.loads(styrax("optim", "show", "quickstart", "optim.weight_decay=0.5", "--json").stdout)
    assert {row["decay"] for row in shown} == {0.0, 0.5}
    args = ("optim", "memory", "mesh.axes={fsdp=8}", "--devices", 8, "--vocab-size", 512, "--json")
    weighed = json.loads(styrax(*args).stdout)["adamw"]
    slots = {slot["name"]: slot for slot in weighed["slots"]}
    assert slots["inner/mu"]["bytes"] == weighed["parameters"]
    assert slots["inner/mu"]["device_bytes"] <= weighed["parameters"] / 8 * 1.01
    assert "did you mean 'muon'" in styrax.fails("optim", "show", "optim.kind=muo", code=2)


@pytest.mark.slow
def test_every_state_through_a_checkpoint(tmp_path):
    """Each optimizer's state, saved and restored into what `eval_shape(init)` says, bit for bit."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "optim" / "tests"))
    import jax
    import jax.numpy as jnp
    from contract import CASES

    from styrax.checkpoint import CheckpointConfig

    rng = np.random.default_rng(0)
    shapes = {"embed": {"embedding": (16, 8)}, "head": {"kernel": (8, 16), "bias": (16,)}}
    shapes["layers"] = {"mlp": {"kernel": (2, 8, 8)}, "norm": {"scale": (2, 8)}}
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), jnp.bfloat16), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    with CheckpointConfig().build(tmp_path / "checkpoints") as store:
        saved = {}
        for step, (name, make) in enumerate(CASES.items()):
            like = jax.eval_shape(make(params).init, params)
            # Any bits will do: what matters are the structure, the shapes and the dtypes.
            state = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 100, x.shape), x.dtype), like)
            store.save(step, {"opt_state": state})
            store.wait()
            saved[name] = (state, store.restore(step, {"opt_state": like})["opt_state"])
    for name, (state, again) in saved.items():
        assert jax.tree.structure(state) == jax.tree.structure(again), name
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
            assert one.dtype == other.dtype, name
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name
