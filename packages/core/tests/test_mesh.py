import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from styrax.core import DEFAULT_RULES, MeshConfig, UserError
from styrax.core.mesh import idle_axes, shardings, spec

EIGHT = MeshConfig(axes={"data": 2, "fsdp": 2, "tensor": 2}).abstract(8)


def test_build_uses_all_devices():
    mesh = MeshConfig().build()
    assert dict(mesh.shape) == {"data": len(jax.devices())}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert dict(MeshConfig(axes={"fsdp": 1, "tensor": -1}).build(jax.devices()[:1]).shape) == {"fsdp": 1, "tensor": 1}


def test_abstract_needs_no_devices():
    mesh = MeshConfig(axes={"fsdp": -1, "tensor": 8}).abstract(4096)
    assert dict(mesh.shape) == {"fsdp": 512, "tensor": 8}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ({"data": -1, "tensor": 3}, 8, "mesh data=-1, tensor=3: 8 device(s) do not divide by 3"),
        ({"data": 2, "fsdp": 2}, 8, "mesh data=2, fsdp=2 needs 4 devices, got 8"),
    ],
)
def test_sizes_that_do_not_fit(axes, devices, message):
    with pytest.raises(UserError) as caught:
        MeshConfig(axes=axes).abstract(devices)
    assert str(caught.value).startswith(message)


def test_bad_axes_are_all_named():
    with pytest.raises(ValueError) as caught:
        MeshConfig(axes={"a": 0, "b": -2, "c": -1, "d": -1})
    assert str(caught.value).splitlines() == [
        "axis 'a' has size 0; axis 'b' has size -2: expected 1 or more, or -1 for all devices that are left",
        "axes c, d are all -1: expected at most one",
    ]
    with pytest.raises(ValueError, match="axes is empty"):
        MeshConfig(axes={})


def test_values_from_python_are_checked():
    with pytest.raises(UserError, match=r'^axes.data: expected integer, got 2.5\n.*fsdp: expected integer, got "2"$'):
        MeshConfig(axes={"data": 2.5, "fsdp": "2"})  # pyright: ignore[reportArgumentType]


def test_an_axis_that_no_rule_uses_is_named():
    assert idle_axes(name for rule in DEFAULT_RULES.values() for name in rule) == []
    assert idle_axes(["data", "dta", "zone"]) == [
        f"{name}: no rule splits anything over this mesh axis{hint}; the axes with rules are "
        "data, fsdp, expert, stage, context, tensor"
        for name, hint in (("dta", " (did you mean 'data'?)"), ("zone", ""))
    ]
    assert idle_axes(["stage", "data"], {"layers": ("stage",)}) == [
        "data: no rule splits anything over this mesh axis; the axes with rules are stage"
    ]


@given(st.lists(st.sampled_from([*DEFAULT_RULES, None]), max_size=4))
def test_a_partition_uses_no_axis_twice_and_none_that_the_mesh_lacks(axes):
    partition = spec(tuple(axes), DEFAULT_RULES, EIGHT)
    assert len(partition) == len(axes)
    used = [name for entry in partition if entry for name in ([entry] if isinstance(entry, str) else entry)]
    assert len(used) == len(set(used))
    assert set(used) <= set(EIGHT.axis_names)


def test_spec():
    assert tuple(spec(("batch", "seq", "embed"), DEFAULT_RULES, EIGHT)) == (("data", "fsdp"), None, None)
    assert tuple(spec(("embed", "mlp"), DEFAULT_RULES, EIGHT)) == ("fsdp", "tensor")
    with pytest.raises(UserError, match=r"no rule for logical axis 'embd' \(did you mean 'embed'\?\)"):
        spec(("embd",), DEFAULT_RULES, EIGHT)


def test_shardings():
    like = {
        "a": {"kernel": jax.ShapeDtypeStruct((4, 6), jnp.float32)},
        "scale": jax.ShapeDtypeStruct((4,), jnp.float32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    axes = {"**/kernel": ("embed", "mlp"), "scale": (None,), "unused/*": ("embed",)}
    got = shardings(like, axes, DEFAULT_RULES, EIGHT)
    assert tuple(got["a"]["kernel"].spec) == ("fsdp", "tensor")
    assert got["a"]["kernel"].mesh == EIGHT
    assert tuple(got["scale"].spec) == (None,)
    assert tuple(got["step"].spec) == ()


def test_all_problems_with_shardings_are_listed():
    like = {
        "odd": jax.ShapeDtypeStruct((3, 5), jnp.float32),
        "rank": jax.ShapeDtypeStruct((4,), jnp.float32),
        "rule": jax.ShapeDtypeStruct((4,), jnp.float32),
        "lost": jax.ShapeDtypeStruct((4,), jnp.float32),
        "batch": jax.ShapeDtypeStruct((6,), jnp.float32),
    }
    axes = {"odd": ("embed", "mlp"), "rank": ("embed", None), "rule": ("embd",), "batch": ("batch",)}
    with pytest.raises(UserError) as caught:
        shardings(like, axes, DEFAULT_RULES, EIGHT)
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 problem(s) with shardings on {'data': 2, 'fsdp': 2, 'tensor': 2}:"
    assert lines[1:4] == [
        "  batch: dimension 0 (batch) is 6, not divisible by 4 = data 2 x fsdp 2",
        "  lost: no pattern gives its axes; shape (4,)",
        "  odd: dimension 0 (embed) is 3, not divisible by 2 = fsdp 2",
    ]
    assert lines[4] == "  odd: dimension 1 (mlp) is 5, not divisible by 2 = tensor 2"
    assert lines[5] == "  rank: 2 axes ('embed', None) for 1 dimensions (4,)"
    assert lines[6].startswith("  rule: no rule for logical axis 'embd'")


def test_nnx_states_keep_their_structure():
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 6, rngs=nnx.Rngs(0))), nnx.Param)
    got = shardings(params, {"kernel": ("embed", "mlp"), "bias": ("mlp",)}, DEFAULT_RULES, EIGHT)
    assert jax.tree.structure(got) == jax.tree.structure(params)


class Device:
    """What a mesh asks of a device of a slice; enough for `create_hybrid_device_mesh` on one without coordinates."""

    platform, device_kind, process_index = "gpu", "a card", 0

    def __init__(self, number, slice_index):
        self.id, self.slice_index = number, slice_index

    def __repr__(self):
        return f"{self.slice_index}/{self.id}"


def test_axes_across_slices_are_contiguous_groups_of_cpus():
    mesh = MeshConfig(axes={"data": 4, "fsdp": 2}, dcn={"data": 2}).build(jax.devices()[:8])
    assert [[device.id for device in row] for row in mesh.devices] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert set(mesh.axis_types) == {AxisType.Auto}
    both = MeshConfig(axes={"fsdp": 4, "data": 2}, dcn={"data": 2}).build(jax.devices()[:8])
    assert [[device.id for device in row] for row in both.devices] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("axes", "dcn"),
    [
        ({"data": 2, "fsdp": -1}, {"data": 2}),
        ({"fsdp": 8}, {"fsdp": 2}),
        ({"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 2}),
        ({"tensor": 2, "data": -1}, {"data": 2}),
    ],
)
def test_a_slice_is_one_index_of_the_outer_part_of_its_axis(axes, dcn):
    devices = [Device(number, slice_index=number % 2) for number in range(8)]
    config = MeshConfig(axes=axes, dcn=dcn)
    mesh = config.build(devices)
    (across,) = (name for name, ways in dcn.items() if ways == 2)
    half = mesh.shape[across] // 2
    for place, device in zip(np.ndindex(mesh.devices.shape), mesh.devices.flat):
        assert device.slice_index == place[mesh.axis_names.index(across)] // half
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_devices_in_other_slices_than_dcn_says():
    devices = [Device(number, slice_index=number // 4) for number in range(8)]
    with pytest.raises(UserError, match=r"mesh.dcn says data=4 .* 4 slice\(s\), and the devices are in 2; set it"):
        MeshConfig(axes={"data": 4, "fsdp": 2}, dcn={"data": 4}).build(devices)
    with pytest.raises(UserError, match=r"mesh.dcn says nothing across slices.*dcn = { data = 2 }"):
        MeshConfig(axes={"data": 8}).build(devices)


@pytest.mark.parametrize(
    ("axes", "dcn", "message"),
    [
        ({"data": 4}, {"dat": 2}, "dcn.dat: no such axis (did you mean 'data'?); the axes are data"),
        ({"data": 4}, {"data": 3}, "dcn.data: 3 ways across slices do not divide the axis, which is 4"),
        ({"data": 4}, {"data": 0}, "dcn.data: expected 1 or more ways across slices, got 0"),
    ],
)
def test_ways_across_slices_that_do_not_fit(axes, dcn, message):
    with pytest.raises(UserError) as caught:
        MeshConfig(axes=axes, dcn=dcn)
    assert str(caught.value).startswith(message)


def test_an_axis_that_takes_the_rest_must_divide_over_slices():
    with pytest.raises(UserError, match="ways across slices do not divide data=3 by 2"):
        MeshConfig(axes={"data": -1, "fsdp": 2}, dcn={"data": 2}).sizes(6)


@pytest.mark.parametrize(
    ("axes", "slices", "expected"),
    [
        ({"fsdp": -1}, 4, {"data": 4, "fsdp": -1}),
        ({"data": -1}, 4, {"data": -1}),
        ({"data": 8, "fsdp": -1}, 4, {"data": 8, "fsdp": -1}),
        ({"data": 3, "fsdp": -1}, 4, {"data": 12, "fsdp": -1}),
    ],
)
def test_data_goes_over_slices_where_nothing_is_said(axes, slices, expected):
    config = MeshConfig(axes=axes)
    assert config.over_slices(1) is config
    spread = config.over_slices(slices)
    assert (spread.axes, spread.dcn, spread.slices) == (expected, {"data": slices}, slices)
    assert spread.over_slices(8) is spread
