"""BERT, and the sentence encoders made from it: post-norm, token types."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from styrax.core import UserError
from styrax.models.encoder_config import EncoderConfig, Pool, Text
from styrax.models.families.encoders import (
    EncoderFamily,
    Table,
    blocks,
    classes,
    heads,
    pair,
    sizes,
    write_classes,
    write_sizes,
)
from styrax.models.hf.rules import Rule, linear, same


def _read(table: Table, names: Collection[str]) -> EncoderConfig:
    wrong = [key for key in ("is_decoder", "add_cross_attention") if table.get(key)]
    if wrong or table.get("position_embedding_type", "absolute") != "absolute":
        said = ", ".join(f"{key} = {table[key]!r}" for key in (*wrong, "position_embedding_type") if key in table)
        raise UserError(f"expected an encoder with absolute positions, got {said} in config.json")
    text = Text(
        vocab_size=table.get("vocab_size", 30_522),
        max_len=table.get("max_position_embeddings", 512),
        num_types=table.get("type_vocab_size", 2),
    )
    vector: dict[str, Any] = {"by": "cls", "dense": "tanh"} if "pooler.dense.weight" in names else {}
    pool = Pool(**vector, num_classes=classes(table, names))
    return EncoderConfig(input=text, **sizes(table, 1e-12, "gelu"), placement="sum", embed_norm=True, pool=pool)


def _write(config: EncoderConfig) -> dict[str, Any]:
    text, pool = config.input, config.pool
    assert isinstance(text, Text)
    name = "BertModel"
    if pool.num_classes:
        name = "BertForSequenceClassification" if pool.by == "cls" else "BertForTokenClassification"
    more = {"vocab_size": text.vocab_size, "max_position_embeddings": text.max_len, "type_vocab_size": text.num_types}
    return {"architectures": [name], **write_sizes(config), **more, **write_classes(config)}


def _rules(config: EncoderConfig) -> tuple[Rule, ...]:
    rules = [
        same("embeddings.word_embeddings.weight", "input/tokens/embedding"),
        same("embeddings.position_embeddings.weight", "input/positions/embedding"),
        same("embeddings.token_type_embeddings.weight", "input/types/embedding"),
        *pair("embeddings.LayerNorm", "embed_norm"),
    ]
    block = [
        *linear("attention.self.query", "attn/q", bias=True),
        *linear("attention.self.key", "attn/k", bias=True),
        *linear("attention.self.value", "attn/v", bias=True),
        *linear("attention.output.dense", "attn/o", bias=True),
        *pair("attention.output.LayerNorm", "attn_norm"),
        *linear("intermediate.dense", "mlp/up", bias=True),
        *linear("output.dense", "mlp/down", bias=True),
        *pair("output.LayerNorm", "mlp_norm"),
    ]
    rules += blocks(config, block, "encoder.layer")
    return tuple(rules + heads(config, "pooler.dense"))


BERT = EncoderFamily("bert", "bert.", _read, _write, _rules, ("cls.", "qa_outputs."), sentences=True)
