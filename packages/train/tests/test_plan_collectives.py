"""Exchanges read from compiled programs whose exchanges are written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from styrax.train.plan import hlo
from styrax.train.plan.collectives import collectives, replica_groups

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))
SHAPE = dict(MESH.shape)


def compiled(function, *shapes):
    rows = PartitionSpec(("data", "fsdp"))
    split = jax.shard_map(function, mesh=MESH, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(split).lower(*arrays).compile().as_text()


def found(text):
    return {
        (each.kind, each.axes): (each.count, each.bytes, each.wire_bytes, each.group)
        for each in collectives(text, SHAPE)
    }


# Each device has [1, 64] float32: 256 bytes.
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # A ring sends 2 (n - 1) / n of a sum, (n - 1) / n of what is gathered or scattered.
        (lambda x: jax.lax.psum(x, "fsdp"), {("all-reduce", "fsdp"): (1, 256, 384, 4)}),
        (lambda x: jax.lax.psum(x, "data"), {("all-reduce", "data"): (1, 256, 256, 2)}),
        (lambda x: jax.lax.psum(x, ("data", "fsdp")), {("all-reduce", "data+fsdp"): (1, 256, 448, 8)}),
        (lambda x: jax.lax.all_gather(x, "fsdp"), {("all-gather", "fsdp"): (1, 1024, 768, 4)}),
        (
            lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True),
            {("reduce-scatter", "fsdp"): (1, 256, 192, 4)},
        ),
        (
            lambda x: jax.lax.all_to_all(x.reshape(4, 16), "fsdp", 0, 1, tiled=True),
            {("all-to-all", "fsdp"): (1, 256, 192, 4)},
        ),
        (
            lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
            {("collective-permute", "data"): (1, 256, 256, 2)},
        ),
    ],
)
def test_one_exchange(function, expected):
    assert found(compiled(function, (8, 64))) == expected


def test_loops_count_and_nest():
    def inner(carry, _):
        return jax.lax.psum(jnp.sin(carry), "fsdp"), None

    def outer(carry, _):
        carry = jax.lax.scan(inner, carry, None, length=3)[0]
        return jax.lax.all_gather(carry, "data").sum(0), None

    text = compiled(lambda x: jax.lax.scan(outer, x, None, length=5)[0], (8, 64))
    assert found(text) == {
        ("all-reduce", "fsdp"): (15, 15 * 256, 15 * 384, 4),
        ("all-gather", "data"): (5, 5 * 512, 5 * 256, 2),
    }


def test_a_loop_without_a_known_end_is_not_guessed():
    def body(x):
        return jax.lax.psum(x * 0.1, "fsdp")

    text = compiled(lambda x: jax.lax.while_loop(lambda x: x.sum() > 1e-3, body, x), (8, 64))
    assert found(text)["all-reduce", "fsdp"] == (None, None, None, 4)


def test_a_step_sums_its_gradients_once_over_the_data():
    where = jax.NamedSharding(MESH, PartitionSpec(("data", "fsdp")))
    everywhere = jax.NamedSharding(MESH, PartitionSpec())
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=everywhere)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=where)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w))), out_shardings=everywhere)
    (only,) = collectives(gradient.lower(w, x).compile().as_text(), SHAPE)
    assert (only.kind, only.axes, only.bytes, only.gathers) == ("all-reduce", "data+fsdp", 64 * 32 * 4, False)


def test_a_sum_with_zeros_is_a_gather():
    text = """HloModule m

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}

%pad (p0: bf16[8,4], p1: bf16[2,4], p2: s32[]) -> bf16[8,4] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[2,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = bf16[8,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %z)
}

ENTRY %main (x: bf16[2,4], i: s32[], g: bf16[8,4]) -> (bf16[8,4], bf16[8,4]) {
  %x = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[] parameter(1)
  %g = bf16[8,4]{1,0} parameter(2)
  %zero = bf16[] constant(0)
  %zeros = bf16[8,4]{1,0} broadcast(%zero), dimensions={}
  %padded = bf16[8,4]{1,0} fusion(%zeros, %x, %i), kind=kLoop, calls=%pad
  %r = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) all-reduce(%padded, %g), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %t = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%r)
}
"""
    both = collectives(text, SHAPE)
    assert {(each.gathers, each.bytes, each.axes, each.wire_bytes) for each in both} == {
        (True, 64, "fsdp", 96),
        (False, 64, "fsdp", 96),
    }
    # A tuple that is exchanged in one go counts once.
    assert sum(each.count for each in both) == 1


def test_text_of_kernels_in_several_lines_does_not_end_a_computation():
    text = """HloModule m

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %k = f32[4]{0} custom-call(%x), custom_call_target="kernel", backend_config={
"config": {"a": 1}
}}, metadata={op_name="kernel"}
  ROOT %r = f32[4]{0} all-reduce(%k), replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""
    (only,) = collectives(text, SHAPE)
    assert (only.kind, only.axes, only.bytes) == ("all-reduce", "fsdp", 16)


def test_exchanges_between_slices_go_through_hosts():
    told = '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"'
    text = """HloModule m

ENTRY %main (x: bf16[16,8]) -> token[] {
  %x = bf16[16,8]{1,0} parameter(0)
  %t = token[] after-all()
  %g = bf16[16,8]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}
  %s = (bf16[16,8]{1,0}, u32[], token[]) send(%g, %t), is_host_transfer=true, frontend_attributes={TOLD}
  %o = (bf16[16,8]{1,0}, u32[], token[]) send(%g, %t), is_host_transfer=true
  ROOT %d = token[] send-done(%s), is_host_transfer=true
}
""".replace("TOLD", told)
    found = {(each.kind, each.axes, each.group): each for each in collectives(text, SHAPE, {"data": 2})}
    assert set(found) == {("all-reduce", "data", 2), ("all-reduce", "fsdp", 4)}
    assert {each.bytes for each in found.values()} == {256}
    # An axis that lies across slices in part has another part within.
    both = collectives(text, {"fsdp": 8}, {"fsdp": 2})
    assert {(each.axes, each.group) for each in both} == {("fsdp", 2), ("fsdp", 4)}


def test_exchanges_that_another_core_does_count():
    text = """HloModule m

%called (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8]
}, execution_thread="sparsecore"

ENTRY %main (x: f32[2], i: s32[]) -> f32[8] {
  %x = f32[2]{0} parameter(0)
  %i = s32[] parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[8]{0} broadcast(%zero), dimensions={}
  %padded = f32[8]{0} dynamic-update-slice(%zeros, %x, %i)
  %s = ((f32[8]{0}), f32[8]{0}) call-start(%padded), async_execution_thread="sparsecore", to_apply=%called
  ROOT %d = f32[8]{0} call-done(%s)
}
"""
    (only,) = collectives(text, SHAPE)
    assert (only.kind, only.axes, only.bytes, only.gathers) == ("all-reduce", "fsdp", 32, True)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups=[4,2]<=[2,4]T(1,0)", np.arange(8).reshape(2, 4).T.reshape(4, 2)),
        ("replica_groups=[2,4]<=[8]", np.arange(8).reshape(2, 4)),
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'x','z'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups={}", [list(range(8))]),
    ],
)
def test_groups_in_every_spelling(text, groups):
    assert replica_groups(text, 8) == np.asarray(groups).tolist()


def test_groups_that_follow_no_axes_have_no_name():
    text = """HloModule m

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={{0,5},{1,4},{2,7},{3,6}}
}
"""
    (only,) = collectives(text, SHAPE)
    assert (only.axes, only.group, only.wire_bytes) == (None, 2, 16)


def test_the_trip_count_of_a_scan():
    step = jax.jit(functools.partial(jax.lax.scan, lambda c, x: (c + jnp.sin(x), None)))
    text = step.lower(jnp.float32(0), jnp.zeros(37)).compile().as_text()
    module = hlo.parse(text)
    assert {run.times for run in module.runs()} >= {1, 37}
