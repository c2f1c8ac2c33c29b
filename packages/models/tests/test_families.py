"""Every family against logits of transformers, and its tensors there and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import POSITIONS, cases, changed, tokens, write

from styrax.core import UserError, tree
from styrax.models import layout, registry
from styrax.models.hf import from_pretrained, open_tensors, save_pretrained, write_tensors
from styrax.models.hf.save import find_family
from styrax.models.layers.attention import Attention

CASES = cases()
# Compiling is most of the time, and these sizes need no fast code.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Write a case's folder once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = write(CASES[name][0], tmp_path_factory.mktemp("model") / name)
        return made[name]

    return get


def logits(model, ids):
    run = jax.jit(lambda model, ids: model(ids), compiler_options=QUICK)
    with jax.default_matmul_precision("highest"):
        return np.asarray(run(model, jnp.asarray(ids)))


def apart(got, expected):
    return float(np.max(np.abs(got - expected) / np.maximum(1, np.abs(expected))))


@pytest.mark.parametrize("name", CASES)
def test_logits_of_transformers(name, folder):
    case, expected = CASES[name]
    model = from_pretrained(folder(name))
    assert np.abs(expected).max() > 1
    assert apart(logits(model, tokens(case.vocab_size))[:, POSITIONS], expected) < 2e-4
    assert tree.flatten(model).keys() == model.config.logical_axes().keys()
    assert all(len(model.config.logical_axes()[path]) == leaf.ndim for path, leaf in tree.flatten(model).items())


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name, folder, tmp_path):
    """Tensors come back byte for byte, and so does what config.json says."""
    model = from_pretrained(folder(name))
    kind = registry.family_of(CASES[name][0].table)[0].model_type
    save_pretrained(model, tmp_path / "again", family=kind, shard_bytes=20_000)
    with open_tensors(folder(name)) as before, open_tensors(tmp_path / "again") as after:
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert tensor.dtype == after[key].dtype
            assert tensor.read().tobytes() == after[key].read().tobytes(), key
    again = registry.read_table(json.loads((tmp_path / "again" / "config.json").read_text()))
    assert find_family(model.config, 61, kind).model_type == kind
    table = find_family(again, 61, kind).to_hf(again, vocab_size=61)
    assert table == find_family(model.config, 61, kind).to_hf(model.config, vocab_size=61)


# Case -> changes of which each must show.
MUTANTS = {
    "llama": {"rope.theta": 1e4, "arch.norm.eps": 0.3, "arch.mlp.activation": "gelu", "scales.attn_scale": 0.3},
    "llama-3.1": {"rope.llama3.low_freq_factor": 2.0, "rope.factor": 4.0, "rope.original_max_len": 32},
    "llama-linear": {"rope.factor": 2.0},
    "llama-dynamic": {"rope.factor": 2.0, "rope.original_max_len": 20},
    "mistral": {"arch.attn.window": 8},
    "mixtral": {"arch.moe.routing.renormalise": False, "arch.moe.experts_per_token": 1},
    "qwen2": {"arch.local.window": 7},
    "qwen2_moe": {"arch.moe.routing.renormalise": True},
    "qwen3_moe": {"arch.moe.routing.renormalise": False},
    "qwen3_next": {"rope.fraction": 0.5},
    "gemma": {"scales.embed_scale": 1.0, "arch.norm.offset": False, "arch.mlp.activation": "gelu"},
    "gemma2": {"arch.attn.softcap": None, "arch.head.softcap": None, "arch.layers": ("attn", "local")},
    "gemma3": {"arch.local.rope.theta": 1e6, "rope.factor": 1.0, "scales.attn_scale": None},
    "gemma4-e2b": {
        "arch.head.softcap": None,
        "arch.attn.v_norm": False,
        "arch.local.v_norm": False,
        "arch.local.window": 7,
        "arch.local.rope": None,
        "rope.fraction": 0.5,
        "scales.attn_scale": None,
        "scales.embed_scale": 1.0,
        "arch.mlp.activation": "silu",
        "arch.norm.offset": True,
    },
    "gemma4-31b": {"arch.attn.v_norm": False, "rope.fraction": 0.5},
    "gemma4-26b-a4b": {
        "arch.attn.v_norm": False,
        "arch.moe.activation": "silu",
        "arch.moe.routing.norm_eps": 0.3,
        "arch.moe.experts_per_token": 1,
    },
    "deepseek_v2": {
        "arch.moe.routing.scale": 1.0,
        "arch.moe.routing.groups.kept": 1,
        "arch.moe.routing.renormalise": True,
    },
    "deepseek_v3": {
        "arch.moe.routing.score": "softmax",
        "rope.yarn.mscale_all_dim": 1.0,
        "arch.moe.routing.groups.score": "max",
    },
    "gpt_oss": {"arch.moe.clamped.slope": 1.0, "arch.local.window": 7},
    "olmo": {"arch.attn.clip": None, "arch.norm.kind": "rms"},
    "olmo3": {"arch.local.rope": None},
    "olmoe": {"arch.attn.clip": None, "arch.moe.routing.renormalise": True},
    "phi": {"rope.fraction": 1.0, "arch.mlp.activation": "gelu"},
    "phi3": {"rope.factor": 8.0, "rope.original_max_len": 20, "arch.attn.window": None},
    "smollm3": {"arch.local.rope": None},
    "gpt2": {"arch.mlp.activation": "gelu"},
    "granite": {
        "scales.residual_mult": 1.0,
        "scales.attn_scale": None,
        "scales.logit_mult": 1.0,
        "scales.embed_scale": 1.0,
    },
    "cohere2": {"arch.attn.rope": None, "scales.logit_mult": 1.0},
    "llama4": {
        "arch.local.chunk": None,
        "arch.local.qk_norm": "none",
        "arch.attn.tuning": None,
        "arch.moe.routing.score": "softmax",
        "arch.moe.input_scaled": False,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_switch_that_is_wrong_shows(name, folder):
    case, expected = CASES[name]
    model = from_pretrained(folder(name))
    for path, value in MUTANTS[name].items():
        config = changed(model.config, path, value)
        mutant = tree.unflatten(_empty(config, case.vocab_size), tree.flatten(model))
        # Twice what parity allows.
        assert apart(logits(mutant, tokens(case.vocab_size))[:, POSITIONS], expected) > 4e-4, path


# Case -> end of a path -> what is wrong with these parameters, where no field of the config says it.
FACTORS = {
    "gemma4-e2b": {
        "layers/0/scale": np.ones_like,  # of a whole block
        "layers/4/scale": np.ones_like,
        "per_layer/embed/embedding": lambda x: x / 8**0.5,
        "per_layer/proj/kernel": lambda x: x * 32**0.5,
        "4/per_layer/norm/scale": lambda x: x * 2**0.5,
        "4/per_layer/gate/kernel": np.zeros_like,
    },
    "gemma4-26b-a4b": {
        "router/expert_scale": np.square,  # as if it were multiplied by twice
        "router/scale": lambda x: x * 32**0.5,
        "moe/experts/down/kernel": np.zeros_like,
        "/mlp/down/kernel": np.zeros_like,
        "moe_norm/scale": lambda x: x * 1.1,
        "moe_post_norm/scale": np.ones_like,
        "dense_post_norm/scale": np.ones_like,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_is_wrong_shows(name, folder):
    case, expected = CASES[name]
    model = from_pretrained(folder(name))
    for end, change in FACTORS[name].items():
        found = {path: leaf for path, leaf in tree.flatten(model).items() if path.endswith(end)}
        assert found, end
        wrong = tree.flatten(model) | {path: jnp.asarray(change(np.asarray(leaf))) for path, leaf in found.items()}
        mutant = tree.unflatten(_empty(model.config, case.vocab_size), wrong)
        assert apart(logits(mutant, tokens(case.vocab_size))[:, POSITIONS], expected) > 4e-4, end


@pytest.mark.slow
def test_it_shows_whose_keys_and_which_values_are_used(folder, monkeypatch):
    case, expected = CASES["gemma4-e2b"]
    right = layout.roles

    def first(mixers, sharing):
        """Let the first layer of its kind be the source, and not the last."""
        count = len(mixers) - sharing
        return right(mixers[:count][::-1] + mixers[count:], sharing)[:count][::-1] + ("shared",) * sharing

    with monkeypatch.context() as patched:
        patched.setattr(layout, "roles", first)
        mutant = from_pretrained(folder("gemma4-e2b"))
        assert [kind.role for kind in mutant.config.kinds[:3]] == ["source", "own", "source"]
        assert apart(logits(mutant, tokens(case.vocab_size))[:, POSITIONS], expected) > 4e-4
    assert [kind.role for kind in mutant.config.kinds[:3]] == ["own", "source", "source"]
    case, expected = CASES["gemma4-31b"]

    def normed(self, x, scope):
        """Take normalised keys for values."""
        key = self._turned(self.k(x), self.k_norm, scope)
        return key, self.k_norm(self._heads(self.k(x) if self.config.tied_values else self.v(x), scope))

    with monkeypatch.context() as patched:
        patched.setattr(Attention, "_key_value", normed)
        mutant = from_pretrained(folder("gemma4-31b"))
        assert apart(logits(mutant, tokens(case.vocab_size))[:, POSITIONS], expected) > 4e-4


def _empty(config, vocab_size):
    from flax import nnx

    return nnx.eval_shape(lambda: config.build(vocab_size=vocab_size, rngs=nnx.Rngs(0)))


# --- what does not fit


def tensors_of(name):
    from families import values

    shapes = CASES[name][0].shapes
    return {each: values(each, *rest) for each, rest in shapes.items()}


def rewritten(tmp_path, tensors, table):
    made = [(name, array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()]
    write_tensors(tmp_path / "model", made, files={"config.json": json.dumps(table).encode()}, overwrite=True)
    return tmp_path / "model"


def test_all_that_does_not_fit_is_listed(tmp_path):
    tensors, table = tensors_of("llama"), CASES["llama"][0].table
    whole = dict(tensors)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((3, 32), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    with pytest.raises(UserError, match="3 difference") as caught:
        from_pretrained(rewritten(tmp_path, tensors, table))
    for part in (
        "missing: model.layers.1.self_attn.q_proj.weight",
        "not in the model: model.layers.0.self_attn.q_proj.bias [32]",
        "model.layers.2.mlp.up_proj.weight: expected shape [40, 32], got [3, 32]",
    ):
        assert part in str(caught.value)
    for layers, text in ((5, "missing: model.layers.4"), (3, "not in the model: model.layers.3")):
        with pytest.raises(UserError, match=text):
            from_pretrained(rewritten(tmp_path, whole, {**table, "num_hidden_layers": layers}))


def test_a_head_that_is_not_tied_although_it_should_be(tmp_path):
    tensors, table = tensors_of("llama"), {**CASES["llama"][0].table, "tie_word_embeddings": True}
    with pytest.raises(UserError, match=r"ties the head to the embedding, but lm_head.weight is not"):
        from_pretrained(rewritten(tmp_path, tensors, table))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert from_pretrained(rewritten(tmp_path, tensors, table)).config.tied


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_other_prefixes_of_the_same_names(tmp_path, prefix):
    """As bare models and models that also see are written."""
    tensors = tensors_of("qwen3")
    moved = {prefix + name.removeprefix("model."): array for name, array in tensors.items()}
    if prefix:
        moved["vision_tower.patch.weight"] = np.zeros(3, np.float32)
    model = from_pretrained(rewritten(tmp_path, moved, CASES["qwen3"][0].table))
    np.testing.assert_array_equal(tree.flatten(model)["embed/embedding"], tensors["model.embed_tokens.weight"])


def test_layers_that_use_the_keys_of_others_may_have_some(tmp_path):
    """As in the files of whole models, which also see and hear; what else is too much is still an error."""
    tensors, table = tensors_of("gemma4-e2b"), CASES["gemma4-e2b"][0].table
    moved = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    moved["model.vision_tower.patch.weight"] = moved["model.embed_audio.proj.weight"] = np.zeros(3, np.float32)
    for name in ("k_proj", "v_proj", "k_norm"):
        moved[f"model.language_model.layers.5.self_attn.{name}.weight"] = np.zeros((8, 8), np.float32)
    whole = {"model_type": "gemma4", "text_config": table, "vision_config": {}, "tie_word_embeddings": True}
    model = from_pretrained(rewritten(tmp_path, moved, whole))
    assert model.config == registry.read_table(table)
    np.testing.assert_array_equal(tree.flatten(model)["embed/embedding"], tensors["model.embed_tokens.weight"])
    moved["model.language_model.layers.5.self_attn.o_norm.weight"] = np.zeros(8, np.float32)
    with pytest.raises(UserError, match=r"1 difference.*\n.*not in the model: .*layers.5.self_attn.o_norm"):
        from_pretrained(rewritten(tmp_path, moved, whole))


def test_gemma4_spells_wide_heads_in_two_ways():
    """transformers 5.24 lists them layer by layer; files that are older have two keys."""
    for name in ("gemma4-e2b", "gemma4-31b"):
        table = dict(CASES[name][0].table)
        given = table.pop("per_layer_config")
        heads = next(iter(given.values())).get("num_key_value_heads")
        old = {**table, "global_head_dim": 16, "num_global_key_value_heads": heads}
        assert registry.read_table(old) == registry.read_table(CASES[name][0].table)
    for wrong in ({"5": {"head_dim": 12}}, {"4": {"head_dim": 12}, "5": {"head_dim": 16}}, {"5": {"rope": 1}}):
        with pytest.raises(UserError, match=r"per_layer_config in config.json: expected head_dim"):
            registry.read_table({**table, "per_layer_config": {"0": {"head_dim": 9}, **wrong}})


def test_dtypes(tmp_path):
    """Each tensor keeps its own dtype, unless another is asked for."""
    import ml_dtypes

    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors_of("gpt_oss").items()}
    biases = [name for name in tensors if name.endswith("router.bias")]
    tensors |= {name: tensors_of("gpt_oss")[name] for name in biases}
    place = rewritten(tmp_path, tensors, CASES["gpt_oss"][0].table)
    model = from_pretrained(place)
    kept = {path: leaf.dtype.name for path, leaf in tree.flatten(model).items()}
    assert {dtype for path, dtype in kept.items() if path.endswith("router/bias")} == {"float32"}
    assert {dtype for path, dtype in kept.items() if not path.endswith("router/bias")} == {"bfloat16"}
    assert model.policy.compute == "bfloat16"
    save_pretrained(model, tmp_path / "again", family="gpt_oss")
    with open_tensors(tmp_path / "again") as again:
        assert all(again[name].read().tobytes() == array.tobytes() for name, array in tensors.items())
    wide = from_pretrained(place, dtype="f32", remat="block")
    assert {leaf.dtype.name for leaf in tree.flatten(wide).values()} == {"float32"}
    assert wide.config.remat == "block"


def test_what_cannot_be_read_says_why(tmp_path):
    table = CASES["llama"][0].table
    for changes, text in (
        ({"model_type": "lama"}, "model_type 'lama' in config.json is not known.*llama"),
        ({"quantization_config": {"quant_method": "awq"}}, r"the weights are quantised \(awq\)"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' in config.json is not known"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' in config.json is not known"),
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks hidden_size, vocab_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
    ):
        with pytest.raises(UserError, match=text):
            registry.read_table({**table, **changes})
    with pytest.raises(UserError, match=r"cannot read .*config.json: No such file"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        from_pretrained(tmp_path)


def test_both_spellings_of_rotary_positions():
    """What older writers say and what newer ones say is the same."""
    sizes = {name: value for name, value in CASES["gemma3"][0].table.items() if name != "rope_parameters"}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert registry.read_table({**sizes, **old}) == registry.read_table(CASES["gemma3"][0].table)
    sizes = {name: value for name, value in CASES["llama-3.1"][0].table.items() if name != "rope_parameters"}
    scaling = dict(CASES["llama-3.1"][0].table["rope_parameters"])
    old = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": {"type": scaling.pop("rope_type"), **scaling}}
    assert registry.read_table({**sizes, **old}) == registry.read_table(CASES["llama-3.1"][0].table)
    assert registry.read_table({**sizes, "rope_theta": 5e5, "rope_scaling": None}).rope.theta == 5e5


def test_a_model_that_no_family_can_say(tmp_path):
    model = from_pretrained(write(CASES["gemma2"][0], tmp_path / "model"))
    with pytest.raises(UserError, match=r"config.json of a llama model can say all of this model.*arch.head.softcap"):
        save_pretrained(model, tmp_path / "out", family="llama")
    with pytest.raises(UserError, match=r"'lama' is not known.*llama"):
        save_pretrained(model, tmp_path / "out", family="lama")
    assert find_family(model.config, 61).model_type == "gemma2"
