"""`styrax checkpoint ls|show|verify`, what all actions have in common, and what importing this package costs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store
from styrax.core.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    with CheckpointConfig(pack_below=1000).build(folder) as store:
        for step in (5, 10):
            params = {"w": np.zeros((30, 10)), "layers": [{"b": np.float32(1), "c": np.arange(3)}], "rate": 0.5}
            store.save(
                step, {"params": params, "run": {"step": step}}, metrics={"loss": 1 / step}, temporary=step == 10
            )
    return folder


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def flip(path):
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_ls(directory, look, tmp_path):
    found = look("ls", directory)
    assert found.code == 0
    first, second = (line.split() for line in found.out.splitlines())
    assert first[0] == "5" and first[4:] == ["params,", "run", "loss", "0.2"]
    assert second[0] == "10" and second[4:] == ["params,", "run", "loss", "0.1", "temporary"]
    rows = json.loads(look("ls", directory, "--json").out)
    assert [(row["step"], row["metrics"], row["temporary"]) for row in rows] == [
        (5, {"loss": 0.2}, False),
        (10, {"loss": 0.1}, True),
    ]
    files = [path for path in (directory / "00000005").rglob("*") if path.is_file() and path.name != "MANIFEST.json"]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in files)
    assert [row["step"] for row in json.loads(look("ls", directory, 10, "--json").out)] == [10]
    (tmp_path / "empty").mkdir()
    assert look("ls", tmp_path / "empty").out == f"no checkpoints in {tmp_path / 'empty'}\n"
    (directory / "00000005/MANIFEST.json").write_text("{}")
    assert "5  MANIFEST.json: damaged" in look("ls", directory).out


def test_show(directory, look):
    found = look("show", directory)
    assert found.code == 0 and found.out.startswith("step 10, ")
    assert "metrics: loss 0.1\ntemporary: it goes when the next one is saved\n" in found.out
    lines = [" ".join(line.split()) for line in found.out.splitlines()]
    weight = np.zeros((30, 10)).tobytes()
    for line in (
        "params: 4 leaves, 304 numbers, 2.4 kB",
        "layers/** 2 leaves 28 B",
        "layers/0/b float32[] 4 B " + xxhash.xxh3_128_hexdigest(np.float32(1).tobytes())[:8],
        "rate float 0.5",
        f"w float64[30, 10] 2.4 kB {xxhash.xxh3_128_hexdigest(weight)[:8]}",
        "run: JSON, 12 B",
    ):
        assert line in lines
    assert "temporary" not in look("show", directory, 5).out


def test_show_as_json_has_everything(directory, look):
    record = json.loads(look("show", f"{directory}@5", "--json").out)
    assert record["step"] == 5 and record["metrics"] == {"loss": 0.2} and record["temporary"] is False
    assert record["items"]["run"] == {"kind": "json", "value": {"step": 5}}
    params = record["items"]["params"]
    assert params["leaves"][3] == {
        "path": "w",
        "kind": "array",
        "shape": [30, 10],
        "dtype": "float64",
        "impl": None,
        "bytes": 2400,
        "where": "orbax",
        "digest": xxhash.xxh3_128_hexdigest(np.zeros(300).tobytes()),
    }
    assert params["leaves"][2]["value"] == 0.5
    assert params["totals"]["layers"] == {"leaves": 2, "numbers": 4, "bytes": 28}
    for name, file in record["files"].items():
        data = (directory / "00000005" / name).read_bytes()
        assert file == {"bytes": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
    (directory / "00000005/aux/run.json").write_text("[]")  # is no reason to show nothing
    record = json.loads(look("show", f"{directory}@5", "--json").out)
    assert "run.json is damaged" in record["items"]["run"]["problem"]


def test_show_some(directory, look):
    def paths(*arguments):
        text = look("show", directory, *arguments).out
        return [line.split()[0] for line in text.splitlines() if line.startswith(("  ", "run:"))]

    assert paths() == ["layers/**", "layers/0/b", "layers/0/c", "rate", "w", "run:"]
    assert paths("--depth", "1") == ["layers/**", "rate", "w", "run:"]
    assert paths("--depth", "2") == ["layers/0/**", "rate", "w", "run:"]
    assert paths("--depth", "0") == ["run:"]
    assert paths("--only", "**/b", "--only", "run") == ["layers/0/b", "run:"]
    assert paths("--only", "params/layers/**") == ["layers/0/b", "layers/0/c"]
    found = look("show", directory, "--only", "param/*", "--only", "run")
    assert found.code == 1 and "'param/*' fits nothing (did you mean 'params/w'?)" in found.err
    assert "--depth: expected" in look("show", directory, "--depth", "-1").err


def test_verify(directory, look):
    found = look("verify", directory)
    assert (found.code, found.out, found.err) == (0, "         5  ok\n        10  ok\n", "")
    flip(directory / "00000010/aux/leaves.bin")
    found = look("verify", directory)
    assert found.code == 1 and "10  damaged\n            aux/leaves.bin: digest " in found.out
    assert "(leaf params/layers/0/b)" in found.out
    found = look("verify", directory, 10, "--json")
    (row,) = json.loads(found.out)
    assert found.code == 1 and row["step"] == 10 and row["problems"][0].startswith("aux/leaves.bin")
    assert look("verify", directory, 5).code == 0 and look("verify", directory, 5, 10).code == 1


def test_verify_says_how_far_it_is(directory, look, monkeypatch):
    monkeypatch.setattr("styrax.checkpoint.commands.selection._LOG", 0.0)
    found = look("verify", f"{directory}@5")
    count = len([path for path in (directory / "00000005").rglob("*") if path.is_file()]) - 1
    assert f"verify: {count} of {count} files, " in found.err.splitlines()[-1]


@pytest.mark.parametrize("action", ["ls", "show", "verify"])
def test_a_place_has_many_names(directory, look, tmp_path, action, monkeypatch):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    directory.rename(run / "checkpoints")
    monkeypatch.chdir(run / "checkpoints/00000005")
    names = [
        (f"{run}@5",),
        (run, 5),
        (run / "checkpoints", "00000005"),
        (f"{run}/checkpoints@5",),
        (run / "checkpoints/00000005",),
        (f"{run}/checkpoints/00000005/",),
        (".",),
        ("..", 5),
    ]
    texts = [look(action, *name, "--json").out.replace(str(run / "checkpoints/00000005"), "X") for name in names]
    texts = [text.replace("../00000005", "X") for text in texts]
    assert set(texts) == {texts[0]} and '"step": 5' in texts[0]
    assert look(action, f"{run}@latest", "--json").out == look(action, run, 10, "--json").out
    copy = tmp_path / "the good one"
    (run / "checkpoints/00000005").rename(copy)
    assert look(action, copy).code == 0


def test_a_folder_whose_name_has_an_at(directory, look, tmp_path):
    directory.rename(tmp_path / "run@5")
    assert len(look("ls", tmp_path / "run@5").out.splitlines()) == 2
    assert len(look("ls", tmp_path / "run@5@10").out.splitlines()) == 1


def test_mistakes_are_told(directory, look, tmp_path):
    for action in ("ls", "show", "verify"):
        for arguments, code, text in (
            ((tmp_path / "rum",), 1, "rum is not a folder (did you mean 'run'?)"),
            ((f"{tmp_path}/rum@5",), 1, "rum is not a folder (did you mean 'run'?)"),
            ((directory, 6), 1, f"no checkpoint of step 6 in {directory}: there are 5, 10"),
            ((f"{directory}@lates",), 2, "no step 'lates' (did you mean 'latest'?)"),
            ((directory, "5.0"), 2, "no step '5.0'; a step is a number"),
            ((directory / "00000005", 5), 2, "is the folder of one checkpoint already"),
            ((directory, "--jsn"), 2, "no option --jsn (did you mean '--json'?)"),
        ):
            found = look(action, *arguments)
            assert (found.code, found.out) == (code, "") and text in found.err.replace("\n       ", " ")
    assert "did you mean 'show'" in look("shwo", directory).err
    assert "00000005 and 00000010 are named" in look("show", f"{directory}@5", 10).err


def test_many_steps_are_not_all_listed(look, tmp_path):
    for step in range(0, 1000, 10):
        folder = tmp_path / f"{step:08d}"
        folder.mkdir()
        (folder / "MANIFEST.json").touch()
    text = look("show", tmp_path, 512).err
    assert "there are 100, from 0 to 990, the nearest 510" in text


def test_verify_of_nothing_is_no_success(look, tmp_path):
    found = look("verify", tmp_path)
    assert (found.code, found.out) == (1, f"no checkpoints in {tmp_path}\n")
    found = look("verify", tmp_path, "--json")
    assert (found.code, found.out) == (1, "[]\n")


def test_steps_without_a_manifest_are_named(directory, look):
    (directory / "00000010/MANIFEST.json").unlink()
    found = look("verify", directory)
    assert found.code == 1 and "5  ok\n        10  damaged\n" in found.out
    assert "MANIFEST.json: missing, so this is no complete checkpoint" in found.out
    assert look("verify", directory, 10).code == 1
    assert "10  MANIFEST.json: missing" in look("list", directory).out
    assert look("show", directory).out.startswith("step 5, ")
    assert "MANIFEST.json: missing" in look("show", directory, 10).err
    (directory / "00000005/MANIFEST.json").unlink()
    assert "that is complete; incomplete: 5, 10" in look("show", directory).err


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


def test_an_interruption_has_no_traceback(directory, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("styrax.checkpoint.commands.verify.verify", interrupted)
    assert main(["checkpoint", "verify", str(directory)]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_reader_that_leaves_is_no_error(tmp_path, env):
    with Store(tmp_path) as store:
        store.save(1, {"params": {f"a long name of a leaf {number}": np.zeros(1) for number in range(2000)}})
    command = [sys.executable, "-m", "styrax.core.cli", "checkpoint", "show", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline().startswith(b"step 1, ")
        process.stdout.close()
        assert process.wait(60) == 1 and process.stderr.read() == b""


def test_needs_neither_jax_nor_orbax(directory, run_python):
    code = """
import sys
import styrax.checkpoint
from styrax.core.cli import main
run = sys.argv[1]
for words in (
    ["ls", run], ["show", run], ["show", run, "--json"], ["verify", run], ["doctor", run], ["gc", run],
    ["rm", run, "5", "--dry-run"], ["cat", run, "run/step"], ["cat", run, "params/rate"], ["--help"],
):
    assert main(["checkpoint", *words]) == 0, words
assert main(["checkpoint", "diff", run + "@5", run + "@10"]) == 1
heavy = {"jax", "orbax", "flax", "tensorstore", "numpy", "rich"} & set(sys.modules)
assert not heavy, heavy
assert main(["checkpoint", "cat", run, "params/layers/0/c"]) == 0
heavy = {"jax", "orbax", "flax", "tensorstore"} & set(sys.modules)
assert not heavy, heavy
assert set(styrax.checkpoint.__all__) <= set(dir(styrax.checkpoint))
from styrax.checkpoint import Store, verify
assert callable(verify) and isinstance(Store, type)
"""
    done = run_python(code, directory)
    assert done.returncode == 0, done.stderr


def test_what_reads_arrays_leaves_the_devices_to_others(directory, run_python, tmp_path):
    code = """
import sys
from styrax.core.cli import main
run, out = sys.argv[1:]
assert main(["checkpoint", "cat", run, "params/w"]) == 0
assert main(["checkpoint", "export", run, out, "--to", "npz"]) == 0
"""
    done = run_python(code, directory, tmp_path / "a.npz", env={"JAX_PLATFORMS": "none-such"})
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
    block, *_ = (part.split("```")[0] for part in text.split("```python\n")[1:])
    monkeypatch.chdir(tmp_path)
    for start in (None, 30):
        names = {}
        exec(block, names)
        assert names["start"] == start and names["store"].steps() == [20, 30]
