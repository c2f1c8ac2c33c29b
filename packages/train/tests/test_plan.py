"""Plans of small models: bytes against arrays that are really made, and against the compiler."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_toys import Toy, toy_batch, toy_loss

from styrax.core import MeshConfig, UserError
from styrax.train import fit, make_step
from styrax.train.compiled import CompiledStep, lower_step
from styrax.train.plan import make, plan_step
from styrax.train.plan.predict import exchanges, kept
from styrax.train.plan.program import program_of
from styrax.train.plan.runtime import fitting, misfit
from styrax.train.plan.shape import Widths, widths_of
from styrax.train.plan.topology import parse
from styrax.train.shardings import batch_sharding, lay_out

EIGHT = jax.devices()[:8]
AXES = {"inner/kernel": (None, "mlp"), "outer/kernel": ("mlp", None), "**": (None,)}
SPEC = {name: (x.shape, x.dtype) for name, x in toy_batch(0, rows=16).items()}
TX = optax.adam(0.01)


def toy(rngs):
    return Toy(rngs)


def mesh_of(**axes):
    return MeshConfig(axes=axes).build(EIGHT)


def on_a_device(tree):
    """Bytes of real arrays on the first device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ).addressable_shards
        if shard.device == EIGHT[0]
    )


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "tensor": 2}, {"tensor": 8}])
def test_state_and_batch_are_exact(axes):
    mesh = mesh_of(**axes)
    found = plan_step(
        toy, TX, SPEC, toy_loss, mesh=mesh, topology=parse("cpu:8"), logical_axes=AXES, compile=False
    ).predicted
    _, _, make_state = lay_out(toy, TX, mesh=mesh, logical_axes=AXES)
    state = make_state()
    where = batch_sharding(mesh)
    batch = {
        name: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*where.spec[: x.ndim])))
        for name, x in toy_batch(0, rows=16).items()
    }
    assert found.params == found.gradients == on_a_device(state.params)
    assert found.optimizer == on_a_device(state.opt_state)
    assert found.variables == on_a_device((state.variables, state.step, state.key))
    assert found.batch == on_a_device(batch)
    # Nothing is known of what a toy keeps in between.
    assert (found.activations, found.temporaries, found.temp_bytes, found.total_bytes) == (None,) * 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_compiler_agrees_on_arguments_and_outputs(accumulate):
    found = plan_step(
        toy, TX, SPEC, toy_loss, mesh=mesh_of(data=2, tensor=4), topology=parse("cpu:8"), logical_axes=AXES,
        accumulate=accumulate,
    )  # fmt: skip
    compiled = found.compiled
    assert compiled is not None
    assert compiled.argument_bytes == found.predicted.argument_bytes
    assert compiled.output_bytes == pytest.approx(found.predicted.output_bytes, abs=8 * 512 + 64)
    assert compiled.temp_bytes is not None
    assert compiled.flops is not None
    assert found.predicted.gradients == accumulate * found.predicted.params
    # Sums over what splits the batch, and over what splits the hidden layer.
    assert {each.axes for each in found.collectives or ()} >= {"data", "tensor"}


def test_the_program_is_the_one_that_a_run_compiles():
    mesh = mesh_of(data=4, tensor=2)
    texts = []

    class Spy(CompiledStep):
        def _compile(self, state, batch):
            texts.append(lower_step(self._raw, state, batch, self._mesh).as_text())
            return super()._compile(state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("styrax.train.loop.CompiledStep", Spy)
        fit(
            toy, TX, iter([toy_batch(0, rows=16)]), toy_loss, steps=1, mesh=mesh, logical_axes=AXES, accumulate=2,
            metrics=lambda opt_state: {"count": opt_state[0].count},
        )  # fmt: skip
    program = program_of(
        toy, TX, SPEC, toy_loss, mesh=mesh, logical_axes=AXES, accumulate=2,
        metrics=lambda opt_state: {"count": opt_state[0].count},
    )  # fmt: skip
    assert lower_step(program.step, program.state, program.batch, mesh).as_text() == texts[0]


def test_one_device_needs_no_mesh():
    mesh = MeshConfig().build(EIGHT[:1])
    found = plan_step(toy, TX, SPEC, toy_loss, mesh=mesh, topology=parse("cpu:1"))
    assert found.compiled is not None
    assert found.compiled.argument_bytes == found.predicted.argument_bytes
    assert found.collectives == ()


def test_arithmetic_is_counted_in_the_trace():
    # Two products of 4 x 8 and 8 x 3, forward once and backward twice, two operations each.
    found = plan_step(toy, TX, SPEC, toy_loss, mesh=mesh_of(data=8), topology=parse("cpu:8"), compile=False)
    assert found.flops_per_token is not None
    assert found.flops_per_token * found.tokens == 3 * 2 * 16 * (4 * 8 + 8 * 3)


def test_a_plan_is_json_and_says_null_where_nothing_is_known():
    found = plan_step(toy, TX, SPEC, toy_loss, mesh=mesh_of(data=8), topology=parse("cpu:8"), tokens=1e6, price=2.0)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    names = {"argument_bytes", "output_bytes", "temp_bytes", "flops", "bytes_accessed", "seconds"}
    assert names <= set(told["compiled"])
    assert names <= set(told["predicted"])
    assert set(told["predicted"]["bytes"]) == {
        "params", "optimizer", "variables", "batch", "gradients", "activations", "temporaries"
    }  # fmt: skip
    assert (told["hbm_bytes"], told["fits"], told["predicted"]["seconds"]) == (None, None, None)
    assert told["run"]["steps"] == math.ceil(1e6 / found.tokens)
    assert (told["run"]["days"], told["run"]["cost"]) == (None, None)
    assert told["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    assert {"kind", "axes", "bytes", "count", "wire_bytes", "group", "gathers"} == set(told["collectives"][0])


def test_without_a_compiler_a_plan_needs_no_devices():
    mesh = MeshConfig(axes={"data": -1, "tensor": 8}).abstract(4096)
    spec = {name: ((4096, *shape[1:]), dtype) for name, (shape, dtype) in SPEC.items()}
    found = plan_step(
        toy, TX, spec, toy_loss, mesh=mesh, topology=parse("v5p:16x16x16"), logical_axes=AXES, compile=False
    )
    assert (found.compiled, found.collectives, found.hbm_bytes) == (None, None, 95 * 2**30)
    assert found.predicted.batch == sum(8 * math.prod(s[1:]) * np.dtype(d).itemsize for s, d in SPEC.values())
    assert found.fits is None


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="does not divide over the 8 devices"):
        program_of(toy, TX, {"x": ((12, 4), np.float32)}, toy_loss, mesh=mesh_of(data=8))


def test_frozen_weights_are_split_like_parameters():
    class Frozen(nnx.Variable):
        pass

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base = Frozen(jnp.ones((16, 4)))
            self.scale = nnx.Param(jnp.ones((4,)))
            self.seen = nnx.BatchStat(jnp.zeros((3,)))

    mesh = mesh_of(fsdp=8)
    _, state, _ = lay_out(Adapted, TX, mesh=mesh, logical_axes={"base": ("embed", None), "scale": (None,)})
    assert state.variables["base"].sharding.spec == jax.P("fsdp", None)
    assert state.variables["base"].sharding.shard_shape((16, 4)) == (2, 4)
    assert state.variables["seen"].sharding.is_fully_replicated


DECODER = SimpleNamespace(
    num_layers=4, embed_dim=8, num_heads=4, kv_heads=2, head_width=4, mlp_width=32, remat="auto", tied=False,
    arch=SimpleNamespace(moe=None, mlp=SimpleNamespace(gated=True)),
)  # fmt: skip


def shapes_of(**arrays):
    tree = {}
    for path, shape in arrays.items():
        *folders, last = path.split("__")
        node = tree
        for name in folders:
            node = node.setdefault(name, {})
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


PARAMS = shapes_of(
    layers__mlp__up__kernel=(4, 8, 32), layers__norm__scale=(4, 8), head__kernel=(8, 100), embed__embedding=(100, 8)
)


def test_widths_are_those_of_a_device():
    found = widths_of(DECODER, PARAMS, 100, {"fsdp": 8, "tensor": 2}, "tpu")
    assert found is not None
    assert (found.heads, found.kv, found.mlp, found.vocab) == (8, 4, 16, 50)
    assert (found.block_numbers, found.head_numbers, found.remat) == ((8 * 32 + 8) / 2, 8 * 100 / 2, "block")
    on_cpu = widths_of(DECODER, PARAMS, 100, {}, "cpu")
    assert on_cpu is not None
    assert on_cpu.remat == "none"


def test_another_kind_of_model_has_no_widths():
    assert widths_of(SimpleNamespace(num_layers=4), PARAMS, 100, {}, "tpu") is None
    assert widths_of(DECODER, PARAMS, None, {}, "tpu") is None


@pytest.mark.parametrize(
    ("remat", "a_token_and_layer"),
    # The stream; and the products of attention and MLP; and what lies between them, with norms' inputs in float32.
    [("block", 8), ("dots", 8 + 8 + 16 + 2 * 8 + 2 * 32), ("none", 6 * 8 + 2 * 16 + 2 * 8 + 6 * 32 + 2 * 2 * 8)],
)
def test_what_is_kept_for_the_backward_pass(remat, a_token_and_layer):
    widths = Widths(
        layers=4, embed=8, heads=16, kv=8, mlp=32, vocab=100, block_numbers=1, head_numbers=1, gated=True, remat=remat
    )
    assert kept(widths, 10, 2) == 4 * 10 * 2 * a_token_and_layer


def test_exchanges_are_predicted_by_axis():
    mesh = MeshConfig(axes={"data": 2, "fsdp": 4, "tensor": 2}).abstract(16)
    program = SimpleNamespace(mesh=mesh, accumulate=1, tokens=64, shards=8)
    widths = Widths(
        layers=3, embed=8, heads=16, kv=8, mlp=32, vocab=50, block_numbers=100, head_numbers=50, gated=True,
        remat="block",
    )  # fmt: skip
    found = {(each.kind, each.axes): each for each in exchanges(program, widths, compute_bytes=2) or ()}
    assert found["all-gather", "fsdp"].bytes == 3 * 350 * 2
    assert found["reduce-scatter", "fsdp"].bytes == 350 * 2
    assert found["all-reduce", "data"].bytes == 350 * 2 // 4
    assert found["all-reduce", "tensor"].bytes == (64 // 8) * 8 * 2 * 2 * 3 * 3
    assert exchanges(program, None, compute_bytes=2) is None


def test_data_that_cannot_be_planned_say_so():
    with pytest.raises(UserError, match=r"data.kind='mine' cannot be planned.*data.kind=synthetic"):
        make.shapes(SimpleNamespace(kind="mine"), None, [])
    unknown = SimpleNamespace(shapes=lambda: (None, [SPEC]))
    with pytest.raises(UserError, match="give it: --vocab N"):
        make.shapes(unknown, None, [])
    assert make.shapes(unknown, 7, []) == (7, SPEC)


def test_a_schedule_is_planned_for_its_largest_batch():
    notes = []
    small, large = ({"x": ((rows, 4), np.float32)} for rows in (4, 8))
    assert make.shapes(SimpleNamespace(shapes=lambda: (7, [large, small])), None, notes) == (7, large)
    assert notes == ["the data give 2 shapes of batch; this is planned for the largest, 8x4"]


def test_running_out_of_memory_points_to_the_plan(monkeypatch):
    made = plan_step(toy, TX, SPEC, toy_loss, mesh=mesh_of(data=8), topology=parse("cpu:8"), compile=False)
    monkeypatch.setattr("styrax.train.plan.runtime.predicted_here", lambda resolved: made)
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    with pytest.raises(UserError) as caught, fitting(None, "my run.toml"):
        raise full
    text = str(caught.value)
    assert text.startswith("the devices have too little memory for this run: Out of memory while trying")
    assert "`styrax plan 'my run.toml' --on TOPOLOGY`" in text
    assert "optimizer" in text
    assert "1.152 kB" not in text.splitlines()[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), fitting(None, "x"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_what_cannot_be_predicted_does_not_hide_the_error(monkeypatch):
    def fail(resolved):
        raise RuntimeError("no device left")

    monkeypatch.setattr("styrax.train.plan.runtime.predicted_here", fail)
    text = r"too little memory.*\n.*could not be predicted: RuntimeError: no device left"
    with pytest.raises(UserError, match=text), fitting(None, "x"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: full")


def test_a_mesh_that_does_not_fit_points_to_the_search():
    assert "`styrax plan quickstart --search`" in str(misfit(UserError("mesh data=3 needs 3 devices"), "quickstart"))


def test_the_step_is_lowered_on_its_mesh():
    mesh, seen = mesh_of(data=8), []

    def loss(model, batch, rngs):
        seen.append(dict(jax.sharding.get_abstract_mesh().shape))
        return toy_loss(model, batch, rngs)

    program = program_of(toy, TX, SPEC, loss, mesh=mesh)
    lower_step(program.step, program.state, program.batch, mesh)
    assert seen[-1] == {"data": 8}
    assert callable(make_step(nnx.graphdef(Toy(nnx.Rngs(0))), TX, loss))
