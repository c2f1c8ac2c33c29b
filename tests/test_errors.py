"""Each mistake gives one clear error that names cause and cure, and leaves the run usable."""

import json
import os
import shutil
import subprocess

import pytest
from support import lines


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train.stepz=3"], ["train.stepz", "did you mean", "steps"]),
        (["train.steps=many"], ["train.steps", "int", "many"]),
        (["train.steps=0"], ["train.steps", "1"]),
        (["train.steps=1.5"], ["train.steps", "int"]),
        (["trian.steps=1"], ["trian", "train"]),
        (["model.kind=decodr"], ["decodr", "decoder"]),
        (["optim.schedule.kind=cosin"], ["optim.schedule", "cosine"]),
        (["train.precision=f31"], ["f31"]),
        (["data.pack=both"], ["data.pack", "concat", "both"]),
        (
            ["train.stepz=3", "model.num_layer=1", 'data.seq_len="x"'],
            ["train.stepz", "model.num_layer", "data.seq_len"],
        ),
        (["no-equals-sign"], ["no-equals-sign"]),
    ],
)
def test_wrong_configurations_are_wrong_use(styrax, args, expected):
    said = styrax.fails("train", styrax.config(), "--run", "run", *args, code=2)
    for part in expected:
        assert part in said
    assert not (styrax.folder / "run").exists()


def test_names_and_files_that_do_not_exist(styrax):
    assert "quickstart" in styrax.fails("train", "quickstrat", code=2)
    assert "nowhere.toml" in styrax.fails("train", "nowhere.toml", code=2)
    (styrax.folder / "broken.toml").write_text("[train\nsteps = 1")
    assert "broken.toml" in styrax.fails("train", "broken.toml", code=2)
    assert "train" in styrax.fails("trian", code=2)
    assert "what to train" in styrax.fails("train", code=2)
    assert "no run to resume" in styrax.fails("train", "--run", "none", code=2)
    assert "is not a run" in styrax.fails("generate", "none", "--prompt", "x")
    assert "is not a run" in styrax.fails("report", "none")


def test_missing_text_names_the_source(styrax):
    said = styrax.fails("train", styrax.config(data__sources='["nowhere/*.txt"]'), "--run", "run")
    assert "nowhere/*.txt" in said


@pytest.mark.slow
def test_a_run_without_held_out_text_has_a_report_without_it(styrax):
    config = styrax.config(data__held_out=0, train__steps=2, train__eval_every=1, train__baselines="true")
    done = styrax("train", config, "--run", "a run [bold]", "--json")
    summary = json.loads(done.stdout, parse_constant=pytest.fail)
    assert summary["step"] == 2 and summary["tokens_seen"] > 0
    unknown = ("held_out_loss", "held_out_bits_per_byte", "gzip_bits_per_byte", "bigram_bits_per_byte")
    assert [summary[name] for name in unknown] == [None] * 4
    assert (styrax.folder / "a run [bold]" / "report.html").is_file()


def test_a_run_of_another_configuration_is_refused_and_stays_usable(styrax):
    config = styrax.config(train__steps=4, checkpoint__every=2)
    styrax("train", config, "--run", "run")
    before = lines(styrax.folder / "run")
    said = styrax.fails(
        "train", config, "--run", "run", "model.embed_dim=32", "optim.learning_rate=0.5", "train.seed=7"
    )
    for part in ("model.embed_dim", "16", "32", "optim.learning_rate", "train.seed", "--run"):
        assert part in said
    assert lines(styrax.folder / "run") == before
    styrax("train", config, "--run", "run", "train.steps=5")


@pytest.mark.slow
def test_a_checkpoint_of_another_model_lists_the_differences(styrax):
    config = styrax.config(train__steps=2)
    styrax("train", config, "--run", "run")
    styrax("train", styrax.config("other.toml", train__steps=2, model__embed_dim=24), "--run", "other")
    shutil.rmtree(styrax.folder / "run" / "checkpoints")
    shutil.copytree(styrax.folder / "other" / "checkpoints", styrax.folder / "run" / "checkpoints")
    said = styrax.fails("train", config, "--run", "run", "train.steps=3")
    for part in ("embed", "16", "24"):
        assert part in said
    assert said.count("error:") == 1


def test_a_store_cut_short_names_the_file(styrax):
    store = styrax.folder / "store"
    styrax("data", "build", styrax.corpus, "--out", store, "--tokenizer", "byte")
    shard = next(store.glob("tokens-*.bin"))
    os.truncate(shard, shard.stat().st_size // 2)
    config = styrax.config(data__sources=None, data__store=json.dumps(str(store)))
    said = styrax.fails("train", config, "--run", "run")
    assert shard.name in said


@pytest.mark.slow
def test_a_corrupt_newest_checkpoint_is_reported_and_the_one_before_used(styrax):
    config = styrax.config(train__steps=6, checkpoint__every=2, train__eval_every=0)
    styrax("train", config, "--run", "run")
    styrax("train", config, "--run", "straight")
    run = styrax.folder / "run"
    newest = max(p for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = styrax("train", config, "--run", "run")
    assert victim.name in done.stderr + done.stdout
    assert lines(run) == lines(styrax.folder / "straight")


def test_a_mesh_that_does_not_divide_the_batch(styrax):
    said = styrax.fails("train", styrax.config(data__batch_size=6), "--run", "run", devices=4)
    for part in ("6", "4", "data.batch_size"):
        assert part in said
    said = styrax.fails("train", styrax.config(), "--run", "run", "mesh.axes={data=3}", devices=4)
    assert "mesh" in said
    styrax("train", styrax.config(train__steps=2), "--run", "run2", devices=4)


def test_accumulation_that_does_not_divide_the_batch(styrax):
    said = styrax.fails("train", styrax.config(), "--run", "run", "train.accumulate=3", code=2)
    assert "train.accumulate=3" in said


@pytest.mark.slow
def test_a_second_trainer_on_the_same_run_is_refused(styrax):
    config = styrax.config(train__steps=100000, checkpoint__every=100000)
    process = styrax.start("train", config, "--run", "run")
    try:
        metrics = styrax.folder / "run" / "metrics.jsonl"
        while not metrics.exists() or not metrics.read_text():
            assert process.poll() is None, process.communicate()
        said = styrax.fails("train", config, "--run", "run")
        assert str(process.pid) in said
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="root can write anywhere, so a read-only mount is needed")
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "read-only"])
def test_disk_that_cannot_be_written(styrax, kind):
    disk = styrax.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    try:
        config = styrax.config(train__steps=6, checkpoint__every=2, model__embed_dim=64)
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            assert "read-only" in styrax.fails("train", config, "--run", disk / "run").lower()
        else:
            said = styrax.fails("train", config, "--run", disk / "run")
            assert "space" in said.lower()
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            styrax("train", config, "--run", disk / "run")
            assert [m["step"] for m in lines(disk / "run")] == list(range(1, 7))
    finally:
        subprocess.run(["umount", "-l", disk], check=False)
