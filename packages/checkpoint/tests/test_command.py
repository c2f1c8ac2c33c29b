"""The commands, and what importing this package costs."""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, command


@pytest.fixture
def directory(tmp_path):
    with CheckpointConfig(pack_below=1000).build(tmp_path / "run") as store:
        for step in (5, 10):
            params = {"w": np.zeros((30, 10)), "layers": [{"b": np.float32(1)}], "rate": 0.5}
            store.save(step, {"params": params, "run": {"step": step}})
    return tmp_path / "run"


@pytest.fixture
def styrax(capsys):
    def run(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        code = command.run(parser.parse_args([str(argument) for argument in arguments]))
        return code, capsys.readouterr().out

    return run


def test_ls(directory, styrax, tmp_path):
    code, text = styrax("ls", directory)
    assert code == 0 and [line.split()[0] for line in text.splitlines()] == ["5", "10"]
    assert "params, run" in text
    code, text = styrax("ls", directory, "--json")
    rows = json.loads(text)
    assert [row["step"] for row in rows] == [5, 10] and rows[0]["bytes"] > 2400
    (tmp_path / "empty").mkdir()
    assert styrax("ls", tmp_path / "empty") == (0, f"no checkpoints in {tmp_path / 'empty'}\n")
    (directory / "00000005/MANIFEST.json").write_text("{}")
    assert "MANIFEST.json: damaged" in styrax("ls", directory)[1]


def test_show(directory, styrax):
    code, text = styrax("show", directory)
    assert code == 0 and text.startswith("step 10, ")
    for line in ("params: 3 leaves", "w         float64[30, 10]", "layers/0/b  float32[]", "rate        float 0.5"):
        assert line in text.replace("  w   ", "  w ")
    assert "run: JSON" in text
    record = json.loads(styrax("show", directory, 5, "--json")[1])
    assert record["step"] == 5 and record["items"]["run"]["value"] == {"step": 5}
    assert record["items"]["params"]["leaves"][2] == {
        "path": "w",
        "kind": "array",
        "shape": [30, 10],
        "dtype": "float64",
        "impl": None,
    }


def test_verify(directory, styrax):
    assert styrax("verify", directory) == (0, "         5  ok\n        10  ok\n")
    path = directory / "00000010/aux/leaves.bin"
    data = bytearray(path.read_bytes())
    data[random.Random(0).randrange(4)] ^= 1
    path.write_bytes(data)
    code, text = styrax("verify", directory)
    assert (
        code == 1 and "10  damaged\n            aux/leaves.bin: checksum" in text and "(leaf params/layers/0/b)" in text
    )
    code, text = styrax("verify", directory, 10, "--json")
    assert code == 1 and json.loads(text)[0]["problems"][0].startswith("aux/leaves.bin")
    assert styrax("verify", directory, 5)[0] == 0


def test_the_folder_of_a_run_is_as_good(directory, styrax, tmp_path):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    directory.rename(run / "checkpoints")
    assert styrax("verify", run) == (0, "         5  ok\n        10  ok\n")
    assert styrax("list", run) == styrax("ls", run / "checkpoints")
    assert styrax("show", run)[1].startswith("step 10, ")


def test_verify_of_nothing_is_no_success(styrax, tmp_path):
    assert styrax("verify", tmp_path) == (1, f"no checkpoints in {tmp_path}\n")
    assert styrax("verify", tmp_path, "--json") == (1, "[]\n")


def test_steps_without_a_manifest_are_named(directory, styrax):
    (directory / "00000010/MANIFEST.json").unlink()
    code, text = styrax("verify", directory)
    assert code == 1 and "5  ok\n        10  damaged\n" in text
    assert "MANIFEST.json: missing, so this is no complete checkpoint" in text
    assert styrax("verify", directory, 10)[0] == 1
    assert "10  MANIFEST.json: missing" in styrax("list", directory)[1]
    assert styrax("show", directory)[1].startswith("step 5, ")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json: missing"):
        styrax("show", directory, 10)
    (directory / "00000005/MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="that is complete; incomplete: 5, 10"):
        styrax("show", directory)


def test_a_run_does_not_pass_over_steps_without_a_manifest_in_silence(directory):
    (directory / "00000010/MANIFEST.json").unlink()
    with CheckpointConfig().build(directory) as store:
        with pytest.warns(match=r"step 10 .*damaged:\n  MANIFEST.json: missing.*taking the next older one"):
            assert store.latest() == 5
        assert store.steps() == [5]
    (directory / "00000005/MANIFEST.json").unlink()
    with CheckpointConfig().build(directory) as store:
        with pytest.raises(CheckpointError, match=r"all 2 checkpoints in .* are damaged"), pytest.warns():
            store.latest()
        store.save(10, {"run": {"step": 10}})  # only who says so replaces it
        store.wait()
        assert store.latest() == 10


def test_a_second_writer_is_told_in_the_words_of_the_command_line(directory):
    with CheckpointConfig().build(directory), pytest.raises(CheckpointError, match=r"choose another folder$") as caught:
        CheckpointConfig().build(directory)
    assert "read_only" not in str(caught.value)


def test_errors(directory, styrax, tmp_path):
    for action in ("ls", "show", "verify"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            styrax(action, tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 in .*: there are 5, 10"):
        styrax("show", directory, 6)


def test_needs_neither_jax_nor_orbax(directory, run_python):
    code = f"""
import argparse, sys
import styrax.checkpoint
from styrax.checkpoint import CheckpointConfig, command
parser = argparse.ArgumentParser()
command.add_arguments(parser)
for action in ("ls", "show", "verify"):
    assert command.run(parser.parse_args([action, {str(directory)!r}])) == 0
heavy = {{"jax", "orbax", "flax", "tensorstore", "numpy"}} & set(sys.modules)
assert not heavy, heavy
assert set(styrax.checkpoint.__all__) <= set(dir(styrax.checkpoint))
from styrax.checkpoint import Store, verify
assert callable(verify) and isinstance(Store, type)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_numbers_and_json_need_no_devices(tmp_path, run_python):
    code = """
import sys
import numpy as np
from styrax.checkpoint import Store
with Store(sys.argv[1]) as store:
    store.save(1, {"params": {"w": np.ones(3)}, "run": {"a": 1}})
    store.wait()
    assert store.latest() == 1
    assert store.restore(1, {"params": None, "run": None})["run"] == {"a": 1}
"""
    done = run_python(code, tmp_path / "run", env={"JAX_PLATFORMS": "none-such"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_readme(tmp_path, monkeypatch):
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    (block,) = (part.split("```")[0] for part in text.split("```python\n")[1:])
    monkeypatch.chdir(tmp_path)
    for start in (None, 30):
        names = {}
        exec(block, names)
        assert names["start"] == start and names["store"].steps() == [20, 30]
