"""Export and import: the commands, the checkpoints they make, and how much memory they take."""

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, command, formats, verify


@pytest.fixture
def params():
    noise = np.random.default_rng(0)
    return {
        "layers": [{"w": noise.normal(size=(40, 30)).astype(np.float32), "b": np.zeros(3, ml_dtypes.bfloat16)}] * 2,
        "odd.key/x": np.arange(3),
        "empty": np.zeros((0, 2), np.int8),
        "rate": 0.5,
    }


@pytest.fixture
def run(tmp_path, params):
    with CheckpointConfig(pack_below=1000).build(tmp_path / "run/checkpoints") as store:
        for step in (5, 10):
            params["rate"] = step / 10
            store.save(step, {"params": params, "run": {"step": step}, "opt": {"m": np.ones(2)}})
    return tmp_path / "run"


@pytest.fixture
def styrax(capsys):
    def run(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        code = command.run(parser.parse_args([str(argument) for argument in arguments]))
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(("form", "name"), [("safetensors", "m.safetensors"), ("safetensors", "m"), ("npz", "m.npz")])
def test_out_and_in_again(run, styrax, tmp_path, params, same, form, name):
    out, back = tmp_path / name, tmp_path / "back"
    code, text = styrax("export", run, "--to", form, out)
    assert code == 0 and text.startswith(f"{out}: 7 arrays, ")
    code, text = styrax("import", out, "--to", back, "--step", 3)
    assert code == 0 and text.startswith(f"{back}: step 3, params: 7 arrays, ")
    store = Store(back, read_only=True)
    assert store.latest() == 3 and verify(back / "00000003") == []
    params["rate"] = np.array(1.0)  # a number comes back as an array
    same(store.restore(3, {"params": params})["params"], params)


def test_a_step_items_patterns_and_a_cast(run, styrax, tmp_path):
    styrax("export", f"{run}@5", "--to", "npz", tmp_path / "a.npz", "--include", "rate")
    assert {path: array.load().item() for path, array in formats.read(tmp_path / "a.npz").items()} == {"rate": 0.5}
    _, text = styrax(
        *("export", run / "checkpoints/00000010", tmp_path / "b.safetensors", "--to", "safetensors", "--json"),
        *("--items", "params,opt", "--include", "**/w", "--include", "opt/**", "--exclude", "params/layers/1/*"),
        *("--cast", "bf16", "--separator", "/"),
    )
    assert json.loads(text) == {
        "source": str(run / "checkpoints/00000010"),
        "path": str(tmp_path / "b.safetensors"),
        "arrays": 2,
        "bytes": 2404,
    }
    found = formats.read(tmp_path / "b.safetensors", separator="/")
    assert {path: array.dtype.name for path, array in found.items()} == {
        "params/layers/0/w": "bfloat16",
        "opt/m": "bfloat16",
    }


def test_mistakes_are_told(golden, run, styrax, tmp_path):
    for arguments, text in (
        ((tmp_path / "none", "--to", "npz", tmp_path / "a.npz"), "is not a folder"),
        ((f"{run}@7", "--to", "npz", tmp_path / "a.npz"), "no checkpoint of step 7 in .*there are 5, 10"),
        ((run, "--to", "npz", tmp_path / "a"), r"ends in \.npz"),
        ((run, "--to", "npz", tmp_path / "a.npz", "--items", "param"), "no item 'param' .did you mean 'params'"),
        ((run, "--to", "npz", tmp_path / "a.npz", "--items", "run,opt"), "'run': is JSON.*\n.*--exclude"),
        ((run, "--to", "npz", tmp_path / "a.npz", "--include", "layer/*"), "'layer/.' fits nothing"),
        ((run, "--to", "npz", tmp_path / "a.npz", "--exclude", "**"), "no array is left of 7"),
        ((run, "--to", "npz", tmp_path / "a.npz", "--cast", "bf17"), "no dtype 'bf17' .did you mean 'bf16'"),
        ((run, "--to", "npz", tmp_path / "a.npz", "--separator", "ab"), "separator: expected one character"),
        ((run, "--to", "safetensors", tmp_path / "a", "--max-shard", "0"), "--max-shard: expected"),
    ):
        with pytest.raises(CheckpointError, match=text):
            styrax("export", *arguments)
    assert not (tmp_path / "a.npz").exists() and not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match="no such file"):
        styrax("import", tmp_path / "none", "--to", tmp_path / "x")
    with pytest.raises(CheckpointError, match="'step': is a Python object in a pickle"):
        styrax("import", golden / "torch-one", "--to", tmp_path / "x")
    with pytest.raises(CheckpointError, match="item '-': a name is"):
        styrax("import", golden / "plain.npz", "--to", tmp_path / "x", "--item=-")
    with pytest.raises(CheckpointError, match="step: expected 0 or more"):
        styrax("import", golden / "plain.npz", "--to", tmp_path / "x", "--step", "-1")


def test_a_damaged_checkpoint_is_not_exported(run, styrax, tmp_path):
    path = run / "checkpoints/00000010/aux/leaves.bin"
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: params/"):
        styrax("export", run, "--to", "npz", tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize(
    ("source", "items"),
    [
        ("single.safetensors", ["params"]),
        ("sharded", ["params"]),
        ("compressed.npz", ["params"]),
        ("orbax-v1", ["params"]),
        ("orbax-v0-standard", ["params"]),
        ("orbax-v0-manager/3", ["params", "opt"]),
        ("torch-one", ["params"]),
        ("torch-two", ["params"]),
    ],
)
def test_import_of_every_format(golden, styrax, tmp_path, source, items):
    skipped = list(formats.read(golden / source).skipped)
    excluded = [argument for path in skipped for argument in ("--exclude", path)]
    styrax("import", golden / source, "--to", tmp_path / "x", *excluded)
    expected = formats.read(golden / source)
    got = formats.read(tmp_path / "x/00000000", items=items if len(items) == 1 else None)
    assert set(got) == set(expected)
    for path, array in expected.items():
        left, right = got[path].load(), array.load()
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    assert set(Store(tmp_path / "x", read_only=True).restore(0, dict.fromkeys(items))) == set(items)


def test_large_arrays_go_to_orbax_and_reshard(tmp_path):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    tree = {"a": {"w": np.arange(32 * 64, dtype=np.float32).reshape(32, 64)}, "low": np.ones(4096, ml_dtypes.int4)}
    formats.write(tmp_path / "x.npz", {"a/w": tree["a"]["w"], "low": tree["low"]})
    formats.write(tmp_path / "x.safetensors", {"a/w": tree["a"]["w"]})
    config = CheckpointConfig(pack_below=100)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for name in ("x.npz", "x.safetensors"):
        source = formats.read(tmp_path / name)
        formats.import_arrays({"params": source}, tmp_path / name[2:], 1, config=config)
        store = Store(tmp_path / name[2:], read_only=True)
        leaves = {leaf.path: leaf.where for leaf in store.manifest(1).items["params"].leaves}
        assert leaves["a/w"] == "orbax" and leaves.get("low", "packed") == "packed"
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        like = {"a": {"w": jax.ShapeDtypeStruct((32, 64), np.float32, sharding=sharding)}}
        if "low" in source:
            like["low"] = tree["low"]
        got = store.restore(1, {"params": like})["params"]
        assert got["a"]["w"].sharding == sharding
        np.testing.assert_array_equal(got["a"]["w"], tree["a"]["w"])
        assert not [path for path in (tmp_path / name[2:]).iterdir() if path.name.startswith(".")]


def test_a_step_that_is_there_is_not_replaced_unasked(golden, run, styrax, tmp_path):
    with pytest.raises(CheckpointError, match="has a checkpoint of step 10 already; choose another step"):
        styrax("import", golden / "plain.npz", "--to", run / "checkpoints", "--step", 10)
    styrax("import", golden / "plain.npz", "--to", run / "checkpoints", "--step", 10, "--overwrite")
    assert Store(run / "checkpoints", read_only=True).steps() == [5, 10]
    assert verify(run / "checkpoints/00000010") == []
    with CheckpointConfig().build(run / "checkpoints"), pytest.raises(CheckpointError, match="another folder"):
        styrax("import", golden / "plain.npz", "--to", run / "checkpoints", "--step", 11)


def test_paths_that_cannot_nest_are_listed(styrax, tmp_path):
    formats.write(tmp_path / "x.npz", {"a": np.ones(1), "a/b": np.ones(2), "c": np.ones(1)})
    with pytest.raises(CheckpointError, match="params/a/b: cannot be in a dictionary that another array"):
        styrax("import", tmp_path / "x.npz", "--to", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    styrax("import", tmp_path / "x.npz", "--to", tmp_path / "x", "--separator", "")
    assert set(Store(tmp_path / "x", read_only=True).restore(0, {"params": None})["params"]) == {"a", "a/b", "c"}


def test_an_import_that_fails_leaves_nothing(tmp_path):
    def fail():
        raise OSError(28, "No space left on device")

    bad = formats.Array(shape=(2,), dtype=np.dtype("float32"), load=fail)
    with pytest.raises(CheckpointError, match=r"step 1 cannot be written in .*no space is left"):
        formats.import_arrays({"params": {"a": np.ones(2), "b": bad}}, tmp_path / "x", 1)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["LOCK"]


def test_progress_is_for_long_work(capsys, monkeypatch):
    from styrax.checkpoint.commands import selection

    now = [0.0]
    monkeypatch.setattr(selection.time, "monotonic", lambda: now[0])
    progress = selection.Progress(3, 3_000_000, "export")
    progress("a", 1_000_000)
    now[0] = 40.0
    progress("b", 1_000_000)
    progress("c", 1_000_000)
    progress.close()
    assert capsys.readouterr().err == "export: 2 of 3 arrays, 2.0 MB of 3.0 MB, 20 s left\n"


MEMORY = """
import sys, threading, time
from pathlib import Path
import numpy as np
from styrax.checkpoint import formats

folder, count, size = Path(sys.argv[1]), 24, 8 * 2**20
peak, done = 0, False

def used():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def watch():
    global peak
    while not done:
        peak = max(peak, used())
        time.sleep(0.001)

def measure(name, work):
    global peak, done
    before, peak, done = used(), 0, False
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    work()
    done = True
    thread.join()
    print(name, (peak - before) / (count * size))

def make(number):
    return lambda: np.random.default_rng(number).integers(0, 255, size, np.uint8).view(np.float32)

arrays = {
    f"l/{n}": formats.Array(shape=(size // 4,), dtype=np.dtype("float32"), load=make(n)) for n in range(count)
}
formats.import_arrays({"params": {"a": np.ones(10**6)}}, folder / "warm")  # what jax and Orbax take once
read = formats.read
measure("safetensors", lambda: formats.write(folder / "m.safetensors", arrays))
measure("shards", lambda: formats.write(folder / "m", arrays, max_shard=4 * size))
measure("npz", lambda: formats.write(folder / "m.npz", arrays))
measure("in-safetensors", lambda: formats.import_arrays({"params": read(folder / "m")}, folder / "a"))
measure("in-npz", lambda: formats.import_arrays({"params": read(folder / "m.npz")}, folder / "b"))
measure("out", lambda: formats.write(folder / "o.npz", read(folder / "b/00000000", items=["params"])))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_about_one_array(tmp_path, run_python):
    """24 arrays of 8 MiB: a tenth of them all is two and a half of them."""
    done = run_python(MEMORY, tmp_path)
    assert done.returncode == 0, done.stderr
    shares = {name: float(share) for name, share in map(str.split, done.stdout.splitlines())}
    assert len(shares) == 6
    assert max(shares.values()) < 0.15, shares
