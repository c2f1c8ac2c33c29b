import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from train_toys import Toy, toy_batch, toy_loss

from styrax.core import UserError
from styrax.train import Term, init_state, make_step

TX = optax.sgd(0.1)


def run_step(accumulate, batch, loss=toy_loss, tx=TX, streams=()):
    graphdef, state = init_state(Toy(nnx.Rngs(0)), tx, key=jax.random.key(1))
    step = jax.jit(make_step(graphdef, tx, loss, accumulate=accumulate, rng_streams=streams))
    return state, *step(state, batch)


def numpy_gradient(params, batch):
    """The objective's gradient by hand, in float64."""
    w1, b1 = (np.asarray(params["inner"][k], np.float64) for k in ("kernel", "bias"))
    w2, b2 = (np.asarray(params["outer"][k], np.float64) for k in ("kernel", "bias"))
    x, target, mask = (np.asarray(batch[k], np.float64) for k in ("x", "y", "mask"))
    h = np.tanh(x @ w1 + b1)
    y = h @ w2 + b2
    objective = ((y - target) ** 2 * mask[:, None]).sum() / mask.sum() + 0.1 * (y**2).sum() / len(x)
    dy = 2 * (y - target) * mask[:, None] / mask.sum() + 0.2 * y / len(x)
    dh = dy @ w2.T * (1 - h**2)
    return objective, {
        "inner": {"kernel": x.T @ dh, "bias": dh.sum(0)},
        "outer": {"kernel": h.T @ dy, "bias": dy.sum(0)},
    }


@pytest.mark.parametrize("accumulate", [1, 2, 3, 6])
def test_step_equals_float64_whatever_the_cut(accumulate):
    batch = toy_batch(5)
    assert len({batch["mask"][i::accumulate].sum() for i in range(accumulate)}) > 1 or accumulate == 1
    before, after, report = run_step(accumulate, batch)
    objective, gradient = numpy_gradient(before.params, batch)
    assert float(report["loss"]) == pytest.approx(objective, rel=1e-5)
    for layer in gradient:
        for name, wanted in gradient[layer].items():
            got = (np.asarray(before.params[layer][name]) - np.asarray(after.params[layer][name])) / 0.1
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-6)
    assert float(report["tokens"]) == batch["mask"].sum()
    assert int(after.step) == 1


@pytest.mark.parametrize("accumulate", [2, 4])
def test_every_metric_is_the_same_with_accumulation(accumulate):
    batch = toy_batch(3)
    whole, parts = (run_step(k, batch)[2] for k in (1, accumulate))
    assert whole.keys() == parts.keys() == {"loss", "fit", "size", "peak", "tokens"}
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12))
def test_any_mask_accumulates_exactly(mask):
    batch = {**toy_batch(1), "mask": np.array(mask, np.float32)}
    _, one, report_one = STEPS[1](batch)
    _, three, report_three = STEPS[3](batch)
    np.testing.assert_allclose(report_one["loss"], report_three["loss"], rtol=1e-5, atol=1e-7)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one.params, three.params)


class Steps(dict):
    """Compiled once a cut."""

    def __missing__(self, accumulate):
        graphdef, state = init_state(Toy(nnx.Rngs(0)), TX, key=jax.random.key(1))
        step = jax.jit(make_step(graphdef, TX, toy_loss, accumulate=accumulate, rng_streams=()))
        self[accumulate] = lambda batch: (state, *step(state, batch))
        return self[accumulate]


STEPS = Steps()


def test_a_batch_without_a_token_changes_nothing_and_is_finite():
    def only_fit(model, batch, rngs):
        return {"fit": toy_loss(model, batch, rngs)["fit"]}

    for k in (1, 2):
        before, after, report = run_step(k, {**toy_batch(0), "mask": np.zeros(12, np.float32)}, loss=only_fit)
        assert float(report["loss"]) == 0
        jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


def test_other_variables_are_carried():
    batch = toy_batch(0)
    _, after, _ = run_step(1, batch)
    np.testing.assert_allclose(after.variables["mean"], 0.1 * batch["x"].mean(0), rtol=1e-5)
    _, after, _ = run_step(2, batch)
    first, second = batch["x"][0::2].mean(0), batch["x"][1::2].mean(0)
    np.testing.assert_allclose(after.variables["mean"], 0.9 * 0.1 * first + 0.1 * second, rtol=1e-5, atol=1e-7)


def test_dropout_depends_on_seed_step_and_piece():
    seen = []

    def record(model, batch, rngs):
        return {"fit": Term(jnp.sum(jax.random.uniform(rngs.dropout(), (1,))), jnp.ones(()))}

    for seed in (0, 1):
        graphdef, state = init_state(Toy(nnx.Rngs(0)), TX, key=jax.random.key(seed))
        for k in (1, 2):
            step = jax.jit(make_step(graphdef, TX, record, accumulate=k))
            again, first = step(state, toy_batch(0))
            _, second = step(again, toy_batch(0))
            seen += [float(first["loss"]), float(second["loss"])]
            assert float(step(state, toy_batch(0))[1]["loss"]) == float(first["loss"])
    assert len(set(seen)) == len(seen)


def test_a_scalar_loss_works_whole_and_is_refused_in_pieces():
    def mean(model, batch, rngs):
        return jnp.mean(model(batch["x"]) ** 2)

    assert float(run_step(1, toy_batch(0), loss=mean)[2]["loss"]) > 0
    with pytest.raises(UserError, match=r"bare scalar.*4 micro-batches.*Term\(sum, count\)"):
        run_step(4, toy_batch(0), loss=mean)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda model, batch, rngs: {"a": jnp.zeros(())}, "must return"),
        (lambda model, batch, rngs: {"a": Term(jnp.zeros(()), jnp.ones(()), 0.0)}, "nothing to minimise"),
        (lambda model, batch, rngs: jnp.zeros((3,)), "must return"),
        (lambda model, batch, rngs: {}, "must return"),
        (
            lambda model, batch, rngs: (jnp.sum(model(batch["x"])), {"aux": jnp.zeros(2)}),
            r"got a tuple of 2 \(an array of shape \(\), .*aux.*\)\. What is only to be logged is a further term",
        ),
        (lambda model, batch, rngs: {"loss": jnp.mean(model(batch["x"]))}, r"shape \(\)}\. Wrap each in Term\(sum"),
        (lambda model, batch, rngs: {"a": Term(jnp.zeros(3), 1)}, r"Term.total of .*'a'.*shape \(3,\).*jnp.sum\(total"),
        (lambda model, batch, rngs: {"a": Term(1.0, batch["mask"])}, r"Term.weight of .*shape \(12,\).*jnp.sum"),
        (lambda model, batch, rngs: {"a": Term(1.0, None)}, "Term.weight of .* got None"),
        (lambda model, batch, rngs: Term(model(batch["x"]), 1.0), "Term.total of the loss's 'loss'"),
        (lambda model, batch, rngs: {"a": Term(1.0, 1.0, jnp.sum(batch["x"]))}, "Term.coef .* a plain number"),
        (lambda model, batch, rngs: {"a": Term(1.0, 1), "tokens": Term(1.0, 1)}, "cannot be named 'tokens'"),
        (lambda model, batch, rngs: None, "got None"),
    ],
)
def test_a_wrong_loss_is_explained(bad, message):
    with pytest.raises(UserError, match=message):
        run_step(1, toy_batch(0), loss=bad)


def test_the_caller_keeps_its_module():
    model = Toy(nnx.Rngs(0))
    graphdef, state = init_state(model, TX, key=jax.random.key(0))
    jax.jit(make_step(graphdef, TX, toy_loss), donate_argnums=0)(state, toy_batch(0))
    assert np.isfinite(np.asarray(model.inner.kernel[...])).all()
