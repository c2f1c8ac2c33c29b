import sys
from types import SimpleNamespace

import pytest

from styrax.train import throughput
from styrax.train.throughput import Pace, host_bytes, memory, model_flops, peak_flops, speeds, utilisation


def pace(*gaps, tokens=100.0):
    made, now = Pace(), 0.0
    made.step(tokens, now)
    for gap in gaps:
        now += gap
        made.step(tokens, now)
    return made


def test_a_pause_is_no_part_of_the_pace():
    made = pace(1.0, 1.0)
    made.pause()
    made.step(100.0, 1000.0)
    made.step(100.0, 1001.0)
    assert made.tokens_per_second == pytest.approx(100.0)
    assert Pace().tokens_per_second is Pace().seconds_per_step is None


def test_speeds_are_those_of_the_definition():
    facts = {"rows": 8, "flops_per_token": {"causal": 6e9, "full": 7e9}, "peak_flops": 1e12, "devices": 4}
    found = speeds(pace(*[1.0] * 9, 3.0), facts)
    assert found == {
        "tokens_per_second": pytest.approx(1000 / 12, rel=1e-3),
        "rows_per_second": 8.0,
        "step_seconds": 1.0,
        "step_seconds_p90": 3.0,
        "mfu_causal": pytest.approx(1000 / 12 * 6e9 / 4e12, rel=1e-3),
        "mfu_full": pytest.approx(1000 / 12 * 7e9 / 4e12, rel=1e-3),
    }


@pytest.mark.parametrize("lacking", ["peak_flops", "flops_per_token"])
def test_what_is_not_known_is_no_utilisation(lacking):
    facts = {"flops_per_token": {"causal": 6e9, "full": 7e9}, "peak_flops": 1e12, "devices": 4, lacking: None}
    assert not [name for name in speeds(pace(1.0), facts) if name.startswith("mfu")]
    assert speeds(Pace(), facts) == {}
    assert utilisation(None, 1.0, 1.0, 1) is None


def test_no_device_borrows_the_peak_of_another():
    assert peak_flops("NVIDIA H100 80GB HBM3") == pytest.approx(989.5e12)
    assert peak_flops("NVIDIA H100 80GB HBM4") is peak_flops("cpu") is peak_flops("AMD Instinct MI350X") is None


def test_flops_are_asked_of_a_model_that_can_tell():
    model = SimpleNamespace(train_flops_per_token=lambda *, vocab_size, length: {"causal": vocab_size, "full": length})
    assert model_flops(model, vocab_size=3, length=5) == {"causal": 3.0, "full": 5.0}
    assert model_flops(model, vocab_size=3, length=None) is None
    assert model_flops(SimpleNamespace(), vocab_size=3, length=5) is None


def test_memory_is_that_of_the_fullest_device_or_not_known(monkeypatch):
    devices = [SimpleNamespace(memory_stats=lambda s=s: s) for s in ({"peak_bytes_in_use": 5}, None, {})]
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    assert memory()["device_bytes"] == 5
    monkeypatch.setattr("jax.local_devices", lambda: devices[1:])
    assert memory()["device_bytes"] is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_host_memory_is_that_of_the_kernel():
    with open("/proc/self/status") as file:  # noqa: PTH123
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert host_bytes() == pytest.approx(peak * 1024, rel=0.2)


def test_the_machine_says_its_kind():
    assert throughput.machine()["device_kind"] and throughput.machine()["devices"] >= 1
