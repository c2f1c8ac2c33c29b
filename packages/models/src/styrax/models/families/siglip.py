"""SigLIP: two pre-norm towers, one pooled by attention, one at the last token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from styrax.models.encoder_config import EncoderConfig, Image, Pool, Text
from styrax.models.families.encoders import (
    EncoderFamily,
    Reshaped,
    Table,
    TowersFamily,
    blocks,
    image_of,
    pair,
    patches,
    sizes,
    write_image,
    write_sizes,
)
from styrax.models.hf.rules import Rule, heads_of, linear, same


def _read_vision(table: Table, names: Collection[str]) -> EncoderConfig:
    pool = Pool(by="map") if table.get("vision_use_head", True) else Pool()
    image = image_of(table, class_token=False)
    return EncoderConfig(input=image, **sizes(table, 1e-6, "gelu_pytorch_tanh"), pool=pool)


def _read_text(table: Table, names: Collection[str]) -> EncoderConfig:
    own, dim = table.get("hidden_size", 768), table.get("projection_size")
    pool = Pool(by="last", dense="linear", dim=None if dim in (None, own) else dim)
    text = Text(vocab_size=table.get("vocab_size", 32_000), max_len=table.get("max_position_embeddings", 64))
    return EncoderConfig(input=text, **sizes(table, 1e-6, "gelu_pytorch_tanh"), pool=pool)


def _write_vision(config: EncoderConfig) -> dict[str, Any]:
    assert isinstance(config.input, Image)
    table = {**write_sizes(config), **write_image(config.input), "vision_use_head": config.pool.by == "map"}
    return {"architectures": ["SiglipVisionModel"], **table}


def _write_text(config: EncoderConfig) -> dict[str, Any]:
    text = config.input
    assert isinstance(text, Text)
    more = {"vocab_size": text.vocab_size, "max_position_embeddings": text.max_len}
    more["projection_size"] = config.pool.dim or config.embed_dim
    return {"architectures": ["SiglipTextModel"], **write_sizes(config), **more}


def _layers(config: EncoderConfig) -> list[Rule]:
    block = [
        *pair("layer_norm1", "attn_norm"),
        *[rule for each in "qkv" for rule in linear(f"self_attn.{each}_proj", f"attn/{each}", bias=True)],
        *linear("self_attn.out_proj", "attn/o", bias=True),
        *pair("layer_norm2", "mlp_norm"),
        *linear("mlp.fc1", "mlp/up", bias=True),
        *linear("mlp.fc2", "mlp/down", bias=True),
    ]
    return blocks(config, block, "encoder.layers")


def _vision_rules(config: EncoderConfig) -> tuple[Rule, ...]:
    dim = config.embed_dim
    rules = [same("embeddings.position_embedding.weight", "input/positions/embedding")]
    rules += [*patches(config, "embeddings.patch_embedding"), *_layers(config)]
    rules += pair("post_layernorm", "final_norm")
    if config.pool.by != "map":
        return tuple(rules)
    index = tuple(heads_of(1, (dim, dim, dim)))
    head = [
        Reshaped("probe", ("probe",), whole=(1, 1, dim), flat=(dim,)),
        Rule("attention.in_proj_weight", tuple(f"attn/{each}/kernel" for each in "qkv"), index, turn=True),
        Rule("attention.in_proj_bias", tuple(f"attn/{each}/bias" for each in "qkv"), index),
        *linear("attention.out_proj", "attn/o", bias=True),
        *pair("layernorm", "norm"),
        *linear("mlp.fc1", "mlp/up", bias=True),
        *linear("mlp.fc2", "mlp/down", bias=True),
    ]
    return tuple(rules + [rule.within("head.", "pool/") for rule in head])


def _text_rules(config: EncoderConfig) -> tuple[Rule, ...]:
    return (
        same("embeddings.token_embedding.weight", "input/tokens/embedding"),
        same("embeddings.position_embedding.weight", "input/positions/embedding"),
        *_layers(config),
        *pair("final_layer_norm", "final_norm"),
        *(linear("head", "pool/dense", bias=True) if config.pool.dense != "none" else []),
    )


SIGLIP_VISION = EncoderFamily("siglip_vision_model", "vision_model.", _read_vision, _write_vision, _vision_rules)
SIGLIP_TEXT = EncoderFamily("siglip_text_model", "text_model.", _read_text, _write_text, _text_rules)
SIGLIP = TowersFamily(
    "siglip",
    "SiglipModel",
    {"image": SIGLIP_VISION, "text": SIGLIP_TEXT},
    {"image": "vision_config", "text": "text_config"},
    (same("logit_scale", "logit_scale"), same("logit_bias", "logit_bias")),
)
