"""Plans of pipelines: for each schedule, bytes and arithmetic as predicted, beside those of the program itself."""

from importlib.util import find_spec

import jax
import pytest

from styrax.core import use_rules
from styrax.core.config import find_schema, read_config
from styrax.train.plan import plan
from styrax.train.plan.flops import count_flops
from styrax.train.plan.make import assess, case_of, compile_case
from styrax.train.plan.topology import parse, prepare

EIGHT = parse("cpu:8")
# Activations of some ten megabytes, of rows so short that attention's table of weights is small.
SIZES = [
    "model.num_layers=8", "model.embed_dim=128", "model.num_heads=4", "model.mlp_dim=512", "data.kind=synthetic",
    "data.vocab_size=256", "data.seq_len=16", "data.batch_size=1024", "mesh.axes={data=2,stage=4}",
    "model.runtime.microbatches=8",
]  # fmt: skip
SCHEDULES = {
    "gpipe": ["model.remat=none"],
    "gpipe, blocks recomputed": ["model.remat=block"],
    "stages recomputed": ["model.remat=none", "model.runtime.recompute_stages=true"],
    "interleaved": ["model.remat=none", "model.runtime.repeats=2"],
    "1f1b": ["model.remat=none", "model.runtime.schedule=1f1b"],
    "1f1b, blocks recomputed": ["model.remat=block", "model.runtime.schedule=1f1b"],
}


def case(*overrides):
    return case_of(read_config(find_schema("train"), None, [*SIZES, *overrides]), EIGHT)


@pytest.mark.parametrize("name", ["gpipe", "stages recomputed", "1f1b, blocks recomputed"])
def test_bytes_are_near_those_of_the_compiler(name):
    made = case(*SCHEDULES[name])
    found = assess(made, compile_case(made))
    assert found.compiled is not None
    assert found.predicted.total_bytes == pytest.approx(found.compiled.total_bytes, rel=0.1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_arithmetic_is_what_the_trace_counts(name):
    made = case(*SCHEDULES[name])
    program = made.program
    with use_rules(program.rules), jax.set_mesh(program.mesh):
        counted = count_flops(program.step, program.state, program.batch)
    predicted = assess(made).predicted.flops
    assert counted is not None and predicted is not None
    # What each stage does is counted once, of both ways of data, and so are all pairs of tokens. A block that is
    # computed once more leaves its last product out, which is a quarter of its arithmetic.
    rel = 0.1 if "blocks" in name else 0.05
    assert 2 * predicted == pytest.approx(counted, rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "shape",
    [
        ["mesh.axes={data=2,stage=4}"],
        ["mesh.axes={data=4,stage=2}", "model.runtime.microbatches=4"],
        ["train.precision=bf16"],
    ],
    ids=["four stages", "two stages", "bf16"],
)
def test_bytes_of_every_schedule(name, shape):
    made = case(*SCHEDULES[name], *shape)
    found = assess(made, compile_case(made))
    assert found.compiled is not None
    assert found.predicted.total_bytes == pytest.approx(found.compiled.total_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["gpipe", "gpipe, blocks recomputed", "1f1b, blocks recomputed"])
def test_bytes_are_near_those_of_a_tpus_compiler(name):
    prepare(parse("v5e:2x4"))
    larger = [
        "train.precision=bf16", "model.num_layers=16", "model.embed_dim=1024", "model.num_heads=8",
        "model.mlp_dim=4096", "data.vocab_size=1024", "data.seq_len=512", "data.batch_size=128",
        "model.runtime.microbatches=16",
    ]  # fmt: skip
    found = plan(read_config(find_schema("train"), None, [*SIZES, *larger, *SCHEDULES[name]]), topology="v5e:2x4")
    assert found.compiled is not None
    assert found.predicted.total_bytes == pytest.approx(found.compiled.total_bytes, rel=0.1)
