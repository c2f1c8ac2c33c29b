"""The loop of generation: what it compiles with, and how it keeps parameters and a cache between steps."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import styrax.models
from styrax.models.arch import Arch, Attn
from styrax.models.decoding import Runner
from styrax.models.generate import generate, generate_batch
from styrax.models.layers import product as products

LIFTED = (
    "jit",
    "grad",
    "value_and_grad",
    "scan",
    "vmap",
    "pmap",
    "remat",
    "checkpoint",
    "cond",
    "while_loop",
    "shard_map",
)


def lifted(source):
    """Find where a source uses a transformation of flax: it walks through all modules at each call."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nnx":
            found += [node.attr] if node.attr in LIFTED else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flax"):
            found += [each.name for each in node.names if each.name in LIFTED]
    return found


def test_no_code_uses_the_transformations_of_flax():
    assert lifted("from flax import nnx\n@nnx.jit\ndef f(): nnx.grad(f)") == ["jit", "grad"]
    assert lifted("from flax.nnx import jit") == ["jit"]
    files = list(Path(styrax.models.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    assert {str(file): found for file in files if (found := lifted(file.read_text()))} == {}


def test_public_paths_run_where_they_raise(build, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a transformation of flax was called")

    for name in LIFTED:
        if hasattr(nnx, name):
            monkeypatch.setattr(nnx, name, refuse)
    model, ids = build(num_layers=1, max_len=16), jnp.array([[1, 2, 3]])
    model(ids)
    model(ids, cache=model.init_cache(1, 4))
    model.losses(ids, ids, jnp.ones((1, 3)))
    assert len(list(generate(model, [1], max_tokens=2))) == 2
    assert len(generate_batch(model, [[1], [2, 3]], max_tokens=2)) == 2


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 65])
def test_every_way_to_multiply_gives_the_product(rows, turned, monkeypatch):
    rng = np.random.default_rng(rows)
    x, kernel = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((rows, 70), (70, 9)))
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    bound = 2.0**-8 * np.abs(exact) + 1e-5
    texts, given = [], kernel.T if turned else kernel
    for way in range(3):
        monkeypatch.setattr(products, "fastest_way", lambda dtype, turned, way=way: way)
        run = jax.jit(products.by_trial()(lambda x, kernel: products.product(x, kernel, turned=turned)))
        assert (np.abs(np.asarray(run(x, given), np.float64) - exact) <= bound).all()
        texts.append(run.lower(x, given).as_text())
    assert len(set(texts)) == (1 if rows in (1, 65) else 3)  # of one row and of many there is one way
    wide = jax.jit(products.product).lower(jnp.ones((2, 3)), jnp.ones((3, 4))).as_text()
    assert "dot_general" in wide


def test_which_way_is_fastest_is_tried_while_tracing_generation_alone():
    """A step of training compiles to the same program however busy the machine is."""
    products.fastest_way.cache_clear()
    x, kernel = jnp.ones((2, 3), "bfloat16"), jnp.ones((3, 1), "bfloat16")
    assert jax.jit(products.product)(x, kernel).tolist() == [[3.0], [3.0]]
    assert products.fastest_way.cache_info().currsize == 0
    assert jax.jit(products.by_trial()(products.product))(x, kernel).tolist() == [[3.0], [3.0]]
    assert products.fastest_way.cache_info().currsize == 1
    assert products.fastest_way(x.dtype, False) in range(3)


@pytest.mark.parametrize("policy", ["f32", "bf16"])
def test_steps_of_a_runner_are_those_of_its_model(build, run, policy):
    """With a ring and rows that stop; numbers of 16 bits are handed on as integers, and nothing else is."""
    model = build(policy, max_len=32, arch=Arch(local=Attn(window=4), layers=("local", "attn")))
    runner, ids = Runner(model), np.random.default_rng(0).integers(0, 23, (2, 12), dtype=np.int32)
    lengths = np.array([7, 3])
    logits, cache = runner.prefill(ids[:, :7], lengths, capacity=12)
    held = {leaf.dtype.name for leaf in jax.tree.leaves(cache.parts)}
    assert held == {"float32" if policy == "f32" else "uint16"}
    scale = 0.03 if policy == "bf16" else 1e-4
    for live in ([True, True], [True, False], [True, True], [True, True]):
        for row in range(2):
            whole = run(model, ids[row : row + 1, : lengths[row]])[0, -1]
            np.testing.assert_allclose(logits[row], whole, atol=scale * np.abs(whole).max())
        alive = np.array(live)
        given = jnp.asarray(ids[np.arange(2), lengths])
        before = logits
        logits, cache = runner.decode(given, alive, cache)
        logits = jnp.where(alive[:, None], logits, before)
        lengths = lengths + alive
    assert cache.lengths.tolist() == lengths.tolist() == [11, 6]


def test_a_row_of_a_batch_is_not_touched_by_one_that_is_nan(build):
    model = build(max_len=16)
    clean = Runner(model)
    ids = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    _, cache = clean.prefill(ids, np.array([3, 3]), capacity=8)
    logits, cache = clean.decode(jnp.array([7, 99]), np.ones(2, bool), cache)  # 99 is no token
    assert jnp.isnan(logits[1]).all()
    after, cache = clean.decode(jnp.array([8, 8]), np.ones(2, bool), cache)
    assert jnp.isnan(after[1]).all()
    alone, _ = model(jnp.array([[1, 2, 3, 7, 8]]), cache=model.init_cache(1, 8))
    np.testing.assert_allclose(after[0], alone[0, -1], atol=1e-4)
    again = dataclasses.replace(cache, lengths=jnp.zeros(2, "int32"))  # and the next text in that row neither
    logits, _ = clean.decode(jnp.array([1, 2]), np.ones(2, bool), again)
    np.testing.assert_allclose(logits[1], model(jnp.array([[2]]))[0, 0], atol=1e-4)
