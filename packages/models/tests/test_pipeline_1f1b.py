"""One forward, one backward: the gradients of a plain loop over layers, in memory that microbatches do not fill.

Most tests run a small layer of their own, which has all that a pipeline has to carry: gradients of its parameters, of
the residual stream, of what comes with each row and of reports; numbers that have none; and dropout.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pipeline as whole_model
from test_pipeline import SPARSE, gradient, on_mesh, same

from styrax.core import UserError
from styrax.core.mesh import MeshConfig
from styrax.models import Arch, Attn, MoE, Runtime
from styrax.models.layers.dropout import dropout, of_layer, of_rows
from styrax.models.layers.meshes import mesh_of
from styrax.models.layout import Kind
from styrax.models.layout import plan as layout
from styrax.models.pipeline import Schedule, run_pipelined, schedule
from styrax.models.stack import run_scanned

SEQ = 3
RECOMPUTED = {"recompute_stages": True}
STACKS, SEGMENTS = layout((Kind("attn", False),) * 8)


def make_step(given):
    bias, ids, keys = given

    def step(block, turn, flat, part):
        x = flat.reshape(*ids.shape, -1)
        hidden = jnp.tanh(x @ block["w"].astype(x.dtype) + bias.astype(x.dtype)) * (1 + 0.1 * turn.layer)
        hidden = jnp.where((ids == 0)[..., None], 0, hidden)
        hidden = hidden.astype(x.dtype) * block["count"].astype(x.dtype)
        x = x + dropout(hidden, 0.25, of_layer(keys, turn.layer))
        reports = {"rows": (x * x).mean((1, 2)), "sum": x.astype("float32").sum() * block["w"].sum(), "ids": ids.sum(1)}
        return x.reshape(flat.shape), part, reports, {}

    return step


def inputs(rows, dim=4, dtype="float32", layers=8):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), "float32")

    blocks = [{"w": 1.6 / dim * draw(layers, dim, dim), "count": jnp.arange(layers)[:, None] % 2 + 1}]
    x, bias, ids = draw(rows, SEQ, dim).astype(dtype), 0.3 * draw(rows, SEQ, dim), rng.integers(0, 4, (rows, SEQ))
    return blocks, x, (bias, jnp.asarray(ids), of_rows(jax.random.key(1), jnp.arange(rows)))


def total(out, reports):
    """A number that depends on everything, each part with a weight of its own."""
    weights = jnp.sin(jnp.arange(out.size, dtype="float32")).reshape(out.shape)
    of_rows = jnp.cos(jnp.arange(reports["rows"].size, dtype="float32")).reshape(reports["rows"].shape)
    value = (out * weights).sum() + (reports["rows"] * of_rows).sum()
    return value + (reports["sum"] * jnp.arange(1.0, 9.0)).sum() / 10


def plainly(w, x, bias, rest, make_step=make_step):
    out, _, (reports,) = run_scanned(make_step((bias, *rest[1])), SEGMENTS, [{"w": w, **rest[0]}], x, [None])
    return total(out, reports), reports["ids"]


def piped(w, x, bias, rest, *, runtime, remat=False, make_step=make_step):
    here = mesh_of(x)
    plan = schedule(runtime, SEGMENTS, len(x), here)
    out, (reports,) = run_pipelined(
        make_step, SEGMENTS[0], [{"w": w, **rest[0]}], x, (bias, *rest[1]), plan=plan, here=here, remat=remat
    )
    return total(out, reports), reports["ids"]


def differentiate(objective, blocks, x, given, **options):
    rest = {"count": blocks[0]["count"]}, given[1:]
    run = jax.jit(jax.value_and_grad(lambda *each: objective(*each, rest, **options), (0, 1, 2), has_aux=True))
    return run(blocks[0]["w"], x, given[0])


@pytest.mark.parametrize(
    ("axes", "rows", "microbatches"),
    [
        # Fewer than stages, as many, and more than are in flight; in shares where rows divide over stages.
        ({"stage": 4, "data": 2}, 16, 2),
        ({"stage": 4, "data": 2}, 8, 4),
        ({"stage": 2, "fsdp": 2, "data": 2}, 48, 6),
        pytest.param({"stage": 4, "tensor": 2}, 11, 11, marks=pytest.mark.slow),
        pytest.param({"stage": 8}, 8, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_a_plain_loop(axes, rows, microbatches, remat):
    blocks, x, given = inputs(rows)
    (value, ids), gradients = differentiate(plainly, blocks, x, given)
    runtime = Runtime(microbatches=microbatches, schedule="1f1b")
    with jax.set_mesh(MeshConfig(axes=axes).build()):
        (found, found_ids), others = differentiate(piped, blocks, x, given, runtime=runtime, remat=remat)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_array_equal(found_ids, ids)
    for got, expected in zip(others, gradients, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("runtime", [{"schedule": "1f1b"}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_narrow_numbers_are_the_same_to_their_rounding(runtime):
    """On a CPU too, whose compiler ends the process at sums of bfloat16 over devices."""
    blocks, x, given = inputs(8, dtype="bfloat16")
    (value, _), gradients = differentiate(plainly, blocks, x, given)
    with jax.set_mesh(MeshConfig(axes={"stage": 4, "data": 2}).build()):
        runtime = Runtime(microbatches=4, **runtime)
        (found, _), others = differentiate(piped, blocks, x, given, runtime=runtime, remat=True)
    np.testing.assert_allclose(found, value, rtol=2e-2)
    for got, expected in zip(others, gradients, strict=True):
        assert got.dtype == expected.dtype
        got, expected = np.asarray(got, "float32"), np.asarray(expected, "float32")
        np.testing.assert_allclose(got, expected, atol=2e-2 * np.abs(expected).max())


def test_what_is_no_microbatch_adds_nothing():
    """While a pipeline fills, stages run on zeros, where this layer has no gradient."""

    def make(given):
        inner = make_step(given)

        def step(block, turn, flat, part):
            return inner(block, turn, flat / jnp.sqrt((flat * flat).sum(-1, keepdims=True)), part)

        return step

    blocks, x, given = inputs(8)
    (value, _), gradients = differentiate(plainly, blocks, x, given, make_step=make)
    with jax.set_mesh(MeshConfig(axes={"stage": 4, "data": 2}).build()):
        runtime = Runtime(microbatches=4, schedule="1f1b")
        (found, _), others = differentiate(piped, blocks, x, given, runtime=runtime, make_step=make)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for got, expected in zip(others, gradients, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def temporary(microbatches, *, rows_each, dim, remat=True, **runtime):
    """Bytes that a compiled gradient needs beside its arguments and results."""
    blocks, x, given = jax.eval_shape(lambda: inputs(microbatches * rows_each, dim))
    runtime = Runtime(microbatches=microbatches, **runtime)
    mesh = MeshConfig(axes={"stage": 4, "data": 2}).build()
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "stage")))

    def placed(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=over)

    layers = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("stage"))
    w = jax.ShapeDtypeStruct(blocks[0]["w"].shape, "float32", sharding=layers)
    ids, keys = given[1:]

    def loss(w, x, bias, ids):
        rest = {"count": jnp.ones((8, 1), int)}, (ids, of_rows(jax.random.key(1), jnp.arange(len(keys))))
        return piped(w, x, bias, rest, runtime=runtime, remat=remat)[0]

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(w, placed(x), placed(given[0]), placed(ids)).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("remat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_microbatches(remat):
    """But for the shares of the batch, its cotangent and the result's, and of what comes with rows."""
    sizes = {"rows_each": 8, "dim": 256, "remat": remat}
    one = 8 // 2 * SEQ * 256 * 4  # bytes of a microbatch on one of the two ways of `data`
    few, many = (temporary(count, schedule="1f1b", **sizes) for count in (8, 16))
    others, more = (temporary(count, **sizes) for count in (8, 16))
    assert more - others > 8 * 2 * one, "GPipe keeps what enters each of two layers"
    # Four arrays in shares of a quarter, and the bias and its gradient, which each stage has whole.
    assert many - few < 8 * 3.5 * one
    assert many < 0.75 * more


@pytest.mark.parametrize(
    "runtime", [{}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"repeats": 2}, RECOMPUTED))], ids=str
)
def test_layers_are_not_kept_for_every_tick(runtime):
    """Of wide layers and few rows: a copy of the two layers of a stage for each tick would be 512 KiB."""
    few, many = (temporary(count, rows_each=8, dim=256, **runtime) for count in (8, 16))
    assert many - few < 8 * 2 * 256 * 256 * 4 / 2


def test_what_does_not_go_together_is_said():
    with pytest.raises(ValueError, match='repeats: expected 1 with schedule = "1f1b"') as caught:
        Runtime(repeats=2, schedule="1f1b", attention="nothing")
    assert "nothing" in str(caught.value), "all problems at once"
    with pytest.raises(ValueError, match="schedule"):
        Runtime(schedule="zero-bubble")
    with jax.set_mesh(MeshConfig(axes={"stage": 4, "data": 2}).build()):
        here = mesh_of(jnp.ones(2))
        with pytest.raises(UserError, match="expected a divisor of 4 rows on each device, got 3"):
            schedule(Runtime(microbatches=3, schedule="1f1b"), SEGMENTS, 8, here)
        found = schedule(Runtime(schedule="1f1b"), SEGMENTS, 64, here)
    assert found == Schedule(4, 8, 1, "1f1b")
    assert found.bubble == pytest.approx(3 / 11) and found.in_flight == 7
    assert dataclasses.replace(Runtime(), schedule="1f1b").repeats == 1


BALANCED = Arch(moe=MoE(num_experts=4, experts_per_token=2, expert_dim=8, balance_coef=0.3, z_coef=0.1))


@pytest.mark.parametrize(
    ("axes", "changes", "microbatches"),
    [
        pytest.param({"stage": 2, "tensor": 4}, {"num_layers": 4}, 8, marks=pytest.mark.slow),
        ({"stage": 2, "data": 4}, {"remat": "block"}, 2),
        pytest.param({"stage": 4, "data": 2}, {"num_layers": 4}, 4, marks=pytest.mark.slow),
        pytest.param(
            {"stage": 2, "fsdp": 2, "tensor": 2},
            {"num_layers": 4, "arch": Arch(local=Attn(window=4), layers=("local", "attn")), "remat": "none"},
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 2, "expert": 2, "data": 2},
            {"num_layers": 2, "arch": SPARSE, "remat": "none"},
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 4, "fsdp": 2},
            {"num_layers": 4, "arch": BALANCED, "remat": "block"},
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense, many", "dense, recomputed", "dense", "cycles of layers and tensor", "experts and mtp", "balance"],
)
def test_a_model_is_that_of_one_device(build, axes, changes, microbatches):
    model = build(**changes, runtime=Runtime(microbatches=microbatches, schedule="1f1b"))
    expected = gradient(model)
    mesh, placed = on_mesh(model, axes)
    with jax.set_mesh(mesh):
        same(gradient(placed), expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [Arch(), BALANCED], ids=["dense", "experts"])
def test_a_model_is_that_of_gpipe(build, arch):
    """Of what is recomputed too, and of a model that only goes forward."""
    found = []
    ids = whole_model.batch()[0]
    for runtime in (Runtime(microbatches=2), Runtime(microbatches=2, schedule="1f1b")):
        mesh, placed = on_mesh(build(num_layers=4, arch=arch, runtime=runtime), {"stage": 2, "data": 2, "fsdp": 2})
        with jax.set_mesh(mesh):
            found.append((gradient(placed), jax.jit(lambda model: model(ids))(placed)))
    same(found[1][0], found[0][0])
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-5)
