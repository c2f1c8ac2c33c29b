"""Topologies, peak figures, rooflines and advice: what of a plan needs no program."""

import dataclasses
import math

import pytest

from styrax.core import UsageError, UserError
from styrax.train.plan.advice import Facts, advice
from styrax.train.plan.chips import CHIPS, chip_named, peak_flops
from styrax.train.plan.collectives import exchange
from styrax.train.plan.estimate import journey, roofline
from styrax.train.plan.program import LONGEST, read_compiled
from styrax.train.plan.topology import find, parse


@pytest.mark.parametrize(
    ("text", "slices", "chips", "devices"),
    [
        ("v5p:8x8x8", 1, 512, 512),
        ("v6e:16x16", 4, 1024, 1024),
        ("tpu7x:4x4x4", 1, 64, 128),
        ("v4:2x2x1", 1, 4, 8),
        (" V5P:4x4x4 ", 1, 64, 64),
        ("cpu:8", 1, 8, 8),
        ("cpu:4", 2, 8, 8),
    ],
)
def test_topologies(text, slices, chips, devices):
    topology = parse(text, slices=slices)
    assert (topology.chips, topology.devices) == (chips, devices)
    assert parse(str(topology), slices=slices) == topology


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p:3x3", "topology 'v5p:3x3': expected v5p:AxBxC, with 3 size(s) of 1 or more"),
        ("v5:4x4x4", "topology 'v5:4x4x4': no accelerator 'v5' (did you mean 'v5p'?); known: v2, v3"),
        ("tpu7:4x4x4", "no accelerator 'tpu7' (did you mean 'tpu7x'?)"),
        ("v5p-128", "no accelerator 'v5p-128' (did you mean"),
        ("v6e", "expected v6e:AxB, with 2 size(s) of 1 or more; the shape of the slice is needed"),
        ("v6e:16x0", "expected v6e:AxB"),
        ("v6e:16x-2", "expected v6e:AxB"),
        ("cpu:2x2", "expected cpu:N, with 1 size(s)"),
    ],
)
def test_bad_topologies(text, message):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_more_cpus_than_there_are():
    with pytest.raises(UserError, match="cpu:1000 needs 1000 CPU devices, and JAX has started with"):
        find(parse("cpu:1000"))


def test_every_chip_has_its_source_and_one_kind():
    assert len({chip.device_kind for chip in CHIPS}) == len({chip.name for chip in CHIPS}) == len(CHIPS)
    assert all(chip.source.startswith("https://") for chip in CHIPS)
    # Arithmetic a byte of memory: two orders of magnitude, or a unit is wrong.
    assert all(50 < chip.flops / chip.hbm_bandwidth < 1000 for chip in CHIPS)


def test_an_unknown_chip_has_no_peak():
    assert peak_flops("NVIDIA H100") is None
    assert peak_flops("NVIDIA GeForce RTX 4090") is None
    assert peak_flops("TPU v6 lite") == 918e12


def test_a_roofline_by_hand():
    chip = chip_named("v5p")
    assert chip is not None
    gather = exchange("all-gather", "fsdp", 4, 800e9, 1)
    across = exchange("all-reduce", "data", 2, 12.5e9, 1)
    found = roofline(chip, flops=459e12 / 2, bytes_accessed=2765e9, exchanged=(gather, across), across=("data",))
    assert (found.compute, found.memory, found.network, found.slices) == (0.5, 1.0, 1.0, 2.0)
    assert (found.seconds, found.bound) == (2.0, "slices")
    # A device of a chip with two has half of it all.
    seven = chip_named("tpu7x")
    assert seven is not None
    assert roofline(seven, flops=2307e12, bytes_accessed=None, exchanged=()).compute == 2.0


def test_what_is_not_known_stays_so():
    nothing = roofline(None, flops=1e12, bytes_accessed=1e9, exchanged=())
    assert {nothing.compute, nothing.memory, nothing.network, nothing.slices, nothing.seconds, nothing.bound} == {None}
    unknown = dataclasses.replace(exchange("all-gather", "fsdp", 4, 8, 1), wire_bytes=None)
    chip = chip_named("v6e")
    assert roofline(chip, flops=1.0, bytes_accessed=1.0, exchanged=(unknown,)).network is None
    assert roofline(chip, flops=None, bytes_accessed=1.0, exchanged=()).seconds is None
    # tpu7x has no figure of the network between slices in its data sheet.
    slow = exchange("all-reduce", "data", 2, 8, 1)
    seven = roofline(chip_named("tpu7x"), flops=1.0, bytes_accessed=1.0, exchanged=(slow,), across=("data",))
    assert seven.slices is None


def test_days_and_cost_by_hand():
    # 15e12 tokens of 6 x 8e9 operations on 64 chips of 459e12 at half: 15e12 * 48e9 / (64 * 229.5e12) s = 567 days.
    run = journey(
        tokens=15e12, tokens_per_step=2**20, step_seconds=2.0, flops_per_token=48e9, peak=459e12, chips=64, price=4.2
    )
    assert run.steps == math.ceil(15e12 / 2**20)
    assert run.days == pytest.approx(run.steps * 2 / 86400)
    assert run.days_at_half == pytest.approx(567.36, abs=0.1)
    assert run.chip_hours == pytest.approx(567.36 * 24 * 64, rel=1e-3)
    assert run.cost is not None
    assert run.chip_hours is not None
    assert run.cost == pytest.approx(run.chip_hours * 4.2)
    known = dataclasses.asdict(dataclasses.replace(run))
    none = journey(
        tokens=1e9, tokens_per_step=10, step_seconds=None, flops_per_token=None, peak=None, chips=1, price=1.0
    )
    assert set(dataclasses.asdict(none)) == set(known)
    assert (none.days, none.days_at_half, none.chip_hours, none.cost) == (None,) * 4


@pytest.mark.parametrize("seconds", [-3.0, 0.0, float("nan"), float("inf"), 2 * LONGEST, None, "fast"])
def test_absurd_estimates_of_the_compiler_are_not_told(seconds):
    cost = {"flops": -1.0, "bytes accessed": 4e9, "optimal_seconds": seconds}
    for given in (cost, [cost]):
        found = read_compiled(None, given, 1.0)
        assert (found.seconds, found.flops, found.bytes_accessed) == (None, None, 4e9)
        assert found.total_bytes is None
    assert read_compiled(None, {"optimal_seconds": 0.05}, 1.0).seconds == 0.05
    assert read_compiled(None, None, 1.0).flops is None


FULL = Facts(
    groups={"params": 32, "optimizer": 64, "gradients": 32, "activations": 400, "temporaries": 100, "batch": 1},
    total=629, hbm_bytes=300, rows=64, accumulate=1, shards=16, devices=16, remat="none", axes={"fsdp": 16},
    split=1 / 16,
)  # fmt: skip


def test_advice_is_given_only_where_it_is_needed():
    assert advice(dataclasses.replace(FULL, hbm_bytes=1000)) == ()
    assert advice(dataclasses.replace(FULL, hbm_bytes=None)) == ()
    assert advice(dataclasses.replace(FULL, total=None)) == ()


def test_the_advice_with_the_most_effect_comes_first():
    first, *rest = advice(FULL)
    assert first.startswith("it needs 0.00 GB a device")
    assert rest[0].startswith('recompute more: model.remat="block"')
    assert any("train.accumulate=2" in line for line in rest)
    assert any("data.batch_size=32" in line for line in rest)
    assert not any("split the parameters" in line for line in rest)
    replicated = dataclasses.replace(
        FULL, split=1.0, remat="block", groups={"params": 200, "optimizer": 400, "gradients": 200, "activations": 10}
    )
    assert "mesh.axes.fsdp=-1" in advice(replicated)[1]
    one_row = dataclasses.replace(FULL, rows=16, remat="block")
    assert any("mesh.axes.tensor=4" in line for line in advice(one_row))
