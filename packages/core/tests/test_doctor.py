import json
import time

import pytest

from styrax.core import cli
from styrax.core.commands import conflicts, doctor


def test_doctor_reports(styrax, capsys):
    done = styrax("doctor", "--json", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    report = json.loads(done.out)
    assert [d["platform"] for d in report["jax"]["devices"]] == ["cpu", "cpu"]
    assert report["environment"]["JAX_PLATFORMS"] == "cpu"
    assert report["versions"]["jax"]
    assert report["memory_bytes"] > 0
    assert done.code == (1 if report["conflicts"] else 0)

    doctor.show({**report, "conflicts": [], "environment": {"XLA_FLAGS": "--a [b] " + "x" * 200}})
    text = capsys.readouterr().out
    for part in ("machine", "versions", "environment", "known conflicts", "cpu:1", "--a [b]"):
        assert part in text
    assert text.rstrip().endswith("none")


def test_a_hung_driver_does_not_hang_the_doctor(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE", "import time; time.sleep(60)")
    began = time.monotonic()
    assert "within 0.5 s" in doctor.devices(0.5)["error"]
    assert time.monotonic() - began < 10


def test_a_driver_that_fails_gives_its_reason(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE", "raise RuntimeError('no device')")
    assert doctor.devices(30) == {"error": "RuntimeError: no device"}


@pytest.mark.parametrize(
    ("installed", "line", "fits"),
    [
        ("0.10.3.dev20260101", "jax>=0.10.2", True),  # a nightly build of a newer version
        ("0.10.2.dev1", "jax>=0.10.2", False),
        ("0.10.1", 'jax>=0.10.2; sys_platform == "no such system"', True),
        ("0.10.1", "jax[cuda13] (>=0.10.2,<0.11)", False),
        ("a build of mine", "jax>=0.10.2", True),  # unknown is not a conflict
        ("0.10.1", "jax >= = 0.10.2", True),
    ],
)
def test_requirements_as_they_are_written(installed, line, fits):
    found = conflicts.conflicts({"styrax-core": "0.1", "jax": installed}, {"styrax-core": [line]})
    assert bool(found) is not fits


def test_conflicts():
    versions = {"styrax-core": "0.1", "jax": "0.12.0", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1"}
    requirements = {
        "styrax-core": ["jax>=0.10.2", 'jaxlib>=99; extra == "x"', 'jax>=99; python_version < "3.8"'],
        "jax": ["jaxlib<=0.12.0,>=0.12.0"],
    }
    assert conflicts.conflicts(versions, requirements) == [
        'jax 0.12.0 needs jaxlib>=0.12.0,<=0.12.0, but 0.10.2 is installed: pip install "jaxlib>=0.12.0,<=0.12.0"',
        "jax-cuda12-plugin 0.10.1 and jaxlib 0.10.2 differ: pip install jax-cuda12-plugin==0.10.2",
    ]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e9"])
def test_a_timeout_that_is_none(capsys, seconds):
    assert cli.main(["doctor", f"--timeout={seconds}"]) == 2
    assert "--timeout: expected seconds, more than 0" in capsys.readouterr().err
