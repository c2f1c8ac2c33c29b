"""Multi-token prediction: what each place is asked, in which documents, and what trains it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from styrax.core import tree
from styrax.models import Arch, Head, MoE
from styrax.models.cost import cost_of
from styrax.models.stack import unstack

DEPTH = 2
HEAD = Head(mtp=DEPTH, mtp_coef=0.3)


@pytest.fixture(scope="module")
def model(build):
    return build(arch=Arch(head=HEAD), dropout=0.0, scan="off")


def rms(x, scale):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)


def by_hand(model, ids, counted):
    """Follow the definition for one document without padding; only the block is the model's own.

    Gives the sum of the cross-entropies of each depth, and how many there are.
    """
    table = np.asarray(model.embed.embedding[...], np.float64)
    hidden = np.asarray(model.hidden(model.blocks(), jnp.asarray(ids[None, :-1])).x[0], np.float64)
    found = []
    for depth, part in enumerate(unstack(model.mtp), 1):
        rows = len(ids) - 1 - depth
        both = [rms(table[ids[depth:-1]], part.token_norm.scale[...]), rms(hidden[:rows], part.hidden_norm.scale[...])]
        x = np.concatenate(both, -1) @ np.asarray(part.proj.kernel[...], np.float64)
        scope = model.scope(jnp.zeros((1, rows), int), None, None, None)
        hidden = np.asarray(
            part.block(jnp.asarray(x[None], "float32"), None, scope=scope, layer=0, index=0, key=None)[0][0], np.float64
        )
        logits = rms(hidden, part.norm.scale[...]) @ table.T
        nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(rows), ids[depth + 1 :]]
        found.append(((nll * counted[depth:]).sum(), counted[depth:].sum()))
    return found


def batch(lengths, seq=12, vocab=23):
    """Make documents of so many tokens one after another in a row, and padding of ids that are none."""
    rng, ids, targets, segments = np.random.default_rng(0), [], [], []
    documents = []
    for number, length in enumerate(lengths, 1):
        document = rng.integers(0, vocab, length + 1)
        documents.append(document)
        ids += [*document[:-1]]
        targets += [*document[1:]]
        segments += [number] * length
    spare = seq - len(ids)
    ids, targets, segments = ids + [999] * spare, targets + [-100] * spare, segments + [0] * spare
    return documents, *(jnp.asarray([each]) for each in (ids, targets, segments))


def test_each_document_against_the_definition(model):
    """Packed with another and padding, one half of its tokens masked, as if it were alone."""
    documents, ids, targets, segments = batch((5, 4))
    mask = np.array([[1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0]], np.float32)
    terms = jax.jit(lambda model: model.losses(ids, targets, jnp.asarray(mask), segment_ids=segments))(model)
    expected = [by_hand(model, doc, mask[0, at : at + len(doc) - 1]) for doc, at in zip(documents, (0, 5))]
    for depth in range(DEPTH):
        term = terms[f"mtp_{depth + 1}"]
        total, weight = np.sum([each[depth] for each in expected], axis=0)
        np.testing.assert_allclose(term.total, total, rtol=1e-5)
        assert float(term.weight) == weight > 0
        assert term.coef == 0.15


def test_the_first_term_and_the_logits_do_not_change(model, run):
    _, ids, targets, segments = batch((12,))
    plain = dataclasses.replace(model.config, arch=Arch())
    other = tree.unflatten(
        nnx.eval_shape(lambda: plain.build(vocab_size=23, rngs=nnx.Rngs(0))),
        {path: leaf for path, leaf in tree.flatten(model).items() if not path.startswith("mtp/")},
    )
    assert [path for path in tree.flatten(model) if path.startswith("mtp/")]
    np.testing.assert_array_equal(run(other, ids), run(model, ids))
    mask = jnp.ones(ids.shape, "float32")
    ours, theirs = (each.losses(ids, targets, mask, segment_ids=segments) for each in (model, other))
    np.testing.assert_allclose(ours["loss"].total, theirs["loss"].total, rtol=1e-6)
    assert set(ours) - set(theirs) == {"mtp_1", "mtp_2"}


def gradient(model, ids, targets, segments):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def objective(params):
        mask = (segments != 0).astype("float32")
        terms = nnx.merge(graph, params, rest).losses(ids, targets, mask, segment_ids=segments)
        return sum(term.coef * term.total / jnp.maximum(term.weight, 1) for term in terms.values())

    value, grads = jax.jit(jax.value_and_grad(objective))(params)
    return value, tree.flatten(grads)


@pytest.mark.parametrize(
    "moe", [pytest.param(None, marks=pytest.mark.slow), MoE(num_experts=4, experts_per_token=2, expert_dim=16)]
)
def test_every_parameter_is_trained_however_it_is_computed(build, moe):
    _, ids, targets, segments = batch((7, 4))
    arch = Arch(head=HEAD, moe=moe, sparse=(False, True))
    value, grads = gradient(build(arch=arch, scan="off", remat="none"), ids, targets, segments)
    assert not [path for path, leaf in grads.items() if not float(jnp.abs(leaf).max()) > 0]
    other, others = gradient(build(arch=arch, scan="on", remat="block"), ids, targets, segments)
    np.testing.assert_allclose(other, value, rtol=1e-6)
    for path, leaf in grads.items():
        np.testing.assert_allclose(others[path], leaf, atol=2e-5 * float(jnp.abs(leaf).max()), err_msg=path)


def test_a_row_that_is_too_short_is_asked_nothing(model):
    one = jnp.ones((1, 1), int)
    terms = model.losses(one, one, jnp.ones((1, 1)))
    assert float(terms["mtp_1"].weight) == float(terms["mtp_2"].total) == 0
    assert float(terms["loss"].weight) == 1 and bool(jnp.isfinite(terms["mtp_1"].total))


def test_axes_and_cost_know_of_it(model):
    leaves = tree.flatten(model)
    axes = model.config.logical_axes()
    assert axes.keys() == leaves.keys()
    assert all(len(axes[path]) == leaf.ndim for path, leaf in leaves.items())
    plain = dataclasses.replace(model.config, arch=Arch())
    ours, theirs = (cost_of(each, vocab_size=23) for each in (model.config, plain))
    assert ours.parameters - theirs.parameters == sum(
        leaf.size for path, leaf in leaves.items() if path.startswith("mtp/")
    )
    assert ours.active == theirs.active  # a forward pass of generation does not use it
    assert ours.forward_flops(8) == theirs.forward_flops(8)
    kernels = sum(leaf.size for path, leaf in leaves.items() if path.startswith("mtp/") and path.endswith("kernel"))
    pairs = DEPTH * 4 * 24 * (8 + 1) / 2
    assert ours.train_flops(8) - theirs.train_flops(8) == 3 * (2 * (kernels + DEPTH * 23 * 24) + pairs)
