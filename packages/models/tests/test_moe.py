import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import Policy, UserError, tree
from styrax.models.layers import dispatch
from styrax.models.layers.moe import Mixture
from styrax.models.layers.router import Buffer, RouterStats, balance_loss, router_z_loss
from styrax.models.moe_config import Clamped, Groups, MoE, Routing, Shared

DIM, TOKENS = 6, 16
DISPATCHES = ["dense", "dropless", "capacity"]

CONFIGS = {
    "plain": {},
    "raw weights": {"routing": Routing(renormalise=False)},
    "scaled": {"routing": Routing(scale=2.5)},
    "router bias": {"routing": Routing(bias=True)},
    "sigmoid": {"routing": Routing(score="sigmoid")},
    "corrected": {"routing": Routing(score="sigmoid", correction=True, scale=2.5)},
    "groups by their best": {"routing": Routing(renormalise=False, groups=Groups(num=4, kept=2))},
    "groups by two": {
        "routing": Routing(score="sigmoid", groups=Groups(num=2, kept=1, score="top2")),
        "shared": Shared(dim=10),
    },
    "scaled input": {"routing": Routing(score="sigmoid", renormalise=False), "input_scaled": True},
    "scaled input with biases": {
        "routing": Routing(score="sigmoid", renormalise=False),
        "input_scaled": True,
        "expert_bias": True,
    },
    "normalised router": {"routing": Routing(norm_eps=1e-3, expert_scale=True), "activation": "gelu_tanh"},
    "clamped": {"routing": Routing(bias=True), "expert_bias": True, "clamped": Clamped(limit=0.7, slope=1.9)},
    "shared gate": {"shared": Shared(dim=10, gated=True), "activation": "gelu"},
    "relu": {"activation": "relu"},
    "relu2": {"activation": "relu2"},
    "one of many": {"experts_per_token": 1, "routing": Routing(renormalise=False)},
    "all of them": {"experts_per_token": 8},
    "everything": {
        "routing": Routing(
            score="sigmoid",
            scale=1.5,
            bias=True,
            correction=True,
            groups=Groups(num=4, kept=2, score="top2"),
            norm_eps=1e-3,
            expert_scale=True,
        ),
        "expert_bias": True,
        "clamped": Clamped(limit=2.0),
        "shared": Shared(dim=4, gated=True),
    },
    "many experts": {"num_experts": 24, "experts_per_token": 5, "expert_dim": 3},
}


def mostly_slow(values, quick):
    """Leave all but a few to the second stage: compiling is what takes the time."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), "float32")


def make(config=None, *, policy="f32", seed=0, **fields):
    """Make a layer with large random parameters, corrections and biases too, so that a wrong term shows."""
    config = config or MoE(**{"num_experts": 8, "experts_per_token": 2, "expert_dim": 5, **fields})
    policy = Policy.parse(policy)
    layer = nnx.eval_shape(
        lambda: Mixture(DIM, config, std=1.0, residual_std=1.0, policy=policy, key=jax.random.key(0))
    )
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.3 * noise if path.endswith("scale") else 0.6 * noise, leaf.dtype)

    return tree.map_with_path(draw, layer)


def arrays(layer):
    return {path: np.asarray(leaf, np.float64) for path, leaf in tree.flatten(layer).items()}


# --- an independent reference: float64, one token and one expert at a time


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.where(x > 0, x, 0),
    "relu2": lambda x: np.where(x > 0, x, 0) ** 2,
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_choice(config, p, x):
    """Give logits, probabilities and a dict of expert -> weight of one token."""
    routing = config.routing
    if routing.norm_eps is not None:
        x = x / np.sqrt((x**2).mean() + routing.norm_eps) * p["router/scale"] / math.sqrt(len(x))
    logits = x @ p["router/kernel"] + p.get("router/bias", 0)
    scores = sigmoid(logits) if routing.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranking = scores + p.get("router/correction", 0)
    if routing.groups:
        members = np.arange(config.num_experts).reshape(routing.groups.num, -1)
        taken = {"max": 1, "top2": 2}[routing.groups.score]
        value = [sum(sorted(ranking[group])[-taken:]) for group in members]
        kept = sorted(range(len(members)), key=lambda g: -value[g])[: routing.groups.kept]
        ranking = np.where(np.isin(np.arange(config.num_experts), members[kept]), ranking, -9.0)
    chosen = sorted(range(config.num_experts), key=lambda e: -ranking[e])[: config.experts_per_token]
    total = sum(scores[e] for e in chosen) if routing.renormalise else 1.0
    scale = p.get("router/expert_scale", np.ones(config.num_experts))
    return logits, scores / scores.sum(), {e: scores[e] / total * routing.scale * scale[e] for e in chosen}


def slow_glu(config, gate, up):
    if config.clamped:
        limit = config.clamped.limit
        gate, up = np.where(gate > limit, limit, gate), np.clip(up, -limit, limit)
        return (up + 1) * gate * sigmoid(config.clamped.slope * gate)
    return ACTIVATIONS[config.activation](gate) * up


def slow_expert(config, p, e, x):
    def product(name, x):
        bias = p[f"experts/{name}/bias"][e] if config.expert_bias else 0
        return x @ p[f"experts/{name}/kernel"][e] + bias

    return product("down", slow_glu(config, product("gate", x), product("up", x)))


def slow(layer, x, mask=None, router_input=None, places=None):
    """Give the result and the statistics; `places` is what each expert has."""
    config, p = layer.config, arrays(layer)
    x = np.asarray(x, np.float64)
    y, left = np.zeros_like(x), np.full(config.num_experts, 10**9 if places is None else places)
    stats = {"tokens": 0, "load": np.zeros(config.num_experts), "probs": 0, "z": 0, "entropy": 0, "dropped": 0}
    for t in range(len(x)):
        if mask is not None and not mask[t]:
            continue
        logits, probs, weights = slow_choice(config, p, x[t] if router_input is None else router_input[t])
        for e, weight in weights.items():
            stats["load"][e] += 1
            if not left[e]:
                stats["dropped"] += 1
                continue
            left[e] -= 1
            y[t] += (
                slow_expert(config, p, e, weight * x[t])
                if config.input_scaled
                else weight * slow_expert(config, p, e, x[t])
            )
        if config.shared:
            gate, up = (x[t] @ p[f"shared/{name}/kernel"] for name in ("gate", "up"))
            share = sigmoid(x[t] @ p["shared_gate/kernel"]) if config.shared.gated else 1.0
            y[t] += share * (slow_glu(config, gate, up) @ p["shared/down/kernel"])
        stats["tokens"] += 1
        stats["probs"] += probs
        stats["z"] += np.log(np.exp(logits).sum()) ** 2
        stats["entropy"] -= (probs * np.log(probs)).sum()
    return y, stats


def check_stats(got, expected):
    for name, value in expected.items():
        assert getattr(got, name).dtype == jnp.float32
        np.testing.assert_allclose(getattr(got, name), value, rtol=3e-5, err_msg=name)


run = jax.jit(lambda layer, x, **given: layer(x, **given))


# Not all ways can tell all configurations apart: beside the weights, they see scaled inputs, biases and counts only.
QUICK = ["everything", "scaled input with biases", "many experts"]
CASES = [
    pytest.param(name, way, marks=[] if way == "dense" or name in QUICK else pytest.mark.slow)
    for name in CONFIGS
    for way in ("dense", "dropless", "capacity", "ragged")
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_against_one_token_at_a_time(name, way, monkeypatch):
    if way == "ragged":  # what accelerators run
        monkeypatch.setattr(dispatch, "on_cpu", lambda *_: False)
    kind = "dropless" if way == "ragged" else way
    layer = make(**CONFIGS[name], dispatch=kind, capacity_factor=100.0)
    x = normal(TOKENS, DIM, seed=1)
    expected, stats = slow(layer, x)
    got, got_stats = jax.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, expected, atol=3e-5 * max(1, np.abs(expected).max()))
    check_stats(got_stats, stats)
    assert tree.flatten(layer).keys() == layer.config.logical_axes().keys()
    for path, axes in layer.config.logical_axes().items():
        assert len(axes) == tree.flatten(layer)[path].ndim, path


@pytest.mark.parametrize("kind", mostly_slow(DISPATCHES, ["dense"]))
def test_the_router_may_read_something_else(kind):
    layer = make(dispatch=kind, capacity_factor=9.0, shared=Shared(dim=4))
    x, seen = normal(TOKENS, DIM, seed=1), normal(TOKENS, DIM, seed=2)
    expected, stats = slow(layer, x, router_input=np.asarray(seen, np.float64))
    got, got_stats = run(layer, x, router_input=seen)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    check_stats(got_stats, stats)


def test_a_large_logit_does_not_hide_the_order():
    """The scores of these two experts are both 1 in float32, but their logits differ."""
    layer = make(num_experts=2, experts_per_token=1, routing=Routing(score="sigmoid"), dispatch="dense")
    layer.router.kernel.set_value(jnp.zeros((DIM, 2)).at[0].set(jnp.array([30.0, 40.0])))
    assert jax.jit(layer.router)(jnp.ones((1, DIM)))[1].load.tolist() == [0, 1]


# --- the three ways agree


def pullback(layer, x, mask, cotangent):
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def objective(params, x):
        y, stats = nnx.merge(graphdef, params, rest)(x, mask=mask)
        return (y * cotangent).sum() + balance_loss(stats) + router_z_loss(stats), stats

    (_, stats), grads = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(params, x)
    return {**tree.flatten(grads[0]), "x": grads[1]}, stats


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, ["everything"]))
def test_gradients_of_all_ways_agree_and_reach_every_parameter(name, monkeypatch):
    x, cotangent = normal(2, TOKENS, DIM, seed=1), normal(2, TOKENS, DIM, seed=2)
    mask = jnp.ones((2, TOKENS), bool).at[1, 9:].set(False)
    layers = {kind: make(**CONFIGS[name], dispatch=kind, capacity_factor=100.0) for kind in DISPATCHES}
    expected, _ = pullback(layers["dense"], x, mask, cotangent)
    found = {kind: pullback(layers[kind], x, mask, cotangent)[0] for kind in ("dropless", "capacity")}
    monkeypatch.setattr(dispatch, "on_cpu", lambda *_: False)
    found["ragged"] = pullback(layers["dropless"], x, mask, cotangent)[0]
    for kind, grads in found.items():
        assert grads.keys() == expected.keys()
        for path, grad in grads.items():
            limit = 2e-5 * np.abs(expected[path]).max()
            np.testing.assert_allclose(grad, expected[path], atol=limit, err_msg=f"{kind} {path}")
    assert all(np.abs(grad).max() > 1e-4 for grad in expected.values())
    assert (expected["x"][1, 9:] == 0).all()
    params = {path for path in layers["dense"].config.logical_axes() if not path.endswith("correction")}
    assert expected.keys() == params | {"x"}


@pytest.mark.parametrize("name", mostly_slow(["plain", "scaled input with biases"], ["scaled input with biases"]))
def test_gradient_against_differences_in_float64(name):
    layer, x = make(**CONFIGS[name], num_experts=4), normal(3, DIM, seed=1)
    cotangent = np.asarray(normal(3, DIM, seed=2), np.float64)
    grads, _ = pullback(layer, x, None, jnp.asarray(cotangent, "float32"))
    step = 1e-5

    def value(shift):
        y, stats = slow(layer, np.asarray(x, np.float64) + shift)
        share = stats["load"] / stats["load"].sum()
        return (y * cotangent).sum() + 4 * (share * stats["probs"]).sum() / 3 + stats["z"] / 3

    for at in [(0, 0), (1, 3), (2, 5)]:
        shift = np.zeros((3, DIM))
        shift[at] = step
        assert grads["x"][at] == pytest.approx((value(shift) - value(-shift)) / (2 * step), rel=1e-3, abs=1e-3)


# --- padding


@pytest.mark.parametrize("kind", mostly_slow(DISPATCHES, ["dropless", "capacity"]))
@pytest.mark.parametrize("name", mostly_slow(["plain", "everything", "scaled input with biases"], ["plain"]))
def test_padding_changes_nothing_and_gives_zero(name, kind):
    layer = make(**CONFIGS[name], dispatch=kind, capacity_factor=100.0)
    mask = np.random.default_rng(3).random(TOKENS) < 0.6
    real = normal(int(mask.sum()), DIM, seed=1)
    x = jnp.full((TOKENS, DIM), jnp.nan).at[np.flatnonzero(mask)].set(real)
    alone, alone_stats = run(layer, real)
    got, stats = run(layer, x, mask=jnp.asarray(mask))
    np.testing.assert_allclose(got[mask], alone, atol=2e-5)
    assert (got[~mask] == 0).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), stats, alone_stats)
    assert all(np.isfinite(g).all() for g in pullback(layer, x, jnp.asarray(mask), jnp.ones_like(x))[0].values())


@pytest.mark.parametrize("kind", DISPATCHES)
def test_a_batch_of_padding_alone(kind):
    layer = make(dispatch=kind)
    got, stats = run(layer, normal(2, 3, DIM), mask=jnp.zeros((2, 3), bool))
    assert (got == 0).all()
    assert all((leaf == 0).all() for leaf in stats)
    assert balance_loss(stats) == router_z_loss(stats) == 0


# --- capacity


@pytest.mark.parametrize("factor", mostly_slow([0.1, 0.5, 1.0, 1.7], [0.5]))
@pytest.mark.parametrize("masked", [False, True])
def test_capacity_drops_the_later_tokens_and_counts_them(factor, masked):
    layer = make(num_experts=4, dispatch="capacity", capacity_factor=factor, shared=Shared(dim=3), expert_bias=True)
    x = normal(24, DIM, seed=1)
    mask = np.random.default_rng(3).random(24) < 0.7 if masked else None
    places = max(1, int(factor * 24 * 2 / 4))
    expected, stats = slow(layer, x, mask=mask, places=places)
    got, got_stats = run(layer, x, mask=None if mask is None else jnp.asarray(mask))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    check_stats(got_stats, stats)
    assert stats["dropped"] or factor > 1


@pytest.mark.parametrize("way", ["dense", "dropless", "capacity", "ragged"])
def test_all_tokens_on_one_expert(way, monkeypatch):
    """With equal logits the experts of the lowest numbers are chosen, by every token."""
    if way == "ragged":
        monkeypatch.setattr(dispatch, "on_cpu", lambda *_: False)
    layer = make(dispatch="dropless" if way == "ragged" else way, capacity_factor=0.5)
    layer.router.kernel.set_value(jnp.zeros((DIM, 8)))
    x = normal(200, DIM, seed=1)
    places = {"capacity": int(0.5 * 200 * 2 / 8)}.get(way)
    expected, stats = slow(layer, x, places=places)
    assert stats["load"].tolist() == [200, 200, 0, 0, 0, 0, 0, 0]
    got, got_stats = jax.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    check_stats(got_stats, stats)


# --- statistics and losses


@pytest.mark.parametrize(("name", "k"), [("softmax", 2), ("sigmoid", 5)])
def test_every_choice_is_counted_once(name, k):
    router = make(num_experts=6, experts_per_token=k, routing=Routing(score=name)).router
    route = jax.jit(lambda x, mask: router(x, mask))

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 99), scale=st.floats(0, 30), real=st.integers(0, TOKENS))
    def law(seed, scale, real):
        choice, stats = route(normal(TOKENS, DIM, seed=seed, scale=scale), np.arange(TOKENS) < real)
        assert stats.load.sum() == real * k
        assert stats.tokens == real
        assert stats.probs.sum() == pytest.approx(real, rel=1e-5)
        assert -1e-4 <= stats.entropy <= real * math.log(6) + 1e-4
        assert all(len(set(row)) == k for row in np.asarray(choice.experts)[:real])
        assert (choice.experts[real:] == 6).all() and (choice.weights[real:] == 0).all()
        np.testing.assert_allclose(choice.weights[:real].sum(1), 1, rtol=1e-5)

    law()


def test_balance_loss_has_its_least_value_at_an_even_load():
    zero, even = jnp.zeros(()), jnp.full(4, 10.0)
    assert balance_loss(RouterStats(jnp.float32(40.0), even, even, zero, zero, zero)) == 1
    assert balance_loss(RouterStats(jnp.float32(40.0), 3 * even, even, zero, zero, zero)) == 1  # three per token
    hot = jnp.array([40.0, 0, 0, 0])
    assert balance_loss(RouterStats(jnp.float32(40.0), hot, hot, zero, zero, zero)) == 4


def test_losses_of_layers_are_their_mean():
    router = make(experts_per_token=3).router
    first, second = (jax.jit(router)(normal(TOKENS, DIM, seed=seed))[1] for seed in (1, 2))
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, second)
    for loss in (balance_loss, router_z_loss):
        assert loss(both) == pytest.approx(float(loss(first) + loss(second)) / 2, rel=1e-6)


def test_micro_batches_add_up_to_the_gradient_of_the_whole():
    x = normal(3 * TOKENS, DIM, seed=1)
    graphdef, params = nnx.split(make().router)

    def loss(params, x, load):
        stats = nnx.merge(graphdef, params)(x)[1]
        return (balance_loss(stats, load) + router_z_loss(stats)) * stats.tokens / (3 * TOKENS), stats

    grad = jax.jit(jax.grad(loss, has_aux=True))
    whole, stats = grad(params, x, None)
    pieces = x.reshape(3, TOKENS, DIM)
    alone = [grad(params, piece, None) for piece in pieces]
    load = sum(stats.load for _, stats in alone)
    assert (load == stats.load).all()
    together = sum(grad(params, piece, load)[0].kernel[...] for piece in pieces)
    np.testing.assert_allclose(together, whole.kernel[...], atol=1e-6)
    # Which is why the load is passed:
    assert np.abs(sum(grads.kernel[...] for grads, _ in alone) - whole.kernel[...]).max() > 1e-4


# --- as part of a model


@pytest.mark.parametrize("kind", mostly_slow(DISPATCHES, ["dropless"]))
@pytest.mark.parametrize("remat", mostly_slow([False, True], [True]))
def test_a_stack_in_a_scan(kind, remat):
    config = MoE(num_experts=4, expert_dim=5, dispatch=kind, routing=Routing(correction=True, score="sigmoid"))

    def new(key):
        return Mixture(DIM, config, std=0.5, residual_std=0.5, policy=Policy(), key=key)

    layers, x = jax.vmap(new)(jax.random.split(jax.random.key(1), 3)), normal(2, 4, DIM)

    def step(carry, layer):
        out, new = layer(carry)
        return carry + out, new

    def total(layers, x):
        y, stats = jax.lax.scan(jax.checkpoint(step) if remat else step, x, layers)
        return (y**2).sum() + balance_loss(stats), (y, stats)

    (_, (y, stats)), back = jax.jit(jax.value_and_grad(total, argnums=1, has_aux=True))(layers, x)
    single = jax.jit(step)
    for number in range(3):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], layers)
        x, found = single(x, layer)
        jax.tree.map(lambda a, b, n=number: np.testing.assert_allclose(a[n], b, rtol=1e-5), stats, found)
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)
    assert np.isfinite(back).all() and np.abs(back).max() > 1e-3
    assert stats.load.shape == (3, 4) and (stats.load.sum(1) == 8 * 2).all()


@pytest.mark.parametrize("kind", mostly_slow(DISPATCHES, ["dropless"]))
def test_bfloat16_routes_in_float32(kind):
    layer = make(dispatch=kind, policy="bf16", capacity_factor=9.0, shared=Shared(dim=4, gated=True))
    exact = make(dispatch=kind, capacity_factor=9.0, shared=Shared(dim=4, gated=True))
    x = normal(TOKENS, DIM, seed=1).astype("bfloat16")
    got, stats = run(layer, x)
    expected, expected_stats = run(exact, x.astype("float32"))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got, expected, atol=0.03 * np.abs(expected).max())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), stats, expected_stats)


def test_rank_does_not_matter():
    layer, x = make(dispatch="dense"), normal(3, 4, DIM)
    flat, _ = run(layer, x.reshape(12, DIM))
    np.testing.assert_allclose(run(layer, x)[0].reshape(12, DIM), flat, atol=1e-6)


def test_the_correction_is_saved_but_not_trained():
    layer = make(routing=Routing(score="sigmoid", correction=True))
    _, params, rest = nnx.split(layer, nnx.Param, ...)
    assert "router/correction" not in tree.flatten(params)
    assert tree.flatten(rest).keys() == {"router/correction"}
    assert isinstance(layer.router.correction, Buffer)
    assert layer.router.correction[...].dtype == jnp.float32


# --- errors


def test_wrong_shapes_are_listed_together():
    layer = make()
    with pytest.raises(UserError) as caught:
        layer(normal(2, 3, DIM), mask=jnp.ones(5, bool), router_input=normal(3, DIM))
    assert "mask: expected 6 bool values" in str(caught.value)
    assert "router_input: expected the shape of x, [2, 3, 6], got [3, 6]" in str(caught.value)
    with pytest.raises(UserError, match=r"x: expected \[tokens, dim\]"):
        layer(normal(DIM))
    with pytest.raises(UserError, match="mask: expected 3 bool values"):
        layer(normal(3, DIM), mask=jnp.ones(3, int))
