"""Multi-token prediction in folders of Hugging Face: there and back, its logits, and what is said of what is wrong."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import cases
from mtp_cases import LAST, MODULES, case_of, golden, places, reference, tensors_of, tokens, write

from styrax.core import DEFAULT_RULES, UserError, tree, use_rules
from styrax.core.cli import main
from styrax.core.mesh import MeshConfig
from styrax.models import drop_mtp, registry
from styrax.models.hf import from_pretrained, open_tensors, save_pretrained
from styrax.models.hf.mtp import with_modules
from styrax.models.hf.save import find_family
from styrax.models.layers.fence import rows
from styrax.models.pretrained import PretrainedConfig
from styrax.models.stack import unstack

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COUNT = "num_nextn_predict_layers"
every = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a case's folder once."""
    made = {}

    def get(name):
        if name not in made:
            case = case_of(name)
            made[name] = write(tmp_path_factory.mktemp("mtp") / name, case.table, tensors_of(case))
        return made[name]

    return get


def content(folder):
    """Give the dtype and the bytes of every tensor, by name."""
    with open_tensors(folder) as found:
        return {name: (tensor.dtype.name, tensor.read().tobytes()) for name, tensor in found.items()}


def bare(name):
    """Give what a folder has beside the modules."""
    known = cases()[name][0].shapes
    return {key: array for key, array in tensors_of(case_of(name)).items() if key in known}


def changed(name, folder, table=None, **tensors):
    """Write a folder in which some tensors are others, or none."""
    made = tensors_of(case_of(name)) | {key.replace("__", "."): each for key, each in tensors.items()}
    kept = {key: each for key, each in made.items() if each is not None}
    return write(folder, case_of(name).table | (table or {}), kept)


def same_leaves(one, other):
    ours, theirs = tree.flatten(one), tree.flatten(other)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], err_msg=path)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back(name, dtype, tmp_path):
    """Byte for byte, with the copies that others need; corrections of routers stay in float32."""
    case = case_of(name)
    made = {k: a if k.endswith("bias") else a.astype(jnp.dtype(dtype)) for k, a in tensors_of(case).items()}
    source = write(tmp_path / "model", case.table, made)
    model = from_pretrained(source, mtp=True)
    assert model.config.arch.head.mtp == MODULES[name]
    axes = model.config.logical_axes()
    assert {path: leaf.ndim for path, leaf in tree.flatten(model).items()} == {p: len(a) for p, a in axes.items()}
    save_pretrained(model, tmp_path / "again", family=name, shard_bytes=20_000)
    assert content(tmp_path / "again") == content(source)
    assert json.loads((tmp_path / "again/config.json").read_text())[COUNT] == MODULES[name]
    same_leaves(from_pretrained(tmp_path / "again", mtp=True), model)


def further_logits(model, ids):
    found, x = [], model.hidden(model.blocks(), ids).x
    scope = model.scope(ids, None, None, None)
    for depth, part in enumerate(unstack(model.mtp), 1):
        known = jnp.pad(ids[:, depth:], ((0, 0), (0, depth)))
        x, _ = part(rows(x), rows(model.embed(known)), scope=scope, layer=9, key=None)
        x = x.reshape(*ids.shape, -1)
        found.append(model.logits(part.norm(x))[:, :-depth])
    return found


@every
def test_logits_and_losses_of_the_published_equation(name, folder):
    """The losses are the cross-entropies of those logits, of a text whose last token is a target only."""
    model, ids = from_pretrained(folder(name), mtp=True, scan="on"), jnp.asarray(tokens())

    def run(model, ids):
        return further_logits(model, ids), model.losses(ids[:, :-1], ids[:, 1:], jnp.ones((1, ids.shape[1] - 1)))

    with jax.default_matmul_precision("highest"):
        logits, terms = jax.jit(run, compiler_options=QUICK)(model, ids)
    for depth, (got, expected) in enumerate(zip(logits, golden(name), strict=True), 1):
        assert np.abs(expected).max() > 1
        assert np.max(np.abs(got - expected) / np.maximum(1, np.abs(expected))) < 2e-4
        exact, targets = expected[0, :-1].astype(np.float64), tokens()[0, depth + 1 :]
        nll = np.log(np.exp(exact).sum(-1)) - exact[np.arange(len(targets)), targets]
        assert float(terms[f"mtp_{depth}"].weight) == len(targets)
        np.testing.assert_allclose(terms[f"mtp_{depth}"].total, nll.sum(), rtol=1e-4)


@every
def test_without_being_asked_for_it_is_passed_over(name, folder, tmp_path):
    model = from_pretrained(folder(name))
    assert model.config.arch.head.mtp == 0
    same_leaves(model, from_pretrained(write(tmp_path / "bare", case_of(name).table, bare(name))))
    same_leaves(model, drop_mtp(from_pretrained(folder(name), mtp=True)))
    save_pretrained(model, tmp_path / "again", family=name, extra={COUNT: 1})
    assert content(tmp_path / "again") == content(tmp_path / "bare")
    assert json.loads((tmp_path / "again/config.json").read_text())[COUNT] == 0  # not what was there before


def test_straight_into_shards(folder):
    mesh = MeshConfig(axes={"data": 2, "fsdp": 2, "tensor": 2}).build()
    name, rules = "deepseek_v3", {**DEFAULT_RULES, "vocab": ()}
    sharded = from_pretrained(folder(name), mesh=mesh, rules=rules, mtp=True)
    kernel = tree.flatten(sharded)["mtp/block/attn/o/kernel"]
    assert len(kernel.sharding.device_set) == 8 and not kernel.is_fully_replicated
    same_leaves(sharded, from_pretrained(folder(name), mtp=True))
    with use_rules({**rules, "heads": ()}):  # with none given, those in force say where
        others = tree.flatten(from_pretrained(folder(name), mesh=mesh, mtp=True))
    assert "tensor" in str(kernel.sharding.spec)
    assert "tensor" not in str(others["mtp/block/attn/o/kernel"].sharding.spec)


@every
def test_every_difference_is_named(name, tmp_path):
    """A module's tensor that is missing, one too many and one of another shape, all at once."""
    module = places(name)[-1]
    lost, odd, more = module["hnorm"], module["proj"], module["block"] + "self_attn.extra.weight"
    wrong = {lost: None, odd: np.zeros((32, 32), np.float32), more: np.zeros(3, np.float32)}
    source = changed(name, tmp_path / "model", **{key.replace(".", "__"): each for key, each in wrong.items()})
    with pytest.raises(UserError) as error:
        from_pretrained(source, mtp=True)
    text = str(error.value)
    assert "3 difference(s)" in text
    assert f"missing: {lost}" in text
    assert f"{odd}: expected shape [32, 64], got [32, 32]" in text
    assert f"not in the model: {more} [3]" in text
    assert from_pretrained(source).config.arch.head.mtp == 0


def test_a_module_more_than_config_says_is_too_many(tmp_path):
    source = changed("deepseek_v3", tmp_path / "model", {COUNT: 1})
    with pytest.raises(UserError, match=r"not in the model: model\.layers\.5\.eh_proj\.weight"):
        from_pretrained(source, mtp=True)
    assert from_pretrained(source).config.num_layers == 4
    # Layers that are no such modules are still an error: config.json may be of another model.
    table = {**case_of("deepseek_v3").table, "num_hidden_layers": 3}
    with pytest.raises(UserError, match=r"not in the model: model\.layers\.3\.input_layernorm"):
        from_pretrained(write(tmp_path / "short", table, bare("deepseek_v3")))


def test_names_within_a_larger_model(folder, tmp_path):
    """Of one that also sees, the decoder has its table and its names one level down; Kimi K2 is another name only."""
    case = case_of("deepseek_v3")
    table = {"model_type": "some_vl", "text_config": {**case.table, "model_type": "kimi_k2"}}
    made = {f"language_model.{key}": array for key, array in tensors_of(case).items()}
    source = write(tmp_path / "model", table, made | {"vision_tower.a.weight": np.zeros(2, np.float32)})
    same_leaves(from_pretrained(source, mtp=True), from_pretrained(folder("deepseek_v3"), mtp=True))
    same_leaves(from_pretrained(source), from_pretrained(folder("deepseek_v3")))
    key = "model.layers.5.embed_tokens.weight"
    made[f"language_model.{key}"] = made[f"language_model.{key}"] + 1
    with pytest.raises(UserError, match=r"language_model\.model\.layers\.5\.embed_tokens\.weight is not lang"):
        from_pretrained(write(tmp_path / "other", table, made), mtp=True)


@pytest.mark.parametrize(
    ("copy", "original"),
    [("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight")],
)
def test_a_copy_is_the_original_or_not_there(copy, original, folder, tmp_path):
    name, key = "deepseek_v3", f"model.layers.5.{copy}"
    other = tensors_of(case_of(name))[key].copy()
    other[60, 31] += 1e-6
    source = changed(name, tmp_path / "other", **{key.replace(".", "__"): other})
    with pytest.raises(UserError) as error:
        from_pretrained(source, mtp=True)
    assert f"{key} is not {original}; load the model without mtp" in str(error.value)
    from_pretrained(source)
    short = changed(name, tmp_path / "short", **{key.replace(".", "__"): other[:-1]})
    with pytest.raises(UserError) as error:
        from_pretrained(short, mtp=True)
    assert f"{key}: expected shape [61, 32], got [60, 32]" in str(error.value)
    without = changed(name, tmp_path / "without", **{key.replace(".", "__"): None})
    save_pretrained(from_pretrained(without, mtp=True), tmp_path / "again", family=name)
    assert content(tmp_path / "again") == content(folder(name))


def test_the_head_of_a_tied_model_is_repeated_too(tmp_path):
    name, table = "deepseek_v3", {"tie_word_embeddings": True}
    embedding = tensors_of(case_of(name))["model.embed_tokens.weight"]
    heads = {f"model__layers__{layer}__shared_head__head__weight": embedding for layer in (4, 5)}
    source = changed(name, tmp_path / "model", table, lm_head__weight=None, **heads)
    save_pretrained(from_pretrained(source, mtp=True), tmp_path / "again", family=name)
    assert content(tmp_path / "again") == content(source)


def test_what_is_asked_for_and_not_there(tmp_path):
    """config.json says that there is none, the files have none, there is no place for any, or for no such block."""
    none = write(tmp_path / "none", case_of("deepseek_v3").table | {COUNT: 0}, bare("deepseek_v3"))
    with pytest.raises(UserError, match=f"mtp: config.json says {COUNT} = 0, so there is none to load"):
        from_pretrained(none, mtp=True)
    for name, first in (("deepseek_v3", "model.layers.4.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")):
        source = write(tmp_path / name, case_of(name).table, bare(name))
        with pytest.raises(UserError, match=f"has no tensors of multi-token prediction, such as {first}; load the"):
            from_pretrained(source, mtp=True)
    llama, _ = cases()["llama"]
    write(tmp_path / "llama", llama.table, {"model.norm.weight": np.zeros(3, np.float32)})
    with pytest.raises(UserError, match="files of llama have no place for multi-token prediction; load the model"):
        from_pretrained(tmp_path / "llama", mtp=True)
    turned = ["full_attention", *["linear_attention"] * 3]
    other = changed("qwen3_next", tmp_path / "turned", {"layer_types": turned})
    with pytest.raises(UserError, match="like the last layer, delta with experts; in files of qwen3_next it is attn"):
        from_pretrained(other, mtp=True)
    several = changed("qwen3_next", tmp_path / "several", {COUNT: 2})
    with pytest.raises(UserError, match="the files of qwen3_next have place for 1; load the model without mtp"):
        from_pretrained(several, mtp=True)
    wrong = changed("deepseek_v3", tmp_path / "wrong", {COUNT: "one"})
    with pytest.raises(UserError, match=r"mtp: config\.json of a deepseek_v3 model"):
        from_pretrained(wrong, mtp=True)


def test_a_family_without_a_place_for_it_names_drop_mtp(build, tmp_path):
    plain = build().config
    model = build(arch=dataclasses.replace(plain.arch, head=dataclasses.replace(plain.arch.head, mtp=1, mtp_coef=0.1)))
    with pytest.raises(UserError, match=r"llama have no place for multi-token prediction.*, such as with drop_mtp"):
        save_pretrained(model, tmp_path / "model")
    save_pretrained(drop_mtp(model), tmp_path / "model")  # whatever the coefficient, which is of training alone
    assert from_pretrained(tmp_path / "model").config.num_layers == 2
    one = registry.read_table(case_of("qwen3_next").table)
    assert find_family(with_modules(one, 1), 61).model_type == "qwen3_next"
    with pytest.raises(UserError, match=r"arch\.head\.mtp = 2: the files of qwen3_next have place for 1.*drop_mtp"):
        find_family(with_modules(one, 2), 61)
    several = registry.read_table(case_of("deepseek_v3").table)
    assert find_family(with_modules(several, 3), 61).model_type == "deepseek_v3"
    dense = dataclasses.replace(several, arch=dataclasses.replace(several.arch, sparse=(True, True, True, False)))
    with pytest.raises(
        UserError, match="last layer, latent without experts; in files of deepseek_v3 it is latent with"
    ):
        find_family(with_modules(dense, 1), 61, "deepseek_v3")


@every
def test_convert_keeps_it_unless_told_otherwise(name, folder, tmp_path, capsys):
    source = folder(name)
    for target, flags, kept in (("all", [], True), ("less", ["--drop-mtp"], False)):
        assert main(["models", "convert", str(source), str(tmp_path / target), *flags]) == 0
        written = content(tmp_path / target)
        assert (written == content(source)) is kept
        assert written.keys() == (content(source) if kept else bare(name)).keys()
    assert capsys.readouterr().err == ""
    assert from_pretrained(tmp_path / "less").config.arch.head.mtp == 0


@every
def test_a_run_begins_with_it(name, folder):
    config = PretrainedConfig(folder=str(folder(name)), mtp=True)
    assert config.decoder.arch.head.mtp == MODULES[name]
    assert PretrainedConfig(folder=str(folder(name))).decoder.arch.head.mtp == 0
    assert tree.flatten(config.load()).keys() == config.logical_axes().keys()
    same_leaves(config.load(), from_pretrained(folder(name), mtp=True))


@every
def test_transformers_makes_the_golden_logits(name, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")
    for got, expected in zip(reference(name, tmp_path), golden(name), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@every
def test_transformers_reads_our_folder(name, folder, tmp_path, monkeypatch):
    """Nothing is missing. The modules are passed over; of DeepSeek, layers of other numbers than 61 are told."""
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    save_pretrained(from_pretrained(folder(name), mtp=True), tmp_path / "ours", family=name, extra=special)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    unexpected = set(info.pop("unexpected_keys"))
    assert not any(info.values()), info
    assert all(key.startswith(("model.layers.4.", "model.layers.5.", "mtp.")) for key in unexpected)
    ids = tokens()
    with torch.no_grad():
        expected = model.eval()(torch.as_tensor(ids)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda model, ids: model(ids), compiler_options=QUICK)
        got = run(from_pretrained(folder(name), mtp=True), jnp.asarray(ids))
    assert np.max(np.abs(got - expected) / np.maximum(1, np.abs(expected))) < 2e-4
    assert LAST + "input_layernorm.weight" in model.state_dict()
