"""Every recipe is its algorithm with the arguments it says, in a guard, and what is around it in the right order."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from styrax import optim
from styrax.core import UserError, registry
from styrax.core.tree import flatten
from styrax.optim import (
    AdamW,
    Average,
    CompleteP,
    Cosine,
    Extras,
    Group,
    Lion,
    Muon,
    Parameters,
    Recipe,
    ScheduleFree,
    Spikes,
    ZClip,
    eval_params,
    full_params,
)

KINDS = registry.names("styrax.optim")
RATES = {"lion": 1e-4, "prodigy": 1.0, "adafactor": 1e-2, "kron": 3e-4}


def by_hand(kind, specs, **common):
    """The transformation of each recipe's defaults, called as its own documentation says."""
    return {
        "adamw": lambda: optim.adamw(6e-4, b2=0.95, **common),
        "lion": lambda: optim.lion(1e-4, **common),
        "ademamix": lambda: optim.ademamix(6e-4, warmup=20, **common),
        "schedule_free": lambda: optim.schedule_free(6e-4, **common),
        "mars": lambda: optim.mars(6e-4, specs=specs, **common),
        "prodigy": lambda: optim.prodigy(1.0, **common),
        "adafactor": lambda: optim.adafactor(1e-2, specs=specs, **common),
        "adam_mini": lambda: optim.adam_mini(6e-4, specs=specs, **common),
        "eight_bit_adamw": lambda: optim.eight_bit_adamw(6e-4, specs=specs, **common),
        "muon": lambda: optim.muon(6e-4, specs=specs, scale="rms", **common),
        "normuon": lambda: optim.muon(6e-4, specs=specs, scale="rms", normalize=True, **common),
        "soap": lambda: optim.soap(6e-4, specs=specs, **common),
        "shampoo": lambda: optim.shampoo(6e-4, specs=specs, **common),
        "kron": lambda: optim.kron(3e-4, specs=specs, **common),
    }[kind]()


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"embed": {"embedding": (6, 4)}, "layers": {"up": {"kernel": (2, 4, 4)}, "norm": {"scale": (2, 4)}}}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def program(tx, params):
    text = str(jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params))
    return re.sub(r"0x[0-9a-f]+", "", text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_is_its_algorithm(kind, params):
    recipe = registry.resolve("styrax.optim", kind)()
    decay = {path: 0.1 if path.endswith("kernel") else 0.0 for path in flatten(params)}
    if kind in ("prodigy", "adafactor"):
        decay = dict.fromkeys(decay, 0.0)
    schedule = recipe.schedule.build(steps=20)
    lr = dict.fromkeys(decay, 1.0)
    hand = by_hand(kind, optim.specs(params), schedule=schedule, weight_decay=decay, lr_multipliers=lr)
    assert program(recipe.build(params, steps=20), params) == program(optim.guard(hand, clip_norm=1.0), params)
    assert recipe.learning_rate == RATES.get(kind, 6e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind):
    cls = registry.resolve("styrax.optim", kind)
    assert len(dataclasses.fields(cls)) <= 15
    recipe = cls(
        learning_rate=0.25,
        groups={"a": Group(paths=("a/**",), frozen=True), "b": Group(paths=("b",), optimizer={"kind": "lion"})},
        extras=Extras(zclip=ZClip(z=3.0), spikes=Spikes(), precision="split", agc=0.1),
    )
    tree = json.loads(json.dumps(recipe.to_dict()))
    assert Recipe.from_dict(tree) == recipe
    assert Recipe.from_dict({"kind": kind}) == cls()
    assert recipe.derives_weights == (kind == "schedule_free")


def test_what_is_wrong_with_a_dictionary():
    for tree, message in (
        ({"learning_rate": 1.0}, "recipe: no kind; expected one of adafactor, "),
        ({"kind": "adamv"}, "no optimizer named 'adamv' .did you mean 'adam"),
        ({"kind": "adamw", "version": 2}, "recipe: expected version 1, got 2; a newer styrax-optim wrote it"),
        ({"kind": "adamw", "b3": 0.1, "b1": "x"}, r"(?s)b3: unknown key.*b1: expected number"),
        ({"kind": "muon", "adam": {"b1": 1.0}}, "adam: b1 must be below 1"),
        ({"kind": "muon", "extras": {"transfer": {"kind": "mup", "width": 8, "base_width": 4}}}, "Muon needs none"),
        ({"kind": "schedule_free", "extras": {"cautious": True, "average": {}}}, r"(?s)cautious: .*average: "),
    ):
        with pytest.raises(UserError, match=message):
            Recipe.from_dict(tree)


def test_what_is_wrong_with_groups(params):
    for groups, message in (
        ({"rest": Group(paths=("**",))}, "groups.rest: is what the other groups leave"),
        (
            {"a": Group(paths=("**",), optimizer={"clip_norm": 1.0})},
            "groups.a.optimizer.clip_norm: is a setting of the",
        ),
        ({"a": Group(paths=("**",), optimizer={"bb": 1.0})}, "groups.a.optimizer.bb: unknown key"),
        ({"a": Group(paths=("**",), optimizer={"kind": "lionn"})}, "groups.a.optimizer.kind: no optimizer named"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW(groups=groups)
    with pytest.raises(
        ValueError, match=r"(?s)paths: expected one pattern.*frozen: nothing is updated, so learning_rate"
    ):
        Group(frozen=True, learning_rate=1.0)
    with pytest.raises(ValueError, match=r"optimizer.learning_rate: write it beside"):
        Group(paths=("a",), optimizer={"learning_rate": 1.0})
    with pytest.raises(UserError, match=r"(?s)rule 'embedd/\*\*' fits no parameter.*group 'a' has no parameter"):
        AdamW(groups={"a": Group(paths=("embedd/**",))}).build(params, steps=1)


def test_groups_that_do_not_fit_the_whole():
    def lion(rate=None):
        return Group(paths=("embed/**",), optimizer={"kind": "lion"}, learning_rate=rate)

    for wrong, message in (
        (
            lambda: AdamW(groups={"a": Group(paths=("embed/**", "b"), frozen=True), "b": lion()}),
            "'embed/..' is a pattern",
        ),
        (lambda: AdamW(learning_rate=0.0, groups={"a": lion(0.5)}), "groups.a.learning_rate: is kept in proportion"),
        (
            lambda: with_group("kron", Extras(transfer=optim.MuP(width=8, base_width=4))),
            "groups.a.optimizer: extras.transf",
        ),
        (lambda: with_group("schedule_free", Extras(average=Average())), "groups.a.optimizer: extras.average"),
    ):
        with pytest.raises(UserError, match=message):
            wrong()
    assert with_group("schedule_free", Extras()).derives_weights
    assert not with_group("lion", Extras()).derives_weights


def with_group(kind, extras):
    return AdamW(groups={"a": Group(paths=("embed/**",), optimizer={"kind": kind})}, extras=extras)


def test_what_python_gives_in_place_of_a_config():
    for given, message in (
        ({"parameters": {"roles": {}}}, r"parameters: expected Parameters\(...\), got {roles = {}}"),
        ({"groups": {"a": {"paths": ["b"]}}}, r"groups.a: expected Group\(...\), got"),
        ({"extras": {}}, r"extras: expected Extras\(...\), got {}"),
        ({"schedule": {"kind": "wsd"}}, r"schedule: expected Cosine\(...\) or WSD\(...\)"),
    ):
        with pytest.raises(UserError, match=message):
            AdamW(**given)
    with pytest.raises(UserError, match=r"lr_multipliers: key matrx: expected .*did you mean 'matrix'"):
        Parameters(lr_multipliers={"matrx": 0.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="final must be a number, got 'x'"):
        Cosine(final="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="recipe: expected a table such as to_dict gives, got None"):
        Recipe.from_dict(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="have no arrays"):
        AdamW().build({}, steps=3)
    with pytest.raises(ValueError, match="steps=True"):
        AdamW().build({"w": jnp.ones(1)}, steps=True)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_without_elements(kind):
    params = {"empty": {"kernel": jnp.ones((0, 4))}, "none": jnp.ones((3, 0)), "some": jnp.ones((3, 4))}
    tx = registry.resolve("styrax.optim", kind)().build(params, steps=3)
    state = tx.init(params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(lambda x: x.shape, updates) == jax.tree.map(lambda x: x.shape, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))
    bare = {"empty": jnp.ones((0, 4))}
    assert "n/a of the parameters' 0" in str(optim.memory_table(AdamW().build(bare, steps=1), bare))


def test_rates_by_group_are_of_groups(params, gradients):
    tx = with_group("lion", Extras()).build(params, steps=3)
    with pytest.raises(UserError, match=r"learning_rate: no group 'aa' .did you mean 'a'"):
        tx.update(params, tx.init(params), params, learning_rate={"aa": 0.1})
    alone = AdamW().build(params, steps=3)
    with pytest.raises(UserError, match=r"learning_rate: expected a number, got a table"):
        alone.update(params, alone.init(params), params, learning_rate={"a": 0.1})


def test_each_group_has_its_own(params, gradients):
    """Against the two algorithms alone, and a frozen group without a state."""
    recipe = AdamW(
        learning_rate=0.1,
        clip_norm=None,
        weight_decay=0.5,
        groups={
            "norms": Group(
                paths=("**/scale",), learning_rate=0.01, schedule=Cosine(warmup=0), optimizer={"kind": "lion"}
            ),
            "old": Group(paths=("embed/**",), frozen=True),
        },
        schedule=Cosine(warmup=4),
    )
    tx = recipe.build(params, steps=10)
    state = tx.init(params)
    grads = gradients(params, 0)
    updates, state = tx.update(grads, state, params)
    assert set(state.inner.inner) == {"norms", "rest"}
    assert not any("embed" in path for path in flatten(state))
    assert not updates["embed"]["embedding"].any()
    decays = {"layers/up/kernel": 0.5}
    for alone, path, kept in (
        (optim.lion(0.01, schedule=Cosine(warmup=0).build(steps=10), weight_decay=0.0), ("norm", "scale"), {}),
        (optim.adamw(0.1, schedule=Cosine(warmup=4).build(steps=10), weight_decay=decays), ("up", "kernel"), decays),
    ):
        part = {"layers": {path[0]: {path[1]: params["layers"][path[0]][path[1]]}}}
        gradient = {"layers": {path[0]: {path[1]: grads["layers"][path[0]][path[1]]}}}
        expected, _ = alone.update(gradient, alone.init(part), part)
        np.testing.assert_array_equal(
            updates["layers"][path[0]][path[1]], expected["layers"][path[0]][path[1]], err_msg=str(kept)
        )
    # A peak for the whole keeps the proportions.
    _, moved = tx.update(grads, state, params, learning_rate=jnp.float32(1.0))
    rates = {name: float(each.learning_rate) for name, each in moved.inner.inner.items()}
    assert rates["norms"] == pytest.approx(0.1 * float(Cosine(warmup=0).build(steps=10)(1)), rel=1e-6)
    assert rates["rest"] == pytest.approx(0.5, rel=1e-6)
    shown = {row.path: (row.group, row.lr) for row in recipe.describe(params)}
    assert shown == {
        "embed/embedding": ("old", 0.0),
        "layers/up/kernel": ("rest", 1.0),
        "layers/norm/scale": ("norms", pytest.approx(0.1)),
    }


def test_what_is_around(params, gradients):
    """Guard outside, then precision, average, clipping by unit, and the algorithm; each as if called by hand."""
    extras = Extras(
        zclip=ZClip(), spikes=Spikes(window=8), agc=0.05, average=Average(decay=0.5, start=0.2), precision="master"
    )
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    axes = optim.specs(low)
    tx = AdamW(learning_rate=0.1, weight_decay=0.0, extras=extras).build(low, steps=10)
    inner = optim.adamw(
        0.1,
        schedule=Cosine().build(steps=10),
        weight_decay=dict.fromkeys(axes, 0.0),
        lr_multipliers=dict.fromkeys(axes, 1.0),
    )
    inner = optim.averaged(optim.agc(inner, 0.05, specs=axes), decay=0.5, start=2)
    hand = optim.guard(optim.precision(inner, "master"), clip_norm=1.0, zclip=ZClip(), spikes=Spikes(window=8))
    assert program(tx, low) == program(hand, low)
    state, weights = tx.init(low), low
    for seed in range(4):
        updates, state = tx.update(gradients(low, seed), state, weights)
        weights = optax.apply_updates(weights, updates)
    assert set(AdamW().metrics(state)) >= {"norm_mean", "spikes", "learning_rate"}
    found = eval_params(state, weights)
    assert flatten(found)["layers/up/kernel"].dtype == jnp.bfloat16
    # The average is one of float32 weights, not of rounded ones.
    average = flatten(state.inner.inner.average)["layers/up/kernel"]
    assert np.any(np.asarray(average) != np.asarray(average.astype(jnp.bfloat16), np.float32))
    assert flatten(full_params(state, weights))["layers/up/kernel"].dtype == jnp.float32


def test_a_frozen_group_has_no_average_and_a_group_is_reset_below_everything(params, gradients):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    recipe = AdamW(
        groups={"old": Group(paths=("embed/**",), frozen=True), "norms": Group(paths=("**/scale",))},
        extras=Extras(average=Average(), precision="stochastic"),
    )
    tx = recipe.build(low, steps=4)
    updates, state = tx.update(gradients(low, 0), tx.init(low), low)
    average = state.inner.inner.average
    assert set(flatten(average)) == {"layers/up/kernel", "layers/norm/scale"}
    weights = optax.apply_updates(low, updates)
    derived = recipe.eval_params(state, weights)
    np.testing.assert_array_equal(derived["embed"]["embedding"], weights["embed"]["embedding"])
    after = optim.reset(tx, state, low, "norms")
    counts = {name: int(each.count) for name, each in after.inner.inner.inner.inner.items()}
    assert counts == {"norms": 0, "rest": 1}
    assert int(after.inner.seen) == 1
    with pytest.raises(UserError, match=r"no group 'norm' with a state .did you mean 'norms'"):
        optim.reset(tx, state, low, "norm")
    with pytest.raises(UserError, match=r"expected a state with groups\(...\) in it once, found it 0 times"):
        optim.reset(optim.adamw(0.1), optim.adamw(0.1).init(low), low, "norms")


def test_caution_takes_the_decay_along(params):
    axes = optim.specs(params)
    decay = {path: 0.1 if path.endswith("kernel") else 0.0 for path in axes}
    one = dict.fromkeys(axes, 1.0)
    inner = optim.adamw(
        6e-4, schedule=Cosine().build(steps=10), weight_decay=dict.fromkeys(axes, 0.0), lr_multipliers=one
    )
    hand = optim.cautious(inner, mask=True, weight_decay=decay, cautious_decay=True, lr_multipliers=one, specs=axes)
    tx = AdamW(extras=Extras(cautious=True, cautious_decay=True)).build(params, steps=10)
    assert program(tx, params) == program(optim.guard(hand), params)


def test_transfer_is_in_the_table_and_in_the_update(params):
    transfer = CompleteP(width=8, base_width=4, depth=8, base_depth=2)
    recipe = AdamW(weight_decay=0.1, extras=Extras(transfer=transfer))
    rows = {row.path: (row.lr, row.decay) for row in recipe.describe(params)}
    assert rows == {"embed/embedding": (1, 0), "layers/up/kernel": (0.5, 0.2), "layers/norm/scale": (1, 0)}
    hand = optim.adamw(
        6e-4,
        schedule=Cosine().build(steps=10),
        eps={"embed/embedding": 1e-8 / 2, "layers/up/kernel": 1e-8 / 8, "layers/norm/scale": 1e-8 / 8},
        weight_decay={path: decay for path, (_, decay) in rows.items()},
        lr_multipliers={path: lr for path, (lr, _) in rows.items()},
    )
    assert program(recipe.build(params, steps=10), params) == program(optim.guard(hand), params)


def test_every_epsilon_follows_the_transfer(params):
    """The relatives of Adam by path, those for matrices with the one that all matrices share."""
    transfer = Extras(transfer=CompleteP(width=8, base_width=4, depth=8, base_depth=2))
    for kind in ("ademamix", "mars", "schedule_free", "adam_mini", "eight_bit_adamw", "soap", "shampoo", "lion"):
        recipe = registry.resolve("styrax.optim", kind)(extras=transfer)
        text, plain = (
            program(r.build(params, steps=10), params) for r in (recipe, dataclasses.replace(recipe, extras=Extras()))
        )
        found = {float(x) for x in re.findall(r"([0-9.]+e-[01][0-9]):f32", text)}
        assert any(x == pytest.approx(1e-8 / 8, rel=1e-5) for x in found) == (kind != "lion"), kind
        assert text != plain
    several = {**params, "out": {"kernel": jnp.ones((4, 4))}}
    with pytest.raises(UserError, match=r"soap: extras.transfer multiplies epsilon by \[0.125, 0.5\]"):
        optim.Soap(extras=transfer).build(several, steps=10)


def test_names_of_axes_reach_the_algorithm():
    params = {"layers": {"q": {"kernel": jnp.ones((2, 8, 4, 2))}}, "embed": jnp.ones((3, 8))}
    with pytest.raises(UserError, match=r"layers/q/kernel.*axes = "):
        Muon().build(params, steps=1).init(params)
    tx = Muon(parameters=Parameters(axes={"layers/*/kernel": "sioo"}, heads={"layers/q/kernel": 4})).build(
        params, steps=1
    )
    assert flatten(tx.init(params).inner.mu)["layers/q/kernel"].shape == (2, 8, 4, 2)


def test_a_schedule_free_recipe_gives_other_weights(params, gradients):
    recipe = ScheduleFree(learning_rate=0.1)
    tx = recipe.build(params, steps=10)
    updates, state = tx.update(gradients(params, 0), tx.init(params), params)
    updates, state = tx.update(gradients(params, 1), state, params)
    weights = optax.apply_updates(params, updates)
    assert np.any(recipe.eval_params(state, weights)["embed"]["embedding"] != weights["embed"]["embedding"])
    assert Lion().eval_params(state.inner.z, params) is params
