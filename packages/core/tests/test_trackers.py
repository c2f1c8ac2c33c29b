import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import Jsonl, UserError
from styrax.core.protocols import Tracker
from styrax.core.trackers import JsonlConfig, read


def test_records_and_bytes(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with Jsonl(path) as tracker:
        assert isinstance(tracker, Tracker)
        metrics = {"z": 1, "a": jnp.float32(0.1), "b": np.float64(1e-30), "n": jnp.array([1, 2]), "t": True}
        tracker.log(np.int64(3), metrics)
        assert len(path.read_bytes().splitlines()) == 1  # written at once
        tracker.log(4, {"x": math.nan, "y": -math.inf, "s": "é", "none": None})
    assert path.read_text(encoding="utf-8") == (
        '{"step": 3, "z": 1, "a": 0.10000000149011612, "b": 1e-30, "n": [1, 2], "t": true}\n'
        '{"step": 4, "x": "nan", "y": "-inf", "s": "é", "none": null}\n'
    )
    first, second = read(path)
    assert first["n"] == [1, 2]
    assert math.isnan(second["x"])
    assert second["y"] == -math.inf


def test_values_that_cannot_be_written(tmp_path):
    tracker = Jsonl(tmp_path / "m.jsonl")
    for metrics, message in (
        ({"step": 1}, "cannot be named 'step'"),
        ({"x": object()}, "metric 'x': expected a number, string or array, got object"),
        ({"x": {"a": 1}}, "metric 'x': expected a number, string or array, got dict"),
    ):
        with pytest.raises(ValueError, match=message):
            tracker.log(1, metrics)
    tracker.close()
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.log(1, {})
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_truncate(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = Jsonl(path)
    for step in range(5):
        tracker.log(step, {"loss": step / 2})
    tracker.flush()
    expected = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    tracker.truncate(2)
    assert path.read_bytes() == expected
    tracker.truncate(7)
    assert path.read_bytes() == expected
    tracker.log(3, {"loss": 9})
    tracker.close()
    assert [record["step"] for record in read(path)] == [0, 1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 2}', b"x" * 200_000])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    whole = b'{"step": 1, "loss": 2.0}\n'
    path.write_bytes(whole + torn)
    assert [record["step"] for record in read(path)] == [1]
    with Jsonl(path) as tracker:
        assert path.read_bytes() == whole
        tracker.log(2, {})
    assert path.read_bytes() == whole + b'{"step": 2}\n'
    path.write_bytes(torn)
    Jsonl(path).close()
    assert path.read_bytes() == b""


def test_a_line_that_is_no_record_goes_when_truncating(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n[1]\n{"step": 2}\n')
    assert [record["step"] for record in read(path)] == [1, 2]
    tracker = Jsonl(path)
    tracker.truncate(5)
    tracker.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_crash_while_truncating_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    tracker = Jsonl(path)
    for step in range(3):
        tracker.log(step, {})
    before = path.read_bytes()

    def crash(*_):
        raise OSError("power cut")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        tracker.truncate(0)
    assert path.read_bytes() == before


def test_config(tmp_path):
    tracker = JsonlConfig(name="x.jsonl").build(tmp_path)
    tracker.log(1, {"a": 1})
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"step": 1, "a": 1}
    with pytest.raises(UserError, match="no metrics file at"):
        read(tmp_path / "absent.jsonl")
