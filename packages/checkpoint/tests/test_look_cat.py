"""`styrax checkpoint cat`: what it prints is what was saved."""

import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig

NOISE = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
RUN = {"step": 1, "a/b": [{"ü": "ü"}, 2.5], "empty": {}}


def big_files(folder):
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1000]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cat")
    params = {
        "noise": NOISE,
        "layers": [{"b": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)}],
        "odd.key/x": np.array([1 + 2j]),
        "bits": np.arange(-4, 4).astype(ml_dtypes.int4),
        "some": np.array([0.1, np.nan, -np.inf]),
        "key": jax.random.key(7),
        "rate": 1e-3,
        "name": "two\nlines",
        "raw": b"\0\xff",
        "none": np.zeros((0, 2)),
        "number": np.int64(-3),
    }
    with CheckpointConfig(pack_below=1000).build(folder) as store:
        store.save(1, {"params": params, "alone": np.arange(4), "run": RUN})
        store.save(2, {"params": {"noise": NOISE * 2}})
    return folder


def test_numbers(directory, look):
    found = look("cat", f"{directory}@1", "params/layers/0/b")
    assert (found.code, found.out) == (0, "params/layers/0/b: bfloat16[2, 3], 12 B\n[[0 1 2]\n [3 4 5]]\n")
    assert look("cat", directory, 1, "alone").out == "alone: int64[4], 32 B\n[0 1 2 3]\n"
    assert look("cat", directory, 1, "params/bits").out.endswith("\n[-4 -3 -2 -1 0 1 2 3]\n")
    assert look("cat", directory, 1, "params/odd.key%2Fx").out.endswith("\n[1.+2.j]\n")
    assert look("cat", directory, 1, "params/none").out.endswith("\n[]\n")
    assert look("cat", directory, 1, "params/number").out.endswith("\n-3\n")
    key = np.asarray(jax.random.key_data(jax.random.key(7)))
    assert (
        f" key of {jax.random.key_impl(jax.random.key(7))}, 8 B\n{key}\n" in look("cat", directory, 1, "params/key").out
    )


def test_every_digit_is_printed(directory, look):
    text = look("cat", directory, "params/noise", "--limit", "2000").out  # the newest step
    words = text.partition("\n")[2].replace("[", " ").replace("]", " ").split()
    assert np.array_equal(np.array(words, np.float32).reshape(40, 30), NOISE * 2)


@pytest.mark.parametrize("limit", [1, 9, 100, 1199])
def test_no_more_than_was_asked_for(directory, look, limit):
    text = look("cat", f"{directory}@1", "params/noise", "--limit", limit).out
    words = text.partition("\n")[2].replace("[", " ").replace("]", " ").replace("...", " ").split()
    assert 1 <= len(words) <= max(limit, 4)
    assert np.float32(words[0]) == NOISE[0, 0] and np.float32(words[-1]) == NOISE[-1, -1]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("0:4,::10", np.s_[0:4, ::10]),
        ("-1", np.s_[-1]),
        (" ..., -2: ", np.s_[..., -2:]),
        ("3, 4", np.s_[3, 4]),
        ("35:99:-1, 5", np.s_[35:99:-1, 5]),
    ],
)
def test_slices(directory, look, text, index):
    found = json.loads(look("cat", f"{directory}@1", "params/noise", f"--slice={text}", "--json").out)
    assert np.array_equal(np.array(found["values"], np.float32).reshape(found["shape"]), NOISE[index])


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("99", 1, "has shape [40, 30], --slice 99: index 99 is out of bounds"),
        ("0,0,0", 1, "too many indices"),
        ("a", 2, "--slice: 'a' is neither a number"),
        ("::0", 2, "has a step of 0"),
        ("...,...", 2, "can stand there once"),
        ("__import__('os')", 2, "is neither a number"),
    ],
)
def test_slices_that_are_none(directory, look, text, code, message):
    found = look("cat", f"{directory}@1", "params/noise", f"--slice={text}")
    assert (found.code, found.out) == (code, "") and message in found.err


def test_statistics(directory, look):
    lines = look("cat", f"{directory}@1", "params/noise", "--stats").out.splitlines()
    assert lines[0] == "params/noise: float32[40, 30], 4.8 kB"
    found = dict(line.split() for line in lines[1:])
    wide = NOISE.astype(np.float64)
    expected = {"min": wide.min(), "max": wide.max(), "mean": wide.mean(), "std": wide.std()}
    assert {name: float(found.pop(name)) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert found == {"count": "1200", "zeros": "0", "nans": "0", "infs": "0"}
    record = json.loads(look("cat", f"{directory}@1", "params/some", "--stats", "--json").out)
    assert record["stats"] == {
        "count": 3, "zeros": 0, "nans": 1, "infs": 1, "min": 0.1, "max": 0.1, "mean": 0.1, "std": 0.0
    }  # fmt: skip


def test_as_json(directory, look):
    record = json.loads(look("cat", f"{directory}@1", "params/some", "--json").out)
    assert record["values"] == [0.1, "nan", "-inf"]
    assert (record["path"], record["dtype"], record["shape"], record["kind"]) == (
        "params/some",
        "float64",
        [3],
        "array",
    )
    record = json.loads(look("cat", f"{directory}@1", "params/odd.key%2Fx", "--json").out)
    assert record["values"] == [[1.0, 2.0]]
    assert json.loads(look("cat", f"{directory}@1", "params/noise", "--json").out)["values"] is None
    assert json.loads(look("cat", f"{directory}@1", "params/rate", "--json").out)["value"] == 1e-3


def test_values_of_python(directory, look):
    assert look("cat", f"{directory}@1", "params/rate").out == "0.001\n"
    assert look("cat", f"{directory}@1", "params/name").out == "two\nlines\n"
    assert look("cat", f"{directory}@1", "params/raw").out == "b'\\x00\\xff'\n"


def test_items_that_are_json(directory, look):
    assert json.loads(look("cat", f"{directory}@1", "run").out) == RUN
    assert look("cat", f"{directory}@1", "run/step").out == "1\n"
    assert json.loads(look("cat", f"{directory}@1", "run/a%2Fb/0").out) == {"ü": "ü"}
    assert look("cat", f"{directory}@1", "run/a%2Fb/1", "--json").out == "2.5\n"


def test_bytes(directory, env):
    def raw(*arguments):
        command = [sys.executable, "-m", "styrax.core.cli", "checkpoint", "cat", f"{directory}@1", *arguments, "--raw"]
        done = subprocess.run(command, capture_output=True, env=env, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    assert raw("params/layers/0/b", "--slice", ":,1") == np.array([1, 4], ml_dtypes.bfloat16).tobytes()
    assert json.loads(raw("run")) == RUN


def test_bytes_are_not_for_a_terminal(directory, look, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    found = look("cat", f"{directory}@1", "params/noise", "--raw")
    assert (found.code, found.out) == (2, "") and "a terminal cannot show" in found.err


def test_mistakes_are_told(directory, look):
    for arguments, code, text in (
        (("params/noisy",), 1, "no leaf 'params/noisy' in .*00000001 (did you mean 'params/noise'?)"),
        (("params",), 1, "params is no leaf; below it are params/bits, params/key, params/layers/0/b, "),
        (("params/layers/0",), 1, "below it are params/layers/0/b"),
        (("param",), 1, "(did you mean 'params'?)"),
        (("run/stp",), 1, "no 'stp' in run of .*(did you mean 'step'?)"),
        (("run/a%2Fb/2",), 1, "no '2' in run/a%2Fb of"),
        (("run/step/x",), 1, "no 'x' in run/step of"),
        (("run", "--stats"), 2, "run is JSON, which has no"),
        (("params/rate", "--slice", "0"), 2, "params/rate is a Python float, which has no"),
        (("params/noise", "--limit", "0"), 2, "--limit: expected"),
        (("params/noise", "--raw", "--json"), 2, "--raw and --json cannot"),
        (("params/noise", "--raw", "--stats"), 2, "not allowed with argument"),
    ):
        found = look("cat", f"{directory}@1", *arguments)
        assert (found.code, found.out) == (code, "")
        for part in text.split(".*"):
            assert part in found.err
    assert "there are 1, 2" in look("cat", directory, 3, "params").err


def test_damage_is_not_printed(tmp_path, look):
    with CheckpointConfig(pack_below=1000).build(tmp_path) as store:
        store.save(1, {"params": {"large": NOISE, "small": np.arange(3), "other": np.ones(2)}, "run": {"a": 1}})
    for path in big_files(tmp_path / "00000001/orbax/params"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    leaves = tmp_path / "00000001/aux/leaves.bin"
    data = bytearray(leaves.read_bytes())
    data[next(i for i in range(len(data)) if data[i : i + 24] == np.arange(3).tobytes())] ^= 1
    leaves.write_bytes(data)
    (tmp_path / "00000001/aux/run.json").write_text('{"a": 2}')
    for path in ("params/large", "params/small", "run"):
        found = look("cat", tmp_path, path)
        assert (found.code, found.out) == (1, "") and path in found.err
    assert look("cat", tmp_path, "params/other").out.endswith("[1. 1.]\n")
