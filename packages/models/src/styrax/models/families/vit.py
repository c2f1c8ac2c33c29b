"""ViT: pre-norm over patches and a class token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from styrax.core import UserError
from styrax.models.encoder_config import EncoderConfig, Image, Pool
from styrax.models.families.encoders import (
    EncoderFamily,
    Reshaped,
    Table,
    blocks,
    classes,
    heads,
    image_of,
    pair,
    patches,
    sizes,
    write_classes,
    write_image,
    write_sizes,
)
from styrax.models.hf.rules import Rule, linear


def _read(table: Table, names: Collection[str]) -> EncoderConfig:
    num_classes = classes(table, names)
    pool = Pool(by="cls", num_classes=num_classes) if num_classes else Pool()
    if "pooler.dense.weight" in names:
        act, dim = table.get("pooler_act", "tanh"), table.get("pooler_output_size")
        if act not in ("tanh", "linear"):
            raise UserError(f"pooler_act in config.json: expected 'tanh' or 'linear', got {act!r}")
        own = table.get("hidden_size", 768)
        pool = Pool(by="cls", dense=act, dim=None if dim in (None, own) else dim, num_classes=num_classes)
    bias = table.get("qkv_bias", True)
    image = image_of(table, class_token=True)
    return EncoderConfig(input=image, **sizes(table, 1e-12, "gelu"), qkv_bias=bias, pool=pool)


def _write(config: EncoderConfig) -> dict[str, Any]:
    image, pool = config.input, config.pool
    assert isinstance(image, Image)
    table = {**write_sizes(config), **write_image(image), "qkv_bias": config.qkv_bias}
    if pool.dense != "none":
        table |= {"pooler_act": pool.dense, "pooler_output_size": pool.dim or config.embed_dim}
    name = "ViTForImageClassification" if pool.num_classes else "ViTModel"
    return {"architectures": [name], **table, **write_classes(config)}


def _rules(config: EncoderConfig) -> tuple[Rule, ...]:
    dim = config.embed_dim
    assert isinstance(config.input, Image)
    flat = (config.input.tokens, dim)
    rules = [
        Reshaped("embeddings.cls_token", ("input/class_token",), whole=(1, 1, dim), flat=(dim,)),
        Reshaped("embeddings.position_embeddings", ("input/positions/embedding",), whole=(1, *flat), flat=flat),
        *patches(config, "embeddings.patch_embeddings.projection"),
    ]
    block = [
        *pair("layernorm_before", "attn_norm"),
        *linear("attention.attention.query", "attn/q", bias=config.qkv_bias),
        *linear("attention.attention.key", "attn/k", bias=config.qkv_bias),
        *linear("attention.attention.value", "attn/v", bias=config.qkv_bias),
        *linear("attention.output.dense", "attn/o", bias=True),
        *pair("layernorm_after", "mlp_norm"),
        *linear("intermediate.dense", "mlp/up", bias=True),
        *linear("output.dense", "mlp/down", bias=True),
    ]
    rules += [*blocks(config, block, "encoder.layer"), *pair("layernorm", "final_norm")]
    return tuple(rules + heads(config, "pooler.dense"))


VIT = EncoderFamily("vit", "vit.", _read, _write, _rules, ("decoder.", "embeddings.mask_token"))
