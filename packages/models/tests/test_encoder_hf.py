"""Encoders from and into folders of transformers and sentence-transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError, tree
from styrax.core.mesh import MeshConfig
from styrax.models import Encoder, EncoderConfig, TowersConfig, encoder_from_pretrained, save_encoder
from styrax.models.encoder_config import Image, Pool, Text
from styrax.models.hf import open_tensors, write_tensors
from styrax.models.hf.save_encoder import find_encoder_family

# What transformers 5.24 writes for the sizes below: names within a layer and outside of layers, with shapes.
SQUARE, NORM, UP, DOWN = (8, 8), (8,), (12, 8), (8, 12)
BERT_LAYER = {
    "attention.self.query": SQUARE,
    "attention.self.key": SQUARE,
    "attention.self.value": SQUARE,
    "attention.output.dense": SQUARE,
    "attention.output.LayerNorm": NORM,
    "intermediate.dense": UP,
    "output.dense": DOWN,
    "output.LayerNorm": NORM,
}
BERT_REST = {
    "embeddings.word_embeddings.weight": (11, 8),
    "embeddings.position_embeddings.weight": (7, 8),
    "embeddings.token_type_embeddings.weight": (2, 8),
    "embeddings.LayerNorm": NORM,
}
VIT_LAYER = {
    "attention.attention.query": SQUARE,
    "attention.attention.key": SQUARE,
    "attention.attention.value": SQUARE,
    "attention.output.dense": SQUARE,
    "layernorm_before": NORM,
    "layernorm_after": NORM,
    "intermediate.dense": UP,
    "output.dense": DOWN,
}
VIT_REST = {
    "embeddings.cls_token": (1, 1, 8),
    "embeddings.position_embeddings": (1, 7, 8),
    "embeddings.patch_embeddings.projection": (8, 3, 2, 2),
    "layernorm": NORM,
}
SIGLIP_LAYER = {
    "self_attn.q_proj": SQUARE,
    "self_attn.k_proj": SQUARE,
    "self_attn.v_proj": SQUARE,
    "self_attn.out_proj": SQUARE,
    "layer_norm1": NORM,
    "layer_norm2": NORM,
    "mlp.fc1": UP,
    "mlp.fc2": DOWN,
}
SEEN_REST = {
    "embeddings.patch_embedding": (8, 3, 2, 2),
    "embeddings.position_embedding.weight": (4, 8),
    "post_layernorm": NORM,
    "head.probe": (1, 1, 8),
    "head.attention.in_proj_weight": (24, 8),
    "head.attention.in_proj_bias": (24,),
    "head.attention.out_proj": SQUARE,
    "head.layernorm": NORM,
    "head.mlp.fc1": UP,
    "head.mlp.fc2": DOWN,
}
READ_REST = {
    "embeddings.token_embedding.weight": (11, 8),
    "embeddings.position_embedding.weight": (7, 8),
    "final_layer_norm": NORM,
    "head": (6, 8),
}
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 11, "max_position_embeddings": 7}
BERT, VIT = (
    {"model_type": "bert", **SIZES, **TEXT},
    {"model_type": "vit", **SIZES, "image_size": [4, 6], "patch_size": 2},
)
SEEN = {"model_type": "siglip_vision_model", **SIZES, "image_size": 4, "patch_size": 2}
READ = {"model_type": "siglip_text_model", **SIZES, **TEXT, "projection_size": 6}
SEEN_8 = {**READ_REST, "head": (8, 8)}
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}}


def shapes(rest, layers="", layer=()):
    """Write out names: what has no suffix of its own has a weight and a bias."""
    whole = {**rest, **{f"{layers}.{n}.{name}": shape for n in range(2) for name, shape in dict(layer).items()}}
    bare = ("weight", "bias", "cls_token", "position_embeddings", "probe", "in_proj_weight", "in_proj_bias")
    found = {}
    for name, shape in whole.items():
        if name.endswith(bare):
            found[name] = shape
        else:
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def under(prefix, names):
    return {prefix + name: shape for name, shape in names.items()}


BERT_NAMES, VIT_NAMES = shapes(BERT_REST, "encoder.layer", BERT_LAYER), shapes(VIT_REST, "encoder.layer", VIT_LAYER)
POOLER, CLASSIFIER = shapes({"pooler.dense": (8, 8)}), shapes({"classifier": (3, 8)})
SEEN_NAMES = shapes(SEEN_REST, "encoder.layers", SIGLIP_LAYER)
CASES = {
    "bert": (BERT, BERT_NAMES | POOLER, "BertModel"),
    "bert, no vector": (BERT, BERT_NAMES, "BertModel"),
    "bert, classes": (
        {**BERT, **LABELS},
        under("bert.", BERT_NAMES | POOLER) | CLASSIFIER,
        "BertForSequenceClassification",
    ),
    "bert, classes of tokens": (
        {**BERT, **LABELS},
        under("bert.", BERT_NAMES) | CLASSIFIER,
        "BertForTokenClassification",
    ),
    "vit": ({**VIT, "qkv_bias": True}, VIT_NAMES | POOLER, "ViTModel"),
    "vit, classes": ({**VIT, **LABELS}, under("vit.", VIT_NAMES) | CLASSIFIER, "ViTForImageClassification"),
    "siglip vision": (SEEN, SEEN_NAMES, "SiglipVisionModel"),
    "siglip text": (READ, shapes(READ_REST, "encoder.layers", SIGLIP_LAYER), "SiglipTextModel"),
    "siglip": (
        {"model_type": "siglip", "vision_config": SEEN, "text_config": {**READ, "projection_size": 8}},
        under("vision_model.", SEEN_NAMES)
        | under("text_model.", shapes(SEEN_8, "encoder.layers", SIGLIP_LAYER))
        | {"logit_scale": (1,), "logit_bias": (1,)},
        "SiglipModel",
    ),
}


def write(folder, table, names, **files):
    """Write a folder with random tensors, and give them."""
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape).astype("float32") for name, shape in names.items()}
    items = [(name, each.shape, each.dtype, lambda each=each: each) for name, each in made.items()]
    write_tensors(folder, items, files={"config.json": json.dumps(table).encode(), **files})
    return made


def read(folder):
    with open_tensors(folder) as tensors:
        return {name: np.array(tensor.read()) for name, tensor in tensors.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert (leaf.shape, leaf.dtype, leaf.tobytes()) == (other[name].shape, other[name].dtype, other[name].tobytes())


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, tmp_path):
    """Every tensor comes back under its name, byte for byte, and so does what config.json says."""
    table, names, architecture = CASES[case]
    made = write(tmp_path / "theirs", table, names)
    model = encoder_from_pretrained(tmp_path / "theirs")
    axes = model.config.logical_axes()
    assert {path: leaf.ndim for path, leaf in tree.flatten(model).items()} == {k: len(v) for k, v in axes.items()}
    save_encoder(model, tmp_path / "ours", extra={"pad_token_id": 0})
    same(read(tmp_path / "ours"), made)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == [architecture]
    assert written["model_type"] == table["model_type"]
    assert all(written[key] == table[key] for key in table.keys() & SIZES.keys())
    again = encoder_from_pretrained(tmp_path / "ours")
    assert again.config == model.config
    same({k: np.asarray(v) for k, v in tree.flatten(again).items()}, tree.flatten(model))


def test_configs(tmp_path):
    """What config.json leaves out has the defaults of transformers."""
    table, names, _ = CASES["siglip"]
    write(tmp_path / "it", table, names)
    model = encoder_from_pretrained(tmp_path / "it", remat="block", dropout=0.1)
    assert isinstance(model.config, TowersConfig)
    seen, text = model.config.image, model.config.text
    assert (seen.input, seen.pool) == (Image(height=4, width=4, patch=2), Pool(by="map"))
    assert (text.input, text.pool) == (Text(vocab_size=11, max_len=7), Pool(by="last", dense="linear"))
    assert seen.activation == text.activation == "gelu_tanh"
    assert (seen.norm.eps, seen.norm.kind, seen.norm.bias, seen.placement) == (1e-6, "layer", True, "pre")
    assert (seen.remat, text.dropout) == ("block", 0.1)
    for tower in ("image", "text"):
        one = encoder_from_pretrained(tmp_path / "it", tower=tower)
        assert isinstance(one, Encoder)
        same({k: np.asarray(v) for k, v in tree.flatten(one).items()}, tree.flatten(getattr(model, tower)))


OTHER_HEADS = {"cls.predictions.bias": (11,), "bert.embeddings.position_ids": (1, 7), "cls.seq_relationship.bias": (2,)}


def test_an_old_checkpoint_of_masked_words(tmp_path):
    """Prefix, `gamma` and `beta`, heads for other ends; as the first published one is written to this day."""
    names = under("bert.", BERT_NAMES | POOLER)
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): at for name, at in names.items()
    }
    made = write(tmp_path / "old", BERT, {**old, **OTHER_HEADS})
    model = encoder_from_pretrained(tmp_path / "old")
    assert model.config.pool == Pool(by="cls", dense="tanh")
    flat = tree.flatten(model)
    np.testing.assert_array_equal(flat["embed_norm/scale"], made["bert.embeddings.LayerNorm.gamma"])
    np.testing.assert_array_equal(flat["layers/mlp_norm/bias"][1], made["bert.encoder.layer.1.output.LayerNorm.beta"])
    assert encoder_from_pretrained(tmp_path / "old", pool=Pool(by="mean")).config.pool.by == "mean"


def sentence(folder, modes, *, normalise=True, more=()):
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else []), *more]
    paths = ["", "1_Pooling", "2_Normalize", "3_Dense"]
    modules = [{"idx": n, "path": path, "type": f"x.{kind}"} for n, (path, kind) in enumerate(zip(paths, kinds))]
    made = write(folder, BERT, BERT_NAMES | POOLER, **{"modules.json": json.dumps(modules).encode()})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    return made


@pytest.mark.parametrize(
    ("modes", "normalise", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True, Pool(by="mean", normalise=True)),
        ({"pooling_mode_cls_token": True}, False, Pool(by="cls")),
        ({"pooling_mode_lasttoken": True}, True, Pool(by="last", normalise=True)),
        ({"pooling_mode": "mean"}, False, Pool(by="mean")),
    ],
)
def test_sentence_encoders(modes, normalise, expected, tmp_path):
    made = sentence(tmp_path / "it", modes, normalise=normalise)
    model = encoder_from_pretrained(tmp_path / "it")
    assert model.config.pool == expected
    save_encoder(model, tmp_path / "again")
    assert encoder_from_pretrained(tmp_path / "again").config == model.config
    same(read(tmp_path / "again"), {name: leaf for name, leaf in made.items() if name not in POOLER})


@pytest.mark.parametrize(
    ("modes", "more", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "expected one way to pool of .* got .'max_tokens'."),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "expected one way to pool"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "got also Dense"),
    ],
)
def test_other_sentence_encoders_are_refused(modes, more, message, tmp_path):
    sentence(tmp_path / "it", modes, more=more)
    with pytest.raises(UserError, match=message):
        encoder_from_pretrained(tmp_path / "it")


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"model_type": "bart"}, ["model_type 'bart' in config.json is no encoder", "did you mean 'bert'"]),
        ({"hidden_act": "mish"}, ["hidden_act 'mish' in config.json is not known"]),
        ({"is_decoder": True}, ["is_decoder = True"]),
        ({"position_embedding_type": "relative_key"}, ["position_embedding_type = 'relative_key'"]),
        (
            {"num_attention_heads": 3},
            ["config.json of a bert model", "embed_dim: expected a multiple of num_heads = 3"],
        ),
        ({"vocab_size": 12, "num_hidden_layers": 1}, ["expected shape [12, 8], got [11, 8]", "layer.1.output.dense"]),
    ],
)
def test_folders_that_do_not_fit(changes, messages, tmp_path):
    write(tmp_path / "it", {**BERT, **changes}, BERT_NAMES)
    with pytest.raises(UserError) as caught:
        encoder_from_pretrained(tmp_path / "it")
    assert all(message in str(caught.value) for message in messages)


def test_wrong_arguments(tmp_path):
    write(tmp_path / "it", BERT, BERT_NAMES)
    with pytest.raises(UserError, match="tower: expected none for a bert model, got 'text'"):
        encoder_from_pretrained(tmp_path / "it", tower="text")
    with pytest.raises(UserError, match="dropout: expected 0 <= dropout < 1"):
        encoder_from_pretrained(tmp_path / "it", dropout=1.0)
    with pytest.raises(UserError, match="did you mean 'bert'"):
        find_encoder_family(EncoderConfig(), "brt")


@pytest.mark.parametrize(
    ("fields", "family", "lost"),
    [
        ({}, "bert", ["cannot say", "placement = 'pre'", "input/types/embedding"]),
        ({"embed_norm": True}, None, ["no known family can say", "placement = 'pre'"]),
        ({"input": Image(), "pool": Pool(by="mean")}, "siglip_vision_model", ["pool"]),
        ({"input": Image(patch_bias=False)}, "siglip_vision_model", ["patch_bias"]),
    ],
)
def test_what_no_config_json_can_say_is_refused(fields, family, lost):
    with pytest.raises(UserError, match="say all of this encoder") as caught:
        find_encoder_family(EncoderConfig(**fields), family)
    assert all(each in str(caught.value) for each in lost)


def test_dtypes_and_mesh(tmp_path):
    made = write(tmp_path / "it", *CASES["siglip"][:2])
    mesh = MeshConfig(axes={"fsdp": -1, "tensor": 1}).build()
    model = encoder_from_pretrained(tmp_path / "it", dtype="bf16", mesh=mesh)
    flat = tree.flatten(model)
    assert {leaf.dtype for leaf in flat.values()} == {jnp.dtype("bfloat16")}
    assert flat["text/layers/attn/q/kernel"].sharding.spec[1] == "fsdp"
    expected = made["text_model.embeddings.token_embedding.weight"].astype("bfloat16")
    np.testing.assert_array_equal(flat["text/input/tokens/embedding"], expected)
