"""`styrax mesh show`: what is split, what is not, and why; nothing is allocated."""

import json
import subprocess
import sys

import pytest


def show(*arguments):
    command = [sys.executable, "-m", "styrax.core.cli", "mesh", "show", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_of_a_mesh_that_is_not_here():
    done = show("quickstart", "--on", "cpu:8", "--json", "mesh.axes={fsdp=4,tensor=2}", "model.embed_dim=192")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    places = {place["path"]: place for place in record["parameters"]}
    up = places["layers/mlp/up/kernel"]
    assert up["shape"] == [4, 192, 512] and up["spec"] == [[], ["fsdp"], ["tensor"]]
    assert up["bytes"] == 4 * 192 * 512 * 4 and up["share"] * 8 == up["bytes"]
    norms = {"layers/attn_norm/scale", "layers/mlp_norm/scale", "final_norm/scale"}
    assert {place["path"] for place in record["whole"]} == norms and all(place["why"] for place in record["whole"])
    whole = sum(places[path]["bytes"] for path in norms)
    assert record["bytes_per_device"] == whole + (record["bytes"] - whole) // 8
    assert sorted(record["axes"]["tensor"]["splits"]) == ["heads", "kv_heads", "mlp", "vocab"]
    assert record["axes"]["fsdp"]["splits"] == ["embed"]


@pytest.mark.slow
def test_of_a_pipeline_how_it_is_filled():
    overrides = ("mesh.axes={stage=4,data=2}", 'model.runtime.schedule="1f1b"', "model.runtime.microbatches=16")
    done = show("quickstart", "--on", "cpu:8", "--json", *overrides, "data.batch_size=32")
    assert done.returncode == 0, done.stderr
    (line,) = [note for note in json.loads(done.stdout)["notes"] if note.startswith("pipeline: ")]
    assert "1f1b, 4 stages, 16 microbatches: a stage waits 15.8 % of the time" in line
    done = show("quickstart", "--on", "cpu:8", *overrides[:2], "model.runtime.microbatches=5", "data.batch_size=32")
    assert done.returncode != 0 and "expected a divisor of 16 rows on each device, got 5" in done.stderr


@pytest.mark.slow
def test_for_people_and_for_a_mesh_that_does_not_fit():
    done = show("quickstart", "--on", "cpu:8", "mesh.axes={data=8}", "--all")
    assert done.returncode == 0, done.stderr
    assert "100.00 % of the bytes" in done.stdout and "the mesh has no axis for" in done.stdout
    done = show("quickstart", "--on", "cpu:8", "mesh.axes={fsdp=5}")
    assert done.returncode != 0 and "needs 5 devices, got 8" in done.stderr and "Traceback" not in done.stderr
