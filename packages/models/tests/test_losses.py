"""The training objective: against float64, against gradients of all logits at once, and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import cases, write
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.models.hf import from_pretrained
from styrax.models.losses import next_token, routers

VOCAB = 11


def draw(batch, seq, seed=0):
    rng = np.random.default_rng(seed)
    x, kernel = rng.normal(size=(batch, seq, 5)), rng.normal(size=(5, VOCAB))
    targets, mask = rng.integers(0, VOCAB, (batch, seq)), rng.integers(0, 2, (batch, seq)).astype(float)
    return x, kernel, targets, mask


def exact(x, kernel, targets, mask):
    """Follow the definition, token by token."""
    nll = squared = 0.0
    for row, column in np.ndindex(*targets.shape):
        logits = x[row, column] @ kernel
        log_sum = np.log(np.exp(logits).sum())
        nll += mask[row, column] * (log_sum - logits[targets[row, column]])
        squared += mask[row, column] * log_sum**2
    return nll, squared


def head(params, x):
    return x @ params["kernel"]


def summed(kernel, x, targets, mask, **named):
    terms = next_token(head, {"kernel": kernel}, x, targets, mask, vocab_size=VOCAB, **named)
    return sum(term.coef * term.total for term in terms.values()), terms


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 4, 6]), st.sampled_from([0.0, 0.3]), st.sampled_from([1, 40, 10**6]))
def test_in_pieces_or_at_once(batch, seq, z_loss, most):
    x, kernel, targets, mask = draw(batch, seq)
    given32 = [jnp.asarray(each, "float32") for each in (kernel, x)]
    named = {"z_loss": z_loss, "most_logits": most}

    def objective(kernel, x):
        return summed(kernel, x, jnp.asarray(targets), jnp.asarray(mask), **named)

    (value, terms), grads = jax.value_and_grad(objective, (0, 1), has_aux=True)(*given32)
    nll, squared = exact(x, kernel, targets, mask)
    np.testing.assert_allclose(value, nll + z_loss * squared, rtol=1e-5, atol=1e-5)
    assert float(terms["loss"].weight) == mask.sum()
    assert ("z_loss" in terms) == (z_loss > 0)
    for number, array in enumerate((kernel, x)):
        step = np.random.default_rng(1).normal(size=array.shape)
        sides = []
        for sign in (1, -1):
            moved = [kernel, x]
            moved[number] = array + sign * 1e-6 * step
            nll, squared = exact(moved[1], moved[0], targets, mask)
            sides.append(nll + z_loss * squared)
        slope = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose((np.asarray(grads[number], float) * step).sum(), slope, rtol=2e-3, atol=2e-3)


def test_what_comes_back_is_weighed():
    """A loss that is divided, and added to others, has the gradient of that."""
    x, kernel, targets, mask = (jnp.asarray(each, "float32") for each in draw(2, 6))

    def objective(kernel, most):
        _, terms = summed(kernel, x, targets.astype(int), mask, z_loss=0.1, most_logits=most)
        return 3.0 * terms["loss"].total / terms["loss"].weight - 0.5 * terms["z_loss"].total

    np.testing.assert_allclose(jax.grad(objective)(kernel, 1), jax.grad(objective)(kernel, 10**9), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [1, 10**9])
def test_a_masked_position_may_hold_anything(most):
    x, kernel, targets, mask = (jnp.asarray(each, "float32") for each in draw(1, 4))
    bad = x.at[0, 1].set(jnp.nan)
    mask, targets = mask.at[0, 1].set(0), targets.astype(int).at[0, 1].set(999)
    value, grad = jax.value_and_grad(lambda x: summed(kernel, x, targets, mask, most_logits=most)[0])(x)
    assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(grad).all())
    assert bool(jnp.isfinite(summed(kernel, bad, targets, mask, most_logits=most)[0]))


def test_pieces_need_a_quarter_of_the_memory():
    def temporary(most):
        shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 4096), (2, 64, 16), (2, 64), (2, 64))]

        def objective(kernel, x, targets, mask):
            terms = next_token(
                head, {"kernel": kernel}, x, targets.astype(int), mask, vocab_size=4096, most_logits=most
            )
            return terms["loss"].total

        compiled = jax.jit(jax.grad(objective, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2**15) < temporary(2**30) / 4


# --- the model's own


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return from_pretrained(write(cases()["mixtral"][0], tmp_path_factory.mktemp("model") / "m"), scan="on")


def batch_of(rows=4, seq=12):
    ids = np.random.default_rng(2).integers(1, 61, (rows, seq + 1))
    mask = np.ones((rows, seq), np.float32)
    mask[1, 5:] = 0
    segments = np.ones((rows, seq), np.int32)
    segments[1, 8:] = 0
    return jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:]), jnp.asarray(mask), jnp.asarray(segments)


def test_losses_of_a_decoder_are_those_of_its_logits(sparse):
    tokens, targets, mask, segments = batch_of()
    terms = sparse.losses(tokens, targets, mask, segment_ids=segments)
    logits = np.asarray(sparse(tokens, segment_ids=segments), float)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(terms["loss"].total, (nll * np.asarray(mask)).sum(), rtol=1e-5)
    assert float(terms["loss"].weight) == float(mask.sum())
    assert [terms[name].coef for name in ("balance", "router_z", "router_entropy", "dropped")] == [
        0.01,
        0.001,
        0.0,
        0.0,
    ]
    real = float((segments != 0).sum())
    assert float(terms["router_z"].weight) == 4 * real
    assert float(terms["balance"].weight) == 4 * len(tokens)
    assert float(terms["dropped"].total) == 0 and float(terms["dropped"].weight) == 4 * 2 * real


def test_balance_of_a_row_by_hand(sparse):
    """E times the sum over experts of part of the choices times mean probability, row by row."""
    tokens, _, _, segments = batch_of()
    found = sparse.hidden(sparse.blocks(), tokens, segment_ids=segments)
    (stats,) = found.reports
    assert stats.load.shape == (4, 4, 4)  # layers, rows, experts
    total = 0.0
    for layer, row in np.ndindex(4, 4):
        load, probs = np.asarray(stats.load[layer, row]), np.asarray(stats.probs[layer, row])
        count = float(stats.tokens[layer, row])
        assert count == float((segments[row] != 0).sum()) and load.sum() == 2 * count
        np.testing.assert_allclose(probs.sum(), count, rtol=1e-5)
        total += 4 * sum(load[e] / load.sum() * probs[e] / count for e in range(4))
    term = routers(found.reports, sparse.config.arch.moe)["balance"]
    np.testing.assert_allclose(term.total, total, rtol=1e-5)


def test_sums_of_parts_are_those_of_the_whole(sparse):
    tokens, targets, mask, segments = batch_of()
    whole = sparse.losses(tokens, targets, mask, segment_ids=segments)
    parts = [
        sparse.losses(tokens[cut], targets[cut], mask[cut], segment_ids=segments[cut])
        for cut in (slice(0, 1), slice(1, 4))
    ]
    for name, term in whole.items():
        np.testing.assert_allclose(sum(float(part[name].total) for part in parts), term.total, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sum(float(part[name].weight) for part in parts), term.weight, rtol=1e-6)


def test_weights_cost_no_forward_pass(sparse):
    """A step that accumulates asks for the weights of the whole batch first."""
    tokens, targets, mask, segments = batch_of()

    def parts(model, name):
        terms = model.losses(tokens, targets, mask, segment_ids=segments)
        return [getattr(term, name) for term in terms.values()]

    compiled = {name: jax.jit(parts, static_argnums=1).lower(sparse, name).compile() for name in ("weight", "total")}
    flops = {name: program.cost_analysis()["flops"] for name, program in compiled.items()}
    assert flops["weight"] < flops["total"] / 100
