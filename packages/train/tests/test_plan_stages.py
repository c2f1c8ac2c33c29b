"""Bytes, arithmetic and exchanges of layers in stages, by hand."""

from types import SimpleNamespace

import pytest

from styrax.core import DEFAULT_RULES, MeshConfig
from styrax.train.plan.blocks import block_at_work
from styrax.train.plan.predict import exchanges
from styrax.train.plan.shape import Widths
from styrax.train.plan.stages import Stages, held_by_stages, micro_tokens, passes, stages_of

# Of a token at a layer, in a dtype of two bytes: 8 numbers enter, and 112 and the norms in float32 are kept.
SIZES = {"layers": 8, "embed": 8, "heads": 16, "kv": 8, "mlp": 2, "vocab": 50, "block_numbers": 100, "head_numbers": 50}
ALL = (6 * 8 + 2 * 16 + 2 * 8 + 2 * 2 + 4 * 2) * 2 + 8 * 8
GRADIENTS = 1000


def widths(remat, **more):
    return Widths(**SIZES, gated=True, remat=remat, **more)


def stages(count=4, microbatches=8, repeats=1, **more):
    given = {"one_by_one": False, "recompute": False, "axes": "stage", "spread": True, **more}
    return Stages(count=count, microbatches=microbatches, repeats=repeats, **given)


def held(remat, filled, **more):
    return held_by_stages(widths(remat), filled, 10, 2, gradients=GRADIENTS, length=16, rows=False, **more)


A = 10 * 8 * 2  # bytes of a micro-batch between two layers


@pytest.mark.parametrize(
    ("remat", "filled", "kept"),
    [
        # Eleven ticks of two layers, or of what enters a stage.
        ("block", stages(), 11 * 2 * A),
        ("none", stages(), 11 * 2 * 10 * ALL),
        ("none", stages(recompute=True), 11 * A),
        # Nineteen ticks of one layer.
        ("block", stages(repeats=2), 19 * A),
        ("none", stages(repeats=2), 19 * 10 * ALL),
        # What went in, over the stages, however many micro-batches there are.
        ("none", stages(one_by_one=True), 8 * A / 4),
        ("block", stages(one_by_one=True, spread=False), 8 * A),
    ],
)
def test_what_a_stage_keeps(remat, filled, kept):
    assert held(remat, filled).kept == kept


def test_weights_that_are_cast_are_kept_at_each_tick_where_they_differ():
    assert held("none", stages(repeats=2), cast=True).kept == 19 * (10 * ALL + 100 * 2)
    assert held("block", stages(repeats=2), cast=True).kept == 19 * A
    assert held("none", stages(), cast=True).kept == 11 * 2 * 10 * ALL


def test_what_a_stage_holds_on_the_way_back():
    work = block_at_work(widths("block"), 10, 2)
    # Cotangents of all ticks and of what went in, what a tick kept of two layers, a copy of the gradients.
    assert held("block", stages()).back == 11 * A + 8 * A + 2 * A + GRADIENTS + work
    # Shares of what went in and came out and one micro-batch of each, seven on their way, one stage.
    assert held("block", stages(one_by_one=True)).back == 2 * (2 * A + A / 4) + 7 * A + 2 * A + GRADIENTS + work


def test_more_microbatches_of_the_same_rows_cost_1f1b_less():
    few, many = (held_by_stages(widths("none"), stages(microbatches=count, one_by_one=True), 80 / count, 2,
                                gradients=0, length=16, rows=False) for count in (8, 32))  # fmt: skip
    assert many.kept == few.kept
    assert many.back < few.back / 2


@pytest.mark.parametrize(
    ("remat", "filled", "expected"),
    [("none", None, 3), ("block", None, 4), ("none", stages(), 3), ("none", stages(recompute=True), 4),
     ("none", stages(one_by_one=True), 5), ("block", stages(one_by_one=True), 6)],
)  # fmt: skip
def test_passes_of_a_step(remat, filled, expected):
    assert passes(filled, remat) == expected


def program_on(**axes):
    mesh = MeshConfig(axes=axes).abstract(8)
    return SimpleNamespace(mesh=mesh, accumulate=1, tokens=64 * 16, rows=64, shards=8, rules=DEFAULT_RULES)


def test_a_configuration_says_how_its_pipeline_is_filled():
    filled = SimpleNamespace(stages=4, microbatches=8, repeats=1, kind="1f1b")
    config = SimpleNamespace(pipeline=lambda rows, mesh: filled, runtime=SimpleNamespace(recompute_stages=False))
    program = program_on(data=2, stage=4)
    found = stages_of(config, program)
    assert found == stages(one_by_one=True)
    assert (found.ticks, micro_tokens(program, found)) == (11, 64 * 16 / 2 / 8)
    assert stages_of(SimpleNamespace(), program) is None
    assert stages_of(SimpleNamespace(pipeline=lambda rows, mesh: None), program) is None


@pytest.mark.parametrize(("one_by_one", "sends"), [(False, 2), (True, 3)])
def test_exchanges_of_stages(one_by_one, sends):
    program, filled = program_on(data=2, stage=4), stages(one_by_one=one_by_one)
    found = {
        (each.kind, each.axes): each
        for each in exchanges(program, widths("block"), compute_bytes=2, stages=filled) or ()
    }
    one = 64 * 16 / 2 / 8 * 8 * 2
    assert found["collective-permute", "stage"].count == sends * 11
    assert found["collective-permute", "stage"].bytes == sends * 11 * one
    # Gradients of two layers at each tick, and of the head once.
    assert found["all-reduce", "data"].bytes == (11 * 2 * 100 + 50) * 2
    assert found["all-gather", "stage"].bytes == (3 * 11 * one if one_by_one else 2 * 8 * one)
