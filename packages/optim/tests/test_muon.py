import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from styrax.core import UserError
from styrax.core.testing import check_optimizer
from styrax.core.tree import flatten
from styrax.optim import adamw, guard
from styrax.optim.muon import MomentumWarmup, muon
from styrax.optim.orthogonalize import ITERATIONS
from styrax.optim.specs import ParamSpec, specs

AXES = {"layers/attn/q/kernel": "sioo", "conv/kernel": "iiio"}
HEADS = {"layers/attn/q/kernel": 2}


def tree(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.1, dtype)

    return {
        "conv": {"kernel": array(3, 3, 2, 5)},
        "head": {"kernel": array(4, 6)},
        "layers": {"attn": {"q": {"kernel": array(2, 4, 2, 3)}}, "mlp": {"kernel": array(2, 3, 8)}},
        "out": {"kernel": array(8, 3), "bias": array(3)},
    }


def numpy_orthogonalize(x, iteration):
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (iteration.margin * np.sqrt((s**2).sum()) + 1e-7)
    for a, b, c in iteration.coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def twin(w, grads, blocks, back, *, rate, scale, iteration, nesterov=True, normalize=False, decay=0.1):
    """The docstring in float64; `blocks` cuts an array into matrices (in, out) and `back` puts them together."""
    w, mu = np.asarray(w, np.float64), np.zeros(w.shape)
    nu = [np.zeros(b.shape[1]) for b in blocks(w)]
    for g in grads:
        g = np.asarray(g, np.float64)
        mu = 0.95 * mu + 0.05 * g
        u = 0.95 * mu + 0.05 * g if nesterov else mu
        out = []
        for number, block in enumerate(blocks(u)):
            m, n = block.shape
            o = numpy_orthogonalize(block, ITERATIONS[iteration])
            if normalize:
                nu[number] = 0.95 * nu[number] + 0.05 * (o**2).mean(axis=0)
                p = o / (np.sqrt(nu[number]) + 1e-8)
                o = p * np.linalg.norm(o) / np.linalg.norm(p)
            s = {"original": math.sqrt(max(1, n / m)), "spectral": math.sqrt(n / m), "rms": 0.2 * math.sqrt(max(m, n))}
            out.append(s[scale] * o)
        w = w - rate * (back(out) + decay * w)
    return w


CUTS = {
    "conv/kernel": (lambda x: [x.reshape(18, 5)], lambda b: b[0].reshape(3, 3, 2, 5)),
    "layers/attn/q/kernel": (
        lambda x: [x[i, :, h] for i in range(2) for h in range(2)],
        lambda b: np.stack([np.stack(b[2 * i : 2 * i + 2], axis=1) for i in range(2)]),
    ),
    "layers/mlp/kernel": (list, np.stack),
    "out/kernel": (lambda x: [x], lambda b: b[0]),
}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"scale": "original", "iteration": "standard"},
        {"scale": "spectral", "iteration": "polar_express", "nesterov": False},
        {"scale": "rms", "iteration": "dion", "normalize": True},
    ],
    ids=lambda kwargs: kwargs["scale"],
)
def test_same_trajectory_as_float64(kwargs):
    """Heads, convolutions, stacks, tall and wide; what is no matrix goes the way of AdamW."""
    params = tree()
    tx = muon(0.02, specs=specs(params, axes=AXES, heads=HEADS), adam={"learning_rate": 0.003, "b2": 0.9}, **kwargs)
    plain = adamw(0.003, eps=1e-10, b2=0.9)
    rng = np.random.default_rng(3)
    grads = [jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params) for _ in range(4)]

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    got, state, other, other_state = params, tx.init(params), params, plain.init(params)
    for g in grads:
        got, state = step(got, state, g)
        updates, other_state = plain.update(g, other_state, other)
        other = optax.apply_updates(other, updates)
    got, start, other = flatten(got), flatten(params), flatten(other)
    for path, (blocks, back) in CUTS.items():
        expected = twin(start[path], [flatten(g)[path] for g in grads], blocks, back, rate=0.02, **kwargs)
        np.testing.assert_allclose(got[path], expected, atol=2e-5, err_msg=path)
    for path in ("head/kernel", "out/bias"):
        np.testing.assert_allclose(got[path], other[path], rtol=1e-6, atol=1e-7, err_msg=path)
    assert set(flatten(state.mu)) == set(CUTS) and set(flatten(state.adam.mu)) == {"head/kernel", "out/bias"}
    if kwargs.get("normalize"):
        shapes = {path: x.shape for path, x in flatten(state.nu).items()}
        assert shapes["layers/attn/q/kernel"] == (2, 1, 2, 3) and shapes["conv/kernel"] == (1, 1, 1, 5)


def test_as_torch():
    """PyTorch orthogonalizes in bfloat16 whatever it is given, which moves the weights by one or two per cent."""
    golden = np.load(Path(__file__).parent / "golden" / "muon.npz")
    for name, shape in (("wide", "rms"), ("tall", "original")):
        w = jnp.asarray(golden[f"{name}_0"])
        tx = muon(0.02, specs={"w": ParamSpec("matrix", "io")}, scale=shape, weight_decay=0.1)
        state = tx.init({"w": w})
        step = jax.jit(tx.update)
        for g in golden[f"{name}_grads"]:
            updates, state = step({"w": jnp.asarray(g)}, state, {"w": w})
            w = w + updates["w"]
        moved = golden[f"{name}_1"] - golden[f"{name}_0"]
        assert np.linalg.norm(w - golden[f"{name}_1"]) / np.linalg.norm(moved) < 0.03, name


def lowered(params, found):
    tx = muon(0.02, specs=found)
    return jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()


def test_equal_shapes_are_one_batch():
    rng = np.random.default_rng(0)
    stacked = {"layers": {"w": jnp.asarray(rng.normal(size=(6, 4, 8)), jnp.float32)}}
    apart = {f"w{i}": x.T if i % 2 else x for i, x in enumerate(stacked["layers"]["w"])}
    one, many = specs(stacked), specs(apart)
    assert lowered(apart, many).count("dot_general") == lowered(stacked, one).count("dot_general") == 15
    for params, found in ((stacked, one), (apart, many)):
        tx = muon(0.02, specs=found, scale="rms", weight_decay=0.0)
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        flat = [x.T if i % 2 and len(params) > 1 else x for i, x in enumerate(flatten(updates).values())]
        result = jnp.stack(flat) if len(flat) > 1 else flat[0]
        if params is stacked:
            expected = result
    # Bit for bit on jax 0.10; later XLA sums a transposed batch in another order.
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-8)


def test_separate_layers_are_as_short_a_program_as_stacked_ones():
    """Twelve layers with four kernels each, and each of them updated as without the others."""
    kernels = {"q": (4, 4), "k": (4, 4), "up": (4, 8), "down": (8, 4)}
    rng = np.random.default_rng(0)
    stacked = {"layers": {name: jnp.asarray(rng.normal(size=(12, *s)), jnp.float32) for name, s in kernels.items()}}
    apart = {"layers": [{name: x[i] for name, x in stacked["layers"].items()} for i in range(12)]}
    lines = [lowered(params, specs(params)).count("\n") for params in (apart, stacked)]
    assert lines[0] <= 2 * lines[1], lines
    # What differs in the decay is not laid together, and comes out as it should.
    apart = {"layers": [{name: layer[name] for name in ("up", "down")} for layer in apart["layers"][:3]]}
    decay = {path: 0.1 * (path == "layers/1/up") for path in flatten(apart)}
    tx = muon(0.02, specs=specs(apart), weight_decay=decay, normalize=True)
    updates, state = jax.jit(tx.update)(apart, tx.init(apart), apart)
    updates, state = flatten(updates), flatten(state)
    for path in ("layers/1/up", "layers/2/up"):
        one = {"w": flatten(apart)[path]}
        alone = muon(0.02, specs={"w": ParamSpec("matrix", "io")}, weight_decay=decay[path], normalize=True)
        expected, end = jax.jit(alone.update)(one, alone.init(one), one)
        np.testing.assert_allclose(updates[path], expected["w"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state[f"mu/{path}"], end.mu["w"], rtol=1e-6)
        np.testing.assert_allclose(state[f"nu/{path}"], end.nu["w"], rtol=1e-3)


def test_momentum_that_warms_up():
    """Each update is that of a constant momentum, as high as the line is there."""
    w, found = {"w": jnp.eye(3)}, {"w": ParamSpec("matrix", "io")}
    rng = np.random.default_rng(0)
    tx = muon(0.02, specs=found, momentum=MomentumWarmup(start=0.5, end=0.9, steps=2))
    state = tx.init(w)
    for momentum in (0.5, 0.7, 0.9, 0.9):
        g = {"w": jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)}
        expected, after = muon(0.02, specs=found, momentum=momentum).update(g, state, w)
        updates, state = tx.update(g, state, w)
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(state.mu["w"], after.mu["w"], rtol=1e-6, atol=1e-7)
    with pytest.raises(UserError, match=r"(?s)MomentumWarmup:.*start.*steps.*end must be below 1"):
        MomentumWarmup(start=-1, end=1, steps=0)


def test_nothing_is_decided_by_rank():
    params = tree()
    with pytest.raises(UserError, match=r"(?s)muon must know which axes.*'conv/kernel'.*'layers/attn/q/kernel'"):
        muon(0.02, specs=specs(params)).init(params)
    with pytest.raises(UserError, match=r"specs has nothing for:\n  'out/bias'"):
        muon(0.02, specs={p: s for p, s in specs(params).items() if p != "out/bias"}).init(params)
    with pytest.raises(UserError, match="matrices need inputs"):
        muon(0.02, specs={"w": ParamSpec("matrix", "oo")}).init({"w": jnp.ones((2, 2))})
    with pytest.raises(UserError) as caught:
        muon(0.1, specs={}, scale="rmss", orthogonalize_sharding="x")  # pyright: ignore[reportArgumentType]
    assert str(caught.value).splitlines() == [
        "muon:",
        "  scale: expected one of original, spectral, rms, got 'rmss' (did you mean 'rms'?)",
        "  orthogonalize_sharding: expected one of stack, none, got 'x'",
    ]
    with pytest.raises(UserError, match=r"(?s)muon:\n  adam.beta: expected one.*\n  learning_rate: .*in proportion"):
        muon(0, specs={}, adam={"beta": 1, "learning_rate": 1e-3})
    # An embedding and a head of two axes are none of Muon's business, a matrix of two axes is.
    found = {"a": ParamSpec("embed", "io"), "b": ParamSpec("matrix", "io")}
    state = muon(0.02, specs=found).init({"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))})
    assert set(flatten(state.mu)) == {"b"} and set(flatten(state.adam.nu)) == {"a"}


def test_guard_rate_and_missing_leaves():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    found = specs(params)
    tx = guard(muon(0.02, specs=found, normalize=True, adam={"learning_rate": 0.01}))
    state = tx.init(params)
    grads = {"kernel": jnp.full((2, 3), jnp.nan), "bias": jnp.ones(3)}
    updates, after = tx.update(grads, state, params)
    assert all(bool((np.asarray(u) == 0).all()) for u in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    good = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
    full, _ = tx.update(good, state, params)
    half, swept = tx.update(good, state, params, learning_rate=0.01)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-6), full, half)
    np.testing.assert_allclose(swept.inner.adam.learning_rate, 0.005)
    partial, _ = tx.update({"kernel": None, "bias": jnp.ones(3)}, state, params)
    assert partial["kernel"] is None
    check_optimizer(muon(0.02, specs=found), params)


def test_through_nnx_optimizer():
    """Its init sees variables, its update arrays; what is hollow for one algorithm is so in both."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = muon(0.1, specs=specs(params), normalize=True)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = optax.apply_updates(params, updates)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: sum(jnp.sum(x) for x in (m.kernel[...], m.bias[...])))(model))

    step(model, optimizer)
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_collectives_on_eight_devices(kind):
    """At most three all-to-alls and 4 MiB on each device, whatever is split; padding where eight does not divide."""
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    rng = np.random.default_rng(0)
    apart = {f"w{i}": (256, 1024) for i in range(8)}
    layouts = [
        (apart, P("fsdp", None)),
        (apart, P(None, "fsdp")),
        ({"layers": {"w": (8, 256, 1024)}}, P(None, "fsdp", None)),
        ({"layers": {"w": (8, 256, 1024)}}, P(None, None, "fsdp")),
        ({f"w{i}": (16, 32) for i in range(3)}, P("fsdp", None)),
    ]
    for number, (shapes, split) in enumerate(layouts):
        if kind == AxisType.Explicit and number in (1, 2):
            continue  # each takes seconds to compile
        where = NamedSharding(mesh, split)
        like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: type(s) is tuple)
        context = jax.set_mesh(mesh) if number % 2 or kind == AxisType.Explicit else jax.default_device(None)
        tx = muon(0.02, specs=specs(like))
        abstract = jax.tree.map(lambda x, where=where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), like)
        state = jax.eval_shape(tx.init, like)
        lie = {True: where, False: NamedSharding(mesh, P())}
        state = jax.tree.map(lambda x, lie=lie: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie[x.ndim > 1]), state)
        outputs = jax.tree.map(lambda x: x.sharding, (abstract, state))
        with context:
            compiled = jax.jit(tx.update, out_shardings=outputs).lower(abstract, state, abstract).compile()
        found = collectives(compiled.as_text())
        if number < 4:
            assert {name for name, _ in found} == {"all-to-all"} and len(found) <= 3, (split, found)
            assert sum(size for _, size in found) <= 4 * 2**20, (split, found)
            # Each device multiplies one matrix in eight and none twice: 5 (2 256^2 1024 2 + 2 256^3) and a little.
            assert compiled.cost_analysis()["flops"] < 1.6e9, split
        if number == 4:
            params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), like)
            plain = muon(0.02, specs=specs(like), orthogonalize_sharding="none")
            expected, _ = plain.update(params, plain.init(params), params)
            placed = jax.device_put(params, jax.tree.map(lambda x: x.sharding, abstract))
            begun = jax.device_put(plain.init(params), jax.tree.map(lambda x: x.sharding, state))
            got, _ = compiled(placed, begun, placed)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, expected)
            assert all(x.sharding.is_equivalent_to(where, 2) for x in jax.tree.leaves(got))
