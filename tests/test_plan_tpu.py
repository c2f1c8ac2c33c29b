"""Plans by the TPU's own compiler, on a machine without a TPU; libtpu comes with the extra `tpu-plan` of styrax-train.

CI: `python -m pytest -m slow tests/test_plan_tpu.py` in an environment with libtpu.
"""

import json
from importlib.util import find_spec

import pytest

from styrax.core import UsageError
from styrax.core.config import find_schema, read_config
from styrax.train.plan import plan
from styrax.train.plan.topology import find, parse, prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed"),
]


def planned(name, topology, *overrides, slices=1):
    prepare(parse(topology, slices=slices))
    resolved = read_config(find_schema("train"), name, overrides).check()
    return plan(resolved, topology=topology, slices=slices)


def check(found):
    """What the compiler says of a TPU, beside what was predicted."""
    compiled, predicted = found.compiled, found.predicted
    assert found.failure is None
    assert compiled is not None
    assert compiled.argument_bytes == pytest.approx(predicted.argument_bytes, rel=0.01)
    assert compiled.temp_bytes is not None
    assert predicted.temp_bytes is not None
    said = compiled.argument_bytes + compiled.temp_bytes
    assert predicted.argument_bytes + predicted.temp_bytes == pytest.approx(said, rel=0.1)
    assert found.fits is True
    assert compiled.seconds is None or 0 < compiled.seconds < 10
    # One loop body of each kind is counted once, so the compiler's arithmetic is below the whole step's.
    assert compiled.flops is not None
    assert predicted.flops is not None
    assert 0 < compiled.flops < 1.2 * predicted.flops
    assert found.collectives
    assert all(each.count for each in found.collectives)
    names = {each.axes for each in found.collectives}
    assert names <= {"data", "fsdp", "expert", "data+fsdp", "fsdp+expert"}
    json.dumps(found.to_dict(), allow_nan=False)
    return names


@pytest.mark.parametrize(
    ("name", "topology", "axis"), [("gpt2-124m", "v5e:4x4", "data"), ("llama3-1b", "v6e:4x8", "fsdp")]
)
def test_recipes_on_their_topologies(name, topology, axis):
    assert axis in check(planned(name, topology))


def test_slices_exchange_gradients_over_the_data_axis():
    found = planned("llama3-8b", "v6e:16x16", "data.batch_size=2048", slices=4)
    names = check(found)
    assert (found.mesh, found.dcn) == ({"data": 4, "fsdp": 256}, {"data": 4})
    assert any(name is not None and "data" in name.split("+") for name in names)


def test_llama3_8b_as_measured():
    found = planned("llama3-8b", "v5p:4x4x4")
    check(found)
    assert found.compiled is not None
    # State: float32 parameters and two moments of 8,030,261,248 numbers over 64 chips, and the batch beside it.
    assert found.compiled.argument_bytes == pytest.approx(12 * 8_030_261_248 / 64, rel=0.005)
    # MaxText 0.2.5 at the same shapes, dtypes, optimizer and recomputation takes 7.714 GB.
    assert found.compiled.temp_bytes is not None
    assert found.compiled.temp_bytes <= 7.714e9


def test_a_batch_that_does_not_fit_is_told_with_the_compilers_words():
    found = planned("llama3-1b", "v6e:2x2", "data.batch_size=256", "model.remat=none")
    assert found.fits is False
    assert found.advice
    assert found.failure is None or "memory" in found.failure.lower()


def test_a_shape_that_is_no_slice_is_refused():
    prepare(parse("v5p:3x3x3"))
    with pytest.raises(UsageError, match=r"the TPU compiler refuses it: Topology layout.*try v5p:4x4x3"):
        find(parse("v5p:3x3x3"))
