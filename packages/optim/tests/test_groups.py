"""Each group as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import CASES

from styrax.core import UserError
from styrax.core.testing import check_optimizer
from styrax.core.tree import flatten
from styrax.optim import adamw, groups, guard, metrics, muon, reset, specs

RULES = {"embed/**": "frozen", "**/norm/**": "plain", "**": "main"}


def make():
    return groups({"main": adamw(0.1), "plain": optax.sgd(0.5), "frozen": None}, RULES)


def apart(params, group):
    names = {"frozen": ("embed",), "plain": ("norm", "layers/norm")}
    inside = [p for p in flatten(params) if any(p.startswith(f"{n}/") for n in names.get(group, ()))]
    if group == "main":
        taken = [p for n in ("frozen", "plain") for p in apart(params, n)]
        return {p: x for p, x in flatten(params).items() if p not in taken}
    return {p: x for p, x in flatten(params).items() if p in inside}


@pytest.mark.parametrize("guarded", [False, True])
def test_each_group_is_as_if_alone(model, gradients, guarded):
    params = model()
    tx = guard(make(), clip_norm=None) if guarded else make()
    update = jax.jit(tx.update)
    state = tx.init(params)
    alone = {"main": adamw(0.1), "plain": optax.sgd(0.5)}
    states = {name: each.init(apart(params, name)) for name, each in alone.items()}
    for seed in range(3):
        grads = gradients(params, seed)
        updates, state = update(grads, state, params)
        found = flatten(updates)
        for name, each in alone.items():
            expected, states[name] = each.update(apart(grads, name), states[name], apart(params, name))
            for path, step in expected.items():
                np.testing.assert_allclose(found[path], step, rtol=1e-6, atol=1e-7, err_msg=path)
        assert all(not found[path].any() for path in apart(params, "frozen"))


def test_a_skipped_step_changes_nothing(model, gradients):
    params = model()
    tx = guard(make())
    state = tx.init(params)
    _, state = tx.update(gradients(params, 0), state, params)
    bad = gradients(params, 1)
    bad["head"]["kernel"] = bad["head"]["kernel"].at[0, 0].set(jnp.nan)
    updates, after = tx.update(bad, state, params)
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    assert all(not u.any() for u in jax.tree.leaves(updates))


def test_conforms(model):
    check_optimizer(make(), model())


def test_a_learning_rate_by_group(model, gradients):
    params, tx = (
        model(),
        groups({"a": adamw(0.1, weight_decay=0.0), "b": adamw(0.1, weight_decay=0.0)}, {"head/**": "a", "**": "b"}),
    )
    state, grads = tx.init(params), gradients(params, 0)
    one, _ = tx.update(grads, state, params)
    other, _ = tx.update(grads, state, params, learning_rate={"a": 0.2})
    np.testing.assert_allclose(other["head"]["kernel"], 2 * one["head"]["kernel"], rtol=1e-6)
    np.testing.assert_array_equal(other["norm"]["scale"], one["norm"]["scale"])


def test_a_group_can_be_reset(model, gradients):
    params, tx = model(), guard(make())
    state = tx.init(params)
    _, state = tx.update(gradients(params, 0), state, params)
    after = reset(tx, state, params, "main")
    assert int(after.inner.inner["main"].count) == 0
    jax.tree.map(np.testing.assert_array_equal, after.inner.inner["plain"], state.inner.inner["plain"])
    with pytest.raises(UserError, match=r"no group 'man' with a state.*did you mean 'main'"):
        reset(tx, state, params, "man")


def test_metrics_tell_the_rate_of_each_group(model):
    tx = guard(groups({"main": adamw(0.1), "plain": adamw(0.2), "frozen": None}, RULES))
    found = metrics(tx.init(model()))
    assert (float(found["learning_rate/main"]), float(found["learning_rate/plain"])) == pytest.approx((0.1, 0.2))
    one = guard(muon(0.3, specs=specs(model(), axes={"layers/attn/q/kernel": "sioo"}), adam={"learning_rate": 0.1}))
    assert float(metrics(one.init(model()))["learning_rate"]) == pytest.approx(0.3), "not that of the AdamW inside"


def test_mistakes_are_all_named(model):
    tx = groups(
        {"main": adamw(0.1), "unused": None}, {"layers/**": "main", "layers/norm/**": "mian", "nowhere": "main"}
    )
    with pytest.raises(UserError) as caught:
        tx.init(model())
    for part in (
        "no rule fits 'embed/embedding'",
        "names group 'mian' (did you mean 'main'?)",
        "rule 'layers/norm/**' decides nothing",
        "rule 'nowhere' fits no parameter",
        "group 'unused' has no parameter",
    ):
        assert part in str(caught.value)


def test_lists_and_slashes():
    params = {"a/b": [jnp.ones(2), jnp.ones(3)], "c": jnp.ones(1)}
    tx = groups({"x": adamw(0.1), "y": adamw(0.1)}, {"a%2Fb/0": "x", "**": "y"})
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert {u.shape for u in jax.tree.leaves(updates)} == {(2,), (3,), (1,)}


def test_the_contract_knows_groups():
    assert "groups" in CASES
