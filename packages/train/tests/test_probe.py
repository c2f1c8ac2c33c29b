"""A step taken apart, against a model whose loss and gradient are written out in numpy."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.train import Term, init_state, next_token_loss
from styrax.train.bisect import Culprit, blame, candidates, halved, judge
from styrax.train.commands.replay import tell_activations
from styrax.train.probe import Prober
from styrax.train.replay import Taken, documents
from styrax.train.verify import Kept, differences

VOCAB, LEARNING_RATE = 11, 0.5


class Bigram(nnx.Module):
    """The next token's logits are a row of a table."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, VOCAB)))
        self.layers = nnx.Param(jnp.arange(6.0).reshape(3, 2))  # as if of three layers; not used

    def __call__(self, tokens, *, positions=None, segment_ids=None, rngs=None):
        return self.table[tokens]


def made(seed=0, rows=4, columns=9):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, columns)).astype(np.int32)
    segments = np.repeat([[1, 1, 1, 2, 2, 2, 2, 3, 0]], rows, 0).astype(np.int32)[:, :columns]
    return {
        "tokens": tokens,
        "targets": rng.integers(0, VOCAB, (rows, columns)).astype(np.int32),
        "loss_mask": ((rng.random((rows, columns)) < 0.8) * (segments > 0)).astype(np.float32),
        "segment_ids": segments,
        "positions": np.zeros((rows, columns), np.int32),
    }


def reference(table, batch):
    """Losses of targets and the gradient of their mean, in float64."""
    logits = np.asarray(table, np.float64)[batch["tokens"]]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hot = np.eye(VOCAB)[batch["targets"]]
    mask = batch["loss_mask"].astype(np.float64)
    losses = -np.log((p * hot).sum(-1)) * mask
    gradient = np.zeros((VOCAB, VOCAB))
    np.add.at(gradient, batch["tokens"], (p - hot) * mask[..., None] / mask.sum())
    return losses, gradient


def prober(accumulate=1, loss=next_token_loss, tx=None):
    tx = tx or optax.sgd(LEARNING_RATE)
    graphdef, state = init_state(Bigram(nnx.Rngs(0)), tx, key=jax.random.key(1))
    axes = {"layers": ("layers", None), "table": (None, None)}
    return Prober(graphdef, tx, loss, accumulate=accumulate, logical_axes=axes), state


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_norms_are_those_of_the_formulas(accumulate):
    probe, state = prober(accumulate)
    batch = made()
    losses, gradient = reference(state.params["table"], batch)
    np.testing.assert_allclose(probe.token_losses(state, batch), losses, rtol=1e-5, atol=1e-6)
    probed = probe(state, batch)
    norm = np.sqrt((gradient**2).sum())
    assert probed.metrics["loss"] == pytest.approx(losses.sum() / batch["loss_mask"].sum(), rel=1e-5)
    assert probed.norms["table"]["gradient"] == pytest.approx(norm, rel=1e-5)
    assert probed.norms["table"]["update"] == pytest.approx(LEARNING_RATE * norm, rel=1e-4)
    table = np.asarray(state.params["table"], np.float64)
    assert probed.norms["table"]["parameter"] == pytest.approx(np.sqrt((table**2).sum()), rel=1e-5)
    assert probed.norms["layers"]["parameter"] == pytest.approx([1.0, np.sqrt(13.0), np.sqrt(41.0)])
    assert probed.not_finite == {}


SIZE, LAYER = 0.05, -0.02


def three_terms(model, batch, rngs):
    """The losses of tokens, the size of their logits, and that of a layer, by weights of their own; and a metric."""
    logits = model(batch["tokens"]) * batch["loss_mask"][..., None]
    rows = jnp.float32(len(batch["tokens"]))
    return {
        **next_token_loss(model, batch, rngs),
        "size": Term(jnp.sum(logits**2), rows, SIZE),
        "layer": Term(rows * jnp.sum(model.layers[1] ** 2), rows, LAYER),
        "seen": Term(jnp.sum(logits), rows, 0.0),
    }


def parts_of(state, batch):
    """The gradients of those terms in float64, each as one vector of all parameters."""
    table, layers = (np.asarray(state.params[name], np.float64) for name in ("table", "layers"))
    size, layer = np.zeros_like(table), np.zeros_like(layers)
    weights = batch["loss_mask"].astype(np.float64)[..., None]
    np.add.at(size, batch["tokens"], 2 * SIZE / len(weights) * table[batch["tokens"]] * weights**2)
    layer[1] = 2 * LAYER * layers[1]
    found = {"loss": (reference(table, batch)[1], 0 * layer), "size": (size, 0 * layer), "layer": (0 * table, layer)}
    return {name: np.concatenate([np.ravel(x) for x in pair]) for name, pair in found.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradients_of_terms_are_those_of_the_formulas(accumulate):
    probe, state = prober(accumulate, three_terms)
    batch = made()
    found, parts = probe.term_gradients(state, batch), parts_of(state, batch)
    whole = sum(parts.values())
    size = np.linalg.norm(whole)
    assert list(found) == list(parts)
    for name, part in parts.items():
        norm = np.linalg.norm(part)
        wanted = {"norm": norm, "share": part @ whole / size**2, "cosine": part @ whole / (norm * size)}
        assert found[name] == pytest.approx(wanted, rel=1e-4)
    assert found["layer"]["norm"] > 0


probers = functools.cache(prober)  # compiled once for all examples


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
def test_the_gradients_of_terms_add_up_to_the_steps(seed, accumulate):
    probe, state = probers(accumulate, three_terms)
    table = 3 * jax.random.normal(jax.random.key(seed), (VOCAB, VOCAB))
    state = state._replace(params={**state.params, "table": table})
    batch = made(seed)
    found, probed = probe.term_gradients(state, batch), probe(state, batch)
    size = np.linalg.norm(np.concatenate([np.ravel(each["gradient"]) for each in probed.norms.values()]))
    # Each is projected on the whole; so sums are the whole's length, whatever the terms are.
    assert sum(each["share"] for each in found.values()) == pytest.approx(1.0, abs=1e-5)
    assert sum(each["norm"] * each["cosine"] for each in found.values()) == pytest.approx(size, rel=1e-5)


def test_a_single_term_is_the_whole_gradient_and_one_without_a_gradient_has_no_share():
    probe, state = prober()
    batch = made()
    norm = np.linalg.norm(reference(state.params["table"], batch)[1])
    one = pytest.approx(1.0, abs=1e-12)
    assert probe.term_gradients(state, batch) == {
        "loss": {"norm": pytest.approx(norm, rel=1e-5), "share": one, "cosine": one}
    }

    def flat(model, batch, rngs):
        return {**next_token_loss(model, batch, rngs), "flat": Term(jnp.float32(2.0), jnp.float32(1.0))}

    assert prober(loss=flat)[0].term_gradients(state, batch)["flat"] == {"norm": 0.0, "share": 0.0, "cosine": 0.0}


def test_the_term_whose_gradient_is_not_finite_is_told_from_the_others():
    probe, state = prober(loss=makes_nan)
    batch = made()
    batch["tokens"][0, 0] = 7
    found = probe.term_gradients(state, batch)
    assert np.isfinite(found["loss"]["norm"])
    assert not np.isfinite(found["root"]["norm"])


def test_a_bad_parameter_comes_first():
    probe, state = prober()
    batch = made()
    table = state.params["table"].at[int(batch["tokens"][0, 0]), 3].set(jnp.inf)
    bad = probe(state._replace(params={**state.params, "table": table}), batch).not_finite
    assert list(bad)[:2] == ["parameter table", "metric loss"]
    assert bad["parameter table"] == 1
    assert "gradient table" in bad
    assert "new parameter table" in bad


def poisoned(model, batch, rngs):
    """NaN where token 7 stands: the logarithm of a negative number."""
    terms = next_token_loss(model, batch, rngs)
    bad = jnp.log(6.5 - batch["tokens"][0, 0])
    return {"loss": terms["loss"]._replace(total=terms["loss"].total + 0 * bad)}


def test_the_operation_that_makes_the_first_nan_is_named():
    probe, state = prober(loss=poisoned)
    batch = made()
    batch["tokens"][0, 0] = 7
    assert probe(state, batch).not_finite["metric loss"] == 1
    said = probe.first_nan(state, batch)
    assert "nan generated by primitive: log" in said
    assert "test_probe.py" in said
    batch["tokens"][0, 0] = 3
    assert probe.first_nan(state, batch) is None


def test_documents_are_cut_and_ranked_as_their_segments():
    batch = made()
    losses, _ = reference(np.zeros((VOCAB, VOCAB)), batch)
    losses[1, 3] = 50.0 * batch["loss_mask"][1, 3]
    batch["loss_mask"][1, 3] = 1.0
    losses[1, 3] = 50.0
    found = documents(object(), Taken(1, 0, batch, None, {}), losses)
    assert len(found) == 3 * 4
    assert (found[0]["row"], found[0]["column"], found[0]["length"]) == (1, 3, 4)
    for each in found:
        here = np.s_[each["row"], each["column"] : each["column"] + each["length"]]
        assert each["tokens"] == batch["loss_mask"][here].sum()
        if each["tokens"]:
            assert each["loss"] == pytest.approx(losses[here].sum() / each["tokens"])
    ranks = [each["loss"] for each in found if each["tokens"]]
    assert ranks == sorted(ranks, reverse=True)


def makes_nan(model, batch, rngs):
    """A term whose gradient alone is not finite, at every token 7: the root of what is exactly 0."""
    terms = next_token_loss(model, batch, rngs)
    zero = jnp.where(batch["tokens"] == 7, model.layers[0, 0], 1.0)
    return {**terms, "root": Term(jnp.sum(jnp.sqrt(zero)), 1.0, 1e-3)}


@pytest.mark.parametrize("row", [0, 2])
def test_the_document_that_makes_a_gradient_bad_is_found_by_halves(row):
    probe, state = prober(loss=makes_nan)
    batch = made()
    batch["tokens"][batch["tokens"] == 7] = 6
    batch["loss_mask"][:, :8] = 1.0
    batch["tokens"][row, 5] = 7  # in the second segment, from column 3
    found = Culprit(why="")
    blame(found, object(), probe, Taken(1, 0, batch, state, {}), judge("loss", None), by_gradient=True)
    assert [(each["row"], each["column"]) for each in found.documents] == [(row, 3)]
    assert found.mended
    batch["tokens"][3, 0] = 7  # a second one
    found = Culprit(why="")
    blame(found, object(), probe, Taken(1, 0, batch, state, {}), judge("loss", None), by_gradient=True)
    assert {(each["row"], each["column"]) for each in found.documents} == {(row, 3), (3, 0)}
    assert found.mended


def test_the_documents_that_lift_a_loss_are_the_fewest_that_mend_it():
    probe, state = prober()
    batch = made()
    batch["loss_mask"][:, :8] = 1.0
    losses, _ = reference(state.params["table"], batch)
    ranked = documents(object(), Taken(1, 0, batch, None, {}), losses)
    total, count = sum(d["loss"] * d["tokens"] for d in ranked), sum(d["tokens"] for d in ranked)
    for document in ranked[:2]:  # what the loss is without the two worst
        total, count = total - document["loss"] * document["tokens"], count - document["tokens"]
    found = Culprit(why="")
    bad = judge("loss", total / count + 1e-3)
    blame(found, object(), probe, Taken(1, 0, batch, state, {}), bad, by_gradient=False)
    assert [(d["row"], d["column"]) for d in found.documents] == [(d["row"], d["column"]) for d in ranked[:2]]
    assert found.mended
    assert found.without["loss"] == pytest.approx(total / count, rel=1e-5)


@given(st.sets(st.integers(0, 15), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_halves_end_with_a_part_that_is_bad(guilty, seed):
    every = [{"n": int(n)} for n in np.random.default_rng(seed).permutation(16)]

    def bad(some):
        return any(each["n"] in guilty for each in some)

    (one,) = halved(every, bad)
    assert one["n"] in guilty


def test_where_to_look_follows_from_the_lines():
    high, nan = judge("loss", 3.0), judge("loss", None)
    lines = [{"step": 2, "loss": 2.0}, {"step": 4, "loss": 3.5}, {"step": 6, "loss": float("nan")}]
    assert candidates(lines, high) == (3, 4)
    assert candidates(lines, nan) == (5, 6)
    assert candidates(lines[:1], high) == (3, None)
    skipped = [{"step": 1, "loss": 2.0, "skipped": 0.0}, {"step": 2, "loss": 2.0, "skipped": 1.0}]
    assert candidates(skipped, nan) == (2, 2)
    assert candidates(skipped, high) == (3, None)


def test_every_kind_of_difference_is_told_and_equal_runs_have_none():
    one = Kept(
        {"params/w": np.array([[1.0, 2.0], [3.0, np.nan]], np.float32), "step": np.int32(4)},
        {1: '{"step": 1, "loss": 2.0}', 2: '{"step": 2, "loss": 1.0}'},
        {"step": 4, "fingerprint": "a"},
    )
    assert differences(one, one) == []
    w = one.arrays["params/w"].copy()
    w[1, 0] = np.nextafter(w[1, 0], 9)
    other = Kept(
        {"params/w": w, "step": np.int64(4), "params/more": np.zeros(1)}, {1: one.lines[1]},
        {"step": 5, "fingerprint": "a"},
    )  # fmt: skip
    assert differences(one, other) == [
        "params/more: only in the run that was resumed",
        "params/w: 1 of 4 numbers differ, first at [1, 0]: 3.0 and 3.000000238418579",
        "step: int32[] and int64[]",
        'metrics of step 2: {"step": 2, "loss": 1.0} and no line',
        "data position, step: 4 and 5",
    ]


class Told(Bigram):
    """Tells its logits' size, over all places that are no padding, and once more as if of two layers."""

    def activations(self, tokens, *, positions=None, segment_ids=None, rngs=None):
        x = self.table[tokens]
        real = jnp.broadcast_to((segment_ids != 0)[..., None], x.shape)
        finite = real & jnp.isfinite(x)
        numbers = real.sum().astype(jnp.float32)
        found = {
            "rms": jnp.sqrt(jnp.where(finite, x * x, 0).sum() / finite.sum()),
            "max": jnp.where(finite, jnp.abs(x), 0).max(), "zeros": (real & (x == 0)).sum() / numbers,
            "not_finite": (real & ~finite).sum() / numbers, "numbers": numbers,
        }  # fmt: skip
        two = {name: jnp.stack([value, value]) for name, value in found.items()}
        return {"table": found, "layers": {**two, "layer": jnp.array([3, 5])}}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_activations_of_micro_batches_are_those_of_the_batch(accumulate):
    graphdef, state = init_state(Told(nnx.Rngs(0)), optax.sgd(0.1), key=jax.random.key(1))
    table = state.params["table"].at[3, :2].set(jnp.nan).at[4, :3].set(0.0)
    state = state._replace(params={**state.params, "table": table})
    batch = made()
    batch["segment_ids"][::2, 4:] = 0  # so that micro-batches differ in how much they hold
    found, why = Prober(graphdef, optax.sgd(0.1), accumulate=accumulate).activations(state, batch)
    x = np.asarray(table, np.float64)[batch["tokens"]][batch["segment_ids"] > 0]
    finite = x[np.isfinite(x)]
    wanted = {
        "rms": np.sqrt((finite**2).mean()), "max": np.abs(finite).max(), "zeros": (x == 0).mean(),
        "not_finite": (~np.isfinite(x)).mean(),
    }  # fmt: skip
    assert why is None
    assert 0 < wanted["not_finite"] < 1
    assert found["table"] == pytest.approx(wanted, rel=1e-5)
    assert found["layers"] == {**{name: [pytest.approx(value, rel=1e-5)] * 2 for name, value in wanted.items()},
                               "layer": [3, 5]}  # fmt: skip


def test_activations_are_printed_with_the_layer_of_the_largest(capsys):
    one = {"rms": 1.0, "max": 9.0, "zeros": 0.0, "not_finite": 0.0}
    two = {"rms": [2.0, 1.0], "max": [3.0, 4.0], "zeros": [0.0, 0.0], "not_finite": [0.0, 0.5], "layer": [3, 5]}
    tell_activations(SimpleNamespace(no_activations=None, activations={"one": one, "two": two}), 5)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["two", "2", "@3", "4", "@5", "0", "@3", "0.5", "@5"]  # what is not finite comes first
    assert lines[2] == ["one", "1", "9", "0", "0"]
    tell_activations(SimpleNamespace(no_activations="it is a table", activations={}), 5)
    assert capsys.readouterr().out == "activations: n/a (it is a table)\n"


def test_a_model_that_does_not_tell_its_activations_is_no_failure():
    probe, state = prober()
    assert probe.activations(state, made()) == (
        {}, "a Bigram does not tell its activations: it has no method of that name"
    )  # fmt: skip
