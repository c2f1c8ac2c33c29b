"""A run's steps taken again, its bad steps found, and its way to resume proved, on the parts of `styrax train`."""

import json
import shutil

import numpy as np
import pytest

from styrax.core import UserError
from styrax.core.config import find_schema, read_config
from styrax.data import Loader
from styrax.train.bisect import bisect
from styrax.train.replay import prober, rebuild, replay, retake
from styrax.train.rundir import RunDir
from styrax.train.session import train
from styrax.train.verify import verify_resume

STEPS = 12


def resolved(styrax, **changes):
    # Devices enough for the mesh of all of the tests' eight, so that batches are global arrays here too.
    defaults = {"data__batch_size": 8, "data__seq_len": 16, "model__num_layers": 1, "train__steps": STEPS,
                "train__eval_every": 4, "data__pack": '"best_fit"'}  # fmt: skip
    return read_config(find_schema("train"), str(styrax.config(**{**defaults, **changes}))).check()


@pytest.fixture(scope="module")
def styrax(here):
    return here


@pytest.fixture(scope="module")
def recorded(styrax):
    """A run in this process; it keeps the checkpoints of steps 5, 10 and 12."""
    folder = RunDir(styrax.folder / "run")
    folder.create()
    train(resolved(styrax), folder, quiet=True)
    return folder


def copied(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "copy")
    return RunDir(tmp_path / "copy")


@pytest.mark.parametrize(("step", "start"), [(1, 0), (11, 10)])
def test_a_step_is_made_again_bit_for_bit(recorded, step, start):
    before = sorted((str(path), path.stat().st_mtime_ns) for path in recorded.path.rglob("*") if path.name != "LOCK")
    found = replay(recorded, step)
    assert (found.start, found.compared) == (start, step - start)
    assert found.differences == []
    assert found.elsewhere == []
    line = next(line for line in recorded.read_metrics() if line["step"] == step)
    assert {name: line[name] for name in found.metrics} == found.metrics
    after = sorted((str(path), path.stat().st_mtime_ns) for path in recorded.path.rglob("*") if path.name != "LOCK")
    assert before == after


def test_documents_add_up_with_micro_batches_and_dropout(styrax):
    """What a row drops goes by its number in the whole batch, in the step and where its losses are told apart."""
    folder = RunDir(styrax.folder / "parts")
    folder.create()
    train(resolved(styrax, data__batch_size=16, train__accumulate=2, train__steps=2), folder, quiet=True)
    found = replay(folder, 2)
    tokens = sum(each["tokens"] for each in found.documents)
    mean = sum(each["loss"] * each["tokens"] for each in found.documents) / tokens
    assert mean == pytest.approx(found.metrics["loss"], rel=1e-5)


def test_what_is_told_of_a_step_adds_up_to_what_was_recorded(recorded, styrax):
    found = replay(recorded, 7)
    line = next(line for line in recorded.read_metrics() if line["step"] == 7)
    # The optimizer has written down the norm of the whole gradient.
    norms = np.concatenate([np.ravel(each["gradient"]) for each in found.norms.values()]).astype(np.float64)
    assert np.sqrt((norms**2).sum()) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert found.term_gradients["loss"]["norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
    tokens = sum(each["tokens"] for each in found.documents)
    assert tokens == line["tokens"]
    mean = sum(each["loss"] * each["tokens"] for each in found.documents) / tokens
    assert mean == pytest.approx(line["loss"], rel=1e-5)
    assert abs(found.unaccounted) < 1e-4
    assert found.not_finite == {}
    # Provenance: the text at the named place is what the row holds there.
    from styrax.train.compose import make_dataset

    data = make_dataset(read_config(find_schema("train"), str(recorded.config)))
    batch = data.batch(6)
    for each in found.documents:
        name = each["document"].rpartition("/")[2]
        text = (styrax.corpus / name).read_bytes()
        here = batch["targets"][each["row"], each["column"] : each["column"] + each["length"]]
        wanted = text[each["offset"] : each["offset"] + each["length"]]
        assert bytes(here[: len(wanted)].tolist()) == wanted


def test_activations_are_those_of_the_blocks_called_one_by_one(recorded):
    from flax import nnx

    run = rebuild(recorded, 6, ["model.dropout=0"])  # right behind a checkpoint
    (taken,) = retake(run, 6)
    found, why = prober(run).activations(taken.before, taken.batch)
    assert why is None
    assert set(found) == {"layers", "layers/attn", "layers/mlp", "final_norm"}
    model = nnx.merge(run.graphdef, taken.before.params, taken.before.variables)
    tokens, segments = (np.asarray(taken.batch[name]) for name in ("tokens", "segment_ids"))
    real = segments != 0

    def by_hand(model):
        (block,), x = model.blocks(), model.embed(tokens) * real[..., None]
        x = x.reshape(-1, x.shape[-1])
        added, _ = block.attn(block.attn_norm(x), model.scope(tokens, None, segments, None), 0, None)
        mlp = block.mlp(block.mlp_norm(x + added))
        return {"layers/attn": added, "layers/mlp": mlp, "layers": x + added + mlp}

    for path, x in nnx.jit(by_hand)(model).items():
        x = np.asarray(x, np.float64).reshape(*real.shape, -1)[real]
        assert found[path]["layer"] == [0]
        assert found[path]["rms"] == [pytest.approx(np.sqrt((x**2).mean()), rel=1e-4)]
        assert found[path]["max"] == [pytest.approx(np.abs(x).max(), rel=1e-4)]
        assert (found[path]["zeros"], found[path]["not_finite"]) == ([0.0], [0.0])


def test_a_run_that_was_tampered_with_is_told(recorded, tmp_path):
    folder = copied(recorded, tmp_path)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    lines[6]["loss"] = float(np.nextafter(np.float32(lines[6]["loss"]), np.float32(9)))
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts = folder.read_starts()
    starts[-1]["jax"] = "0.0.1"
    folder.versions.write_text(json.dumps(starts))
    found = replay(folder, 8)
    assert len(found.differences) == 1
    assert found.differences[0].startswith("step 7, loss: ")
    assert [line.partition(" then")[0] for line in found.elsewhere] == ["jax: 0.0.1"]


def test_steps_that_are_not_there(recorded, tmp_path):
    for step in (0, STEPS + 1):
        with pytest.raises(UserError, match=f"--step {step}: expected 1 to {STEPS}"):
            replay(recorded, step)
    with pytest.raises(UserError, match="is not a run"):
        replay(RunDir(tmp_path / "nothing"), 1)


@pytest.mark.slow
def test_batches_that_a_rollback_left_out_are_left_out_again(styrax):
    """The loss of one step is made to look like a spike, so the run goes back and on over other data."""
    from styrax.train import spikes

    folder = RunDir(styrax.folder / "rolled")
    folder.create()
    told = []

    def judge(self, loss, skipped=0.0):
        self._losses.append(loss)
        told.append(loss)
        return len(told) == 8  # the step after checkpoint 5 by three

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spikes.SpikeWatch, "judge", judge)
        train(resolved(styrax, train__spike__action='"rollback"', train__steps=16), folder, quiet=True)
    assert "rollback" in [event["event"] for event in folder.read_events()]
    found = replay(folder, 9)  # no checkpoint before it is left, so from the beginning, over both stretches
    assert (found.start, found.compared, found.differences) == (0, 9, [])


@pytest.mark.slow
def test_the_first_step_above_a_bound_is_found_with_the_documents_that_lift_it(recorded):
    losses = [line["loss"] for line in recorded.read_metrics()]
    bound = (losses[0] + losses[1]) / 2 if losses[0] > losses[1] else losses[0] + 1e-4
    first = next(i for i, loss in enumerate(losses) if loss > bound) + 1
    found = bisect(recorded, above=bound)
    assert found.step == first
    assert found.metrics["loss"] == losses[first - 1]
    assert found.documents
    assert found.mended == (found.without["loss"] <= bound)
    assert bisect(recorded, above=max(losses) + 1).step is None
    assert bisect(recorded).step is None
    with pytest.raises(UserError, match=r"--metric losss: metrics\.jsonl has no such metric; it has .*loss"):
        bisect(recorded, metric="losss", above=1.0)


@pytest.mark.slow
def test_a_run_that_ended_at_a_loss_that_is_no_number_is_not_the_datas_fault(styrax):
    folder = RunDir(styrax.folder / "burst")
    folder.create()
    changes = {"optim__learning_rate": 1e36, "optim__extras__skip_nonfinite": "false"}
    with pytest.raises(UserError, match="not finite"):
        train(resolved(styrax, **changes), folder, quiet=True)
    losses = [line["loss"] for line in folder.read_metrics()]
    found = bisect(folder)
    # The loss itself is a number for one step more than the gradient.
    assert found.step <= next(i for i, loss in enumerate(losses, start=1) if not np.isfinite(loss))
    assert found.metrics["loss"] == losses[found.step - 1] or not np.isfinite(losses[found.step - 1])
    assert not next(iter(found.not_finite)).startswith("parameter ")
    assert not found.before
    assert found.many
    assert found.documents == []


def test_this_configuration_resumes_exactly(styrax):
    verdict = verify_resume(resolved(styrax, train__accumulate=1), steps=5, at=3)
    assert verdict.differences == []
    assert (verdict.steps, verdict.at, verdict.lines) == (5, 3, 5)
    assert verdict.arrays > 10


def test_data_that_resume_elsewhere_are_caught(styrax, monkeypatch):
    true = Loader.set_state
    monkeypatch.setattr(Loader, "set_state", lambda self, state: true(self, {**state, "step": state["step"] + 1}))
    verdict = verify_resume(resolved(styrax), steps=4, at=2)
    told = "\n".join(verdict.differences)
    assert "metrics of step 3: " in told
    assert "params/" in told
    assert "opt_state/" in told
    assert "data position, step: 4 and 5" in told


def test_where_to_stop_is_checked(styrax):
    with pytest.raises(UserError, match="--at 4: expected at least 1 and less than the 4 steps"):
        verify_resume(resolved(styrax), steps=4, at=4)


@pytest.mark.slow
def test_the_commands(styrax, recorded):
    done = styrax("replay", recorded.path, "--step", 8, "--top", 3, devices=8)
    assert "as it was recorded, bit for bit (3 steps compared)" in done.stdout
    assert "activations by largest" in done.stdout
    assert "layers/mlp" in done.stdout
    told = json.loads(styrax("replay", recorded.path, "--step", 8, "--json", devices=8).stdout)
    assert told["metrics"]["loss"] == recorded.read_metrics()[7]["loss"]
    assert "no step of" in styrax("bisect", recorded.path, code=1, devices=8).stdout
