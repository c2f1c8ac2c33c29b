"""`styrax plan`, and the recipes that ship: sizes that others published, and plans of them without a compiler."""

import itertools
import json
import math

import pytest

from styrax.core import UsageError, UserError
from styrax.core.config import find_schema, read_config
from styrax.models.cost import cost_of
from styrax.train.plan import plan
from styrax.train.plan.make import Verdict, assess, case_of
from styrax.train.plan.search import search
from styrax.train.plan.topology import parse

TINY = [
    "model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "data.kind=synthetic", "data.vocab_size=64",
    "data.seq_len=16", "data.batch_size=16",
]  # fmt: skip


def resolved(*overrides, name=None):
    return read_config(find_schema("train"), name, overrides)


# Numbers of parameters that the models' makers publish; GPT-2's vocabulary of 50,257 is padded to 50,304 here.
@pytest.mark.parametrize(
    ("name", "topology", "parameters"),
    [
        ("llama3-1b", "v6e:4x8", 1_235_814_400),
        ("llama3-8b", "v5p:4x4x4", 8_030_261_248),
        ("llama3-70b", "v5p:8x8x8", 70_553_706_496),
        ("mixtral-8x7b", "v5p:4x4x8", 46_702_792_704),
        ("gpt2-124m", "v5e:4x4", 124_439_808 + 47 * 768),
    ],
)
def test_recipes_have_the_published_sizes_and_fit(name, topology, parameters):
    found = plan(resolved(name=name), topology=topology, compile=False)
    assert found.parameters == parameters
    assert found.fits is True
    assert found.advice == ()
    # bfloat16 arithmetic on float32 parameters, with AdamW's two moments, evenly split.
    split = math.prod(size for axis, size in found.mesh.items() if axis in ("fsdp", "expert"))
    assert found.predicted.params == pytest.approx(4 * parameters / split, rel=0.01)
    assert found.predicted.optimizer == pytest.approx(2 * found.predicted.params, rel=0.001)
    assert found.predicted.gradients == found.predicted.params


def test_the_llama_of_the_measure():
    config = resolved(name="llama3-8b")
    assert (config["data"].seq_len, config["data"].batch_size, config["model"].remat) == (4096, 2 * 64, "block")
    found = plan(config, topology="v5p:4x4x4", compile=False, tokens=1e12, price=4.2)
    assert found.tokens == 128 * 4096
    # 6 N without the embedding, and attention over half of all pairs: 12 L d (T + 1) / 2 a token.
    arithmetic = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 4097 / 2
    assert found.flops_per_token == pytest.approx(arithmetic, rel=1e-3)
    assert found.run is not None
    assert found.run.steps == math.ceil(1e12 / (128 * 4096))
    assert found.run.days_at_half == pytest.approx(1e12 * arithmetic / (64 * 459e12 / 2) / 86400, rel=1e-3)


def test_parameters_are_those_of_the_models_own_count():
    config = resolved(*TINY)
    found = plan(config, topology="cpu:8", compile=False)
    assert found.parameters == cost_of(config["model"], vocab_size=64).parameters


def test_what_does_not_fit_is_told_with_what_to_change():
    found = plan(resolved("data.batch_size=2048", name="llama3-8b"), topology="v6e:4x8", compile=False)
    assert found.fits is False
    assert any("train.accumulate=2" in line for line in found.advice)
    replicated = plan(resolved("mesh.axes={data=-1}", name="llama3-8b"), topology="v6e:4x8", compile=False)
    assert replicated.fits is False
    assert "mesh.axes.fsdp=-1" in replicated.advice[1]


def test_slices_without_dcn_have_data_across_them():
    found = plan(resolved("data.batch_size=2048", name="llama3-8b"), topology="v6e:16x16", slices=4, compile=False)
    assert (found.mesh, found.dcn) == ({"data": 4, "fsdp": 256}, {"data": 4})
    assert found.notes[0].startswith("mesh.dcn says nothing of the 4 slices, so data goes over them")
    assert found.roofline.slices is not None
    with pytest.raises(UserError, match=r"mesh.dcn is for 2 slices, and the plan is for 4; give --slices 2"):
        plan(
            resolved("data.batch_size=2048", "mesh.axes={data=2,fsdp=-1}", "mesh.dcn={data=2}", name="llama3-8b"),
            topology="v6e:16x16", slices=4, compile=False,
        )  # fmt: skip


def test_misfits_are_told():
    with pytest.raises(UserError, match=r"make data.batch_size a multiple of 512"):
        plan(resolved(name="llama3-8b"), topology="v5p:8x8x8", compile=False)
    with pytest.raises(UsageError, match="did you mean 'v5p'"):
        plan(resolved(*TINY), topology="v5:4x4x4", compile=False)


def test_the_prediction_is_near_the_compiler_on_a_cpu():
    found = plan(resolved(*TINY, "train.accumulate=2"), topology="cpu:8")
    compiled = found.compiled
    assert compiled is not None
    # A key that no random number is drawn with is no argument: 8 bytes.
    assert compiled.argument_bytes == pytest.approx(found.predicted.argument_bytes, abs=8)
    assert found.collectives
    assert all(each.axes == "data" for each in found.collectives)


def test_a_search_ranks_what_fits_first():
    found = search(resolved(*TINY), topology=parse("cpu:8"), compile=False)
    assert found.ranking
    assert len({each.overrides for each in found.ranking}) == len(found.ranking)
    # Of a CPU no peak is known: the batch that was asked for goes first, and then the fewest bytes.
    keys = [(each.rows != 16, each.total_bytes) for each in found.ranking]
    assert keys == sorted(keys)
    assert any("not known" in note for note in found.notes)
    best = found.best
    assert best is not None
    again = plan(resolved(*TINY, *best.overrides), topology="cpu:8", compile=False)
    assert (again.mesh, again.rows, again.total_bytes) == (best.axes, best.rows, best.total_bytes)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_search_on_a_tpu_ranks_by_time():
    found = search(resolved(name="llama3-8b"), topology=parse("v5p:4x4x4"), compile=False)
    rates = [each.seconds / each.tokens for each in found.ranking if each.fits]
    assert all(after >= 0.99 * before for before, after in itertools.pairwise(rates))
    assert found.ranking[0].rows == 128
    fits = [each.fits for each in found.ranking]
    assert fits == sorted(fits, reverse=True)
    assert found.best is not None
    # Without recomputation a step has a quarter less arithmetic, and 64 chips have room for it.
    assert found.best.remat != "block"
    # A model whose state alone does not go into a device fits in no way.
    none = search(resolved(name="llama3-70b"), topology=parse("v5e:2x2"), compile=False)
    assert none.best is None


@pytest.fixture
def tiny(styrax):
    path = styrax.config("tiny.toml", data__kind='"synthetic"', data__vocab_size=64, data__tokenizer=None,
                         data__sources=None, data__held_out=None, data__max_held_out_batches=None,
                         train__eval_every=0, data__batch_size=8)  # fmt: skip
    return path.name


def run(styrax, *args, devices=1):
    process = styrax.start(*args, devices=devices)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_the_command_prints_one_object(styrax, tiny):
    code, out, err = run(styrax, "plan", tiny, "--on", "cpu:4", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["config"], told["mesh"], told["devices"]) == (tiny, {"data": 4}, 4)
    assert told["compiled"]["argument_bytes"] == pytest.approx(told["predicted"]["argument_bytes"], abs=8)
    assert err.splitlines() == ["tracing the step ...", "compiling for cpu:4 ..."]
    assert not (styrax.folder / "cache").exists()


def test_the_command_prints_tables(styrax, tiny):
    code, out, err = run(styrax, "plan", tiny, "--on", "v5p:2x2x1", "--no-compile", "--tokens", "1e9", "--price", "4")
    assert code == 0, err
    for text in ("v5p:2x2x1: 4 chips", "optimizer", "102.005 GB", "not compiled", "fits        yes", "days", "n/a"):
        assert text in out
    code, _, err = run(styrax, "plan", tiny, "--on", "v5p:3x3", "--no-compile")
    assert (code, "expected v5p:AxBxC" in err) == (2, True)
    code, _, err = run(styrax, "plan", tiny, "--on", "cpu:2", "--price", "4")
    assert (code, "--price: needs --tokens" in err) == (2, True)


def test_a_run_whose_mesh_does_not_fit_points_to_the_plan(styrax, tiny):
    code, _, err = run(styrax, "train", tiny, "mesh.axes={data=3}", devices=2)
    assert code == 1
    assert "mesh data=3 needs 3 devices, got 2" in err
    assert f"`styrax plan {tiny} --search`" in err


@pytest.mark.slow
def test_random_tokens_train_and_resume_exactly(styrax, tiny):
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        for steps in stops:
            code, out, err = run(styrax, "train", tiny, "--run", name, f"train.steps={steps}", "checkpoint.every=3")
            assert code == 0, err
            assert "random tokens" in out
    lines = [(styrax.folder / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    # The learning rate follows the number of steps that was asked for, so only the losses of the first part agree.
    losses = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert len(losses[0]) == len(losses[1]) == 6
    assert losses[0][0] == losses[1][0]


def test_exchanges_that_were_not_read_are_foreseen():
    """A program that seems to send nothing must not make the network free."""
    config = resolved("mesh.axes={fsdp=4}", *TINY)
    case = case_of(config, parse("v5p:2x2x1"), compile=False)
    blind, foreseen = assess(case, Verdict(exchanged=())), assess(case)
    assert foreseen.roofline.network > 0 and blind.roofline.network == foreseen.roofline.network
    assert any("are seen to be sent" in note for note in blind.notes)
    assert not any("are seen to be sent" in note for note in foreseen.notes)


@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize(("length", "rows"), [(1024, 4), (256, 16)], ids=["long rows", "short rows"])
def test_bytes_on_one_core_are_near_those_of_the_compiler(length, rows, remat):
    """Long rows keep no weights of attention there, and what is recomputed is not kept."""
    sizes = ["model.num_layers=4", "model.embed_dim=192", "model.num_heads=3", "data.kind=synthetic"]
    sizes += ["data.vocab_size=512", f"data.seq_len={length}", f"data.batch_size={rows}", f"model.remat={remat}"]
    found = plan(resolved(*sizes), topology="cpu:1")
    assert found.compiled is not None
    assert found.predicted.total_bytes == pytest.approx(found.compiled.total_bytes, rel=0.1)
