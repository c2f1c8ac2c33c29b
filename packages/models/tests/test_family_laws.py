"""Laws that hold for every family: what a cache, padding, packing, loops, recomputation and meshes must not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import cases, write
from flax import nnx

from styrax.core import DEFAULT_RULES, tree
from styrax.core.mesh import MeshConfig
from styrax.models import registry
from styrax.models.hf import from_pretrained

CASES = cases()
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Frequencies follow from the longest position of a call, so that a chunk alone has others: as in transformers.
BY_LENGTH = ("llama-dynamic", "phi3")
LENGTH = 20


def each(*quick):
    """Run with every family in the long stage, and with those that are named always."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in CASES}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    made = {}

    def get(name, **changes):
        if name not in made:
            made[name] = from_pretrained(write(CASES[name][0], tmp_path_factory.mktemp("model") / name))
        model = made[name]
        config = dataclasses.replace(model.config, **changes)
        empty = nnx.eval_shape(lambda: config.build(vocab_size=model.vocab_size, rngs=nnx.Rngs(0)))
        return tree.unflatten(empty, tree.flatten(model))

    return get


@pytest.fixture(scope="session")
def call():
    return jax.jit(lambda model, ids, **given: model(ids, **given), compiler_options=QUICK)


def ids_of(rows=2, length=LENGTH):
    return np.random.default_rng(7).integers(1, 61, (rows, length), dtype=np.int32)


def close(got, expected):
    scale = np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(got, expected, atol=5e-5 * max(1, scale))


@each("deepseek_v3", "llama4")
def test_a_cache_and_padding_change_nothing(name, load, call):
    """Rows of different lengths, padding on the left, then chunks of one and of several tokens."""
    model, ids = load(name, scan="on"), ids_of()
    if name in BY_LENGTH:
        ids = ids[:, :14]
    whole = call(model, ids)
    first = [9, 6]
    prompt, real = np.zeros((2, 9), np.int32), np.zeros((2, 9), np.int32)
    for row, count in enumerate(first):
        prompt[row, 9 - count :], real[row, 9 - count :] = ids[row, :count], 1
    got, cache = call(model, prompt, segment_ids=real, cache=model.init_cache(2, LENGTH))
    for row, count in enumerate(first):
        close(got[row, 9 - count :], whole[row, :count])
    at = np.array(first)
    for step in (1, 1, 3):
        chunk = np.stack([ids[row, at[row] : at[row] + step] for row in range(2)])
        got, cache = call(model, chunk, cache=cache)
        for row in range(2):
            close(got[row], whole[row, at[row] : at[row] + step])
        at = at + step
    assert cache.lengths.tolist() == at.tolist()


@each("qwen3_next")
def test_packed_is_separate(name, load, call):
    model, ids = load(name, scan="on"), ids_of(1)
    segments = np.array([[1] * 8 + [2] * 9 + [0] * 3], np.int32)
    packed = call(model, ids, segment_ids=segments)
    close(packed[0, :8], call(model, ids[:, :8])[0])
    close(packed[0, 8:17], call(model, ids[:, 8:17])[0])


def loss_and_grad(model, ids, segments):
    def loss(model):
        logits = jax.nn.log_softmax(model(ids, segment_ids=segments))
        return -(jnp.take_along_axis(logits, ids[..., None], -1)[..., 0] * (segments != 0)).mean()

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    run = jax.jit(jax.value_and_grad(lambda p: loss(nnx.merge(graph, p, rest))), compiler_options=QUICK)
    value, grad = run(params)
    return value, tree.flatten(grad)


@pytest.fixture(scope="session")
def trained(load):
    """Loss and gradients of an unrolled model that recomputes nothing, made once for each family."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = loss_and_grad(load(name, scan="off", remat="none"), ids_of(), SEGMENTS)
        return made[name]

    return get


def same_training(expected, model):
    value, grad = expected
    other_value, other_grad = loss_and_grad(model, ids_of(), SEGMENTS)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    assert grad.keys() == other_grad.keys()
    for path, leaf in grad.items():
        bound = 2e-5 * max(float(jnp.abs(leaf).max()), 1e-3)
        np.testing.assert_allclose(other_grad[path], leaf, atol=bound, err_msg=path)
        assert bool(jnp.isfinite(leaf).all()), path


SEGMENTS = np.array([[1] * 8 + [2] * 9 + [0] * 3, [1] * LENGTH], np.int32)


@each("gemma3")
def test_scanned_and_recomputed_is_unrolled_and_kept(name, load, trained):
    """And every parameter has a gradient: without one it is dead weight, or a term is lost."""
    same_training(trained(name), load(name, scan="on", remat="block"))
    assert not [path for path, leaf in trained(name)[1].items() if not jnp.abs(leaf).max() > 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4-e2b", "deepseek_v3"])
def test_every_policy_of_recomputation_gives_the_same(name, load, trained):
    for scan, remat in (("off", "dots"), ("on", "dots"), ("off", "block")):
        same_training(trained(name), load(name, scan=scan, remat=remat))


def scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)


def stacked(scan):
    """Shapes in the body of what a scan stacks up; a carry has the same shape inside and outside."""
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
    pairs = [(outer.aval.shape, inner.aval.shape) for outer, inner in zip(scan.outvars, body.outvars, strict=True)]
    return {inner for outer, inner in pairs if outer == (scan.params["length"], *inner)}


@pytest.mark.parametrize("remat", ["none", "block"])
def test_keys_that_layers_share_are_kept_once(remat):
    """The loop over layers that use them gets them from outside, and leaves no copy for the backward pass."""
    config = registry.read_table(CASES["gemma4-e2b"][0].table)
    config = dataclasses.replace(config, scan="on", remat=remat)
    model = config.build(vocab_size=61, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    grad = jax.grad(lambda p: nnx.merge(graph, p, rest)(ids_of(3)).astype("float32").sum())
    found = [scan for scan in scans(jax.make_jaxpr(grad)(params).jaxpr) if not scan.params["reverse"]]
    assert [scan.params["length"] for scan in found] == [1, 1, 1, 2]
    kept = [stacked(scan) for scan in found]
    keys = {"local": (3, 2, LENGTH, 8), "attn": (3, 2, LENGTH, 16)}
    assert keys["local"] in kept[1]
    assert keys["attn"] in kept[2]
    assert not kept[3] & set(keys.values())


def test_layers_that_share_keys_have_no_part_of_a_cache(load, call):
    """And what is generated, by blocks that are not looped over, is what the whole text predicts."""
    model = load("gemma4-e2b", scan="off")
    cache = model.init_cache(2, 8)
    assert [part is None for part in cache.parts] == [False, False, False, True, True]
    prompt = [5, 17, 3, 60, 22, 9, 31, 2]
    made = list(model.generate(prompt, max_tokens=6, temperature=0.0))
    logits = call(load("gemma4-e2b", scan="on"), jnp.asarray([prompt + made]))
    assert jnp.argmax(logits[0, len(prompt) - 1 : -1], -1).tolist() == made


@each()
def test_a_mesh_of_eight_devices_is_one_device(name, load, call, tmp_path):
    """Loaded straight into its shards, and run there."""
    mesh = MeshConfig(axes={"data": 2, "fsdp": 2, "tensor": 2}).build()
    rules = {**DEFAULT_RULES, "vocab": (), "kv_heads": ()}  # 61 tokens, and two heads of any width
    write(CASES[name][0], tmp_path / "model")
    try:
        sharded = from_pretrained(tmp_path / "model", mesh=mesh, rules=rules, scan="on")
    except Exception as error:
        if "divide" in str(error):
            pytest.skip(str(error))
        raise
    leaves = tree.flatten(sharded).values()
    assert any(len(leaf.sharding.device_set) == 8 and not leaf.is_fully_replicated for leaf in leaves)
    with jax.sharding.set_mesh(mesh) if hasattr(jax.sharding, "set_mesh") else mesh:
        got = call(sharded, jnp.asarray(ids_of(8)))
    close(got, call(load(name, scan="on"), jnp.asarray(ids_of(8))))


@each()
def test_bfloat16_is_near_float32(name, load):
    """Within a twentieth of the largest logit on most tokens; the router may choose otherwise on a few."""
    model = load(name)
    low = tree.unflatten(
        nnx.eval_shape(lambda: model.config.build(vocab_size=61, rngs=nnx.Rngs(0), policy=_bf16())),
        {path: leaf.astype("bfloat16") for path, leaf in tree.flatten(model).items()},
    )
    run = jax.jit(lambda model, ids: model(ids), compiler_options=QUICK)
    exact, got = run(model, jnp.asarray(ids_of())), run(low, jnp.asarray(ids_of()))
    assert got.dtype == jnp.float32
    error = np.abs(np.asarray(got - exact)).max(-1) / float(jnp.abs(exact).max())
    assert np.median(error) < 0.05


def _bf16():
    from styrax.core import Policy

    return Policy("bf16", "bf16", "f32")
