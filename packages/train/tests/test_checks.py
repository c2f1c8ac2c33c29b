import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_toys import TX, MemoryTracker, Toy, ToyData, toy_batch, toy_loss

from styrax.core import MeshConfig, UserError
from styrax.train import evaluator, fit, init_state, make_step, next_token_loss
from styrax.train.checks import check_batch
from styrax.train.evaluate import batch_bytes


def problems(call, *args, **options) -> list[str]:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return str(caught.value).splitlines()


GOOD = {"model": Toy, "tx": TX, "loss": toy_loss, "steps": 1}


def test_all_wrong_arguments_of_fit_are_listed_before_anything_runs():
    data = ToyData()
    arguments = {
        "steps": 2.5, "seed": 2**63, "accumulate": 0, "log_every": 0, "save_every": -1, "eval_every": "no",
        "held_out": (toy_batch(i) for i in range(2)), "tracker": object(), "checkpointer": object(), "mesh": "data",
    }  # fmt: skip
    found = problems(fit, 3, None, data, "loss", **arguments)
    assert [line.partition(":")[0] for line in found] == [
        "steps", "seed", "accumulate", "log_every", "save_every", "eval_every", "model", "tx", "loss", "held_out",
        "checkpointer", "tracker", "mesh",
    ]  # fmt: skip
    assert found[0] == "steps: expected integer >= 1, <= 2147483647, got 2.5"
    assert "list(...)" in found[9]
    assert data.step == 0


@pytest.mark.parametrize("data", [toy_batch(0), np.zeros(3), "text", 3])
def test_data_that_is_no_series_of_batches(data):
    assert problems(fit, data=data, **GOOD)[0].startswith("data: expected an iterable of batches, got ")


@pytest.mark.parametrize("batch", [(np.ones(4), np.ones(4)), np.ones(4), [1, 2], {"x": [1.0, 2.0]}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_is_no_mapping_of_arrays(batch, accumulate):
    expected = "a batch must be a dict of arrays by name, rows first"
    data = itertools.repeat(batch)
    assert problems(fit, data=data, accumulate=accumulate, **GOOD)[0].startswith(expected)
    graphdef, state = init_state(Toy(nnx.Rngs(0)), TX, key=jax.random.key(0))
    assert problems(make_step(graphdef, TX, toy_loss, accumulate=accumulate), state, batch)[0].startswith(expected)
    assert problems(evaluator(graphdef, toy_loss), state, [batch])[0].startswith(expected)
    assert problems(check_batch, batch, accumulate)[0].startswith(expected)


def test_a_mesh_axis_that_splits_nothing_is_refused():
    mesh = MeshConfig(axes={"dta": 1}).build(jax.devices()[:1])
    tracker = MemoryTracker()
    assert fit(data=ToyData(), mesh=mesh, tracker=tracker, **GOOD).step == 1  # of one device, it costs nothing
    if len(jax.devices()) > 1:
        wide = MeshConfig(axes={"dta": 2}).build(jax.devices()[:2])
        (line,) = problems(fit, data=ToyData(), mesh=wide, **GOOD)
        assert line.startswith("mesh axis dta: no rule splits anything over this mesh axis (did you mean 'data'?)")


def test_wrong_arguments_of_the_parts():
    model = Toy(nnx.Rngs(0))
    graphdef, _ = init_state(model, TX, key=jax.random.key(0))
    found = problems(make_step, graphdef, optax.adam, None, accumulate=0, rng_streams="dropout")
    assert [line.partition(":")[0] for line in found] == ["accumulate", "tx", "loss", "rng_streams"]
    found = problems(init_state, {"w": jnp.ones(1)}, "adam", key=jax.random.PRNGKey(0))
    assert [line.partition(":")[0] for line in found] == ["model", "tx", "key"]
    assert "jax.random.key(seed)" in found[2]
    assert problems(evaluator, graphdef, 3)[0].startswith("loss: expected a function")


def test_what_a_batch_lacks_is_named():
    (line,) = problems(next_token_loss, None, {"x": jnp.ones(1), "tokens": jnp.ones((1, 1))})
    assert "lacks targets, loss_mask and has x, tokens" in line
    assert "lacks loss_mask" in problems(batch_bytes, {"targets": np.zeros((1, 1), int)}, np.ones(3))[0]
